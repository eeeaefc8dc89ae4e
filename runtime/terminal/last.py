"""The bundle that was exported last, remembered for vtx-run."""

from __future__ import annotations

import os
from pathlib import Path

from vtx.runtime.errors import RequestError
from vtx.runtime.terminal.console import note


def home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def _file() -> Path:
    return home("XDG_STATE_HOME", ".local/state") / "vtx" / "last-bundle"


def remembered() -> Path | None:
    try:
        return Path(os.fsdecode(_file().read_bytes().strip()))
    except OSError:
        return None


def last_bundle(named: str | None) -> Path:
    """The bundle that was named, else the one exported last. Raises RequestError if there is neither."""
    last = Path(named) if named else remembered()
    if last is None:
        raise RequestError("no bundle was named and none was exported yet; name one, or run vtx-export first")
    return last


def remember(folder: Path) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_bytes(os.fsencode(folder))
    except OSError:
        note(f"this bundle could not be recorded as the last one; name it with --bundle {folder}")
