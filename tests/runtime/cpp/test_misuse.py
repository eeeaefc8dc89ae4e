"""Calls that libvtx does not allow, and memory that runs out: refused, and the model can be used on.

A program in C++ makes the calls, so that `make cpp-sanitize` watches them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cpp import needs_cpp, run
from tests.support.exported import Models
from tests.support.tiny import random_image

pytestmark = [needs_cpp, pytest.mark.slow]


def test_misuse_is_refused_and_the_model_can_be_used_on(models: Models, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "a.png")
    done = run("misuse", models().bundle.folder, tmp_path / "a.png")
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = re.fullmatch(rb"(\d+) times out of memory, all refused\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 50
