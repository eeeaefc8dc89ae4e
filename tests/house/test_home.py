"""Tests leave what the user's commands remember alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_last_bundle_of_a_test_or_its_child_is_not_the_user_s() -> None:
    asked = "from vtx.runtime.process import home; print(home('XDG_STATE_HOME', '.local/state'))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    assert "vtx-tests-" in Path(found).name
    assert not Path(found).is_relative_to(Path.home() / ".local")
