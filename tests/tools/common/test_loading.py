"""Loading a bundle is said where somebody waits for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vtx.tools.common import loading
from vtx.tools.common.loading import Loading


@pytest.mark.parametrize(("seconds", "terminal", "said"), [(0.5, True, True), (0.0, True, False), (0.5, False, False)])
def test_a_terminal_says_what_is_loaded_if_it_takes_long(
    seconds: float, terminal: bool, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(bundle: Path, **_: Any) -> Path:
        time.sleep(seconds)
        return bundle

    monkeypatch.setattr(loading, "SLOW", 0.05)
    monkeypatch.setattr("vtx.runtime.api.load.load", load)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert Loading().load(Path("some bundle")) == Path("some bundle")
    time.sleep(0.2)
    assert capsys.readouterr().err == ("loading some bundle\n" if said else "")
