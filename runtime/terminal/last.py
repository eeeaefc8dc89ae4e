"""The bundles that were exported here: the last one for vtx-run, all of them for vtx-list."""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import date
from pathlib import Path

from vtx.runtime.errors import RequestError
from vtx.runtime.process import home
from vtx.runtime.terminal.console import note

KEPT = 100  # bundles whose export is remembered


def _file() -> Path:
    return home("XDG_STATE_HOME", ".local/state") / "vtx" / "last-bundle"


def _history() -> Path:
    return _file().with_name("exported-bundles")


def remembered() -> Path | None:
    try:
        return Path(os.fsdecode(_file().read_bytes().strip()))
    except OSError:
        return None


def exported() -> list[Path]:
    """The bundles that were exported here, the last one first; some may be gone."""
    try:
        names = _history().read_bytes().split(b"\0")
    except OSError:
        return []
    return [Path(os.fsdecode(name)) for name in reversed(names) if name]


def first_today(text: str) -> bool:
    """Return False if a terminal has shown this text today; where stderr is none, always True."""
    if not sys.stderr.isatty():
        return True
    file = _file().with_name("shown-today")
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    today = date.today().isoformat()
    try:
        hints = file.read_text(encoding="utf-8").split() if file.exists() else []
        hints = hints if hints[:1] == [today] else [today]
        if key in hints:
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*hints, key]), encoding="utf-8")
    except (OSError, ValueError):
        pass  # shown once more than needed
    return True


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
        former = [other for other in exported()[:KEPT] if other != folder]
        _history().write_bytes(b"\0".join(map(os.fsencode, [*reversed(former), folder])))
    except OSError:
        note(f"this bundle could not be recorded as the last one; name it with --bundle {folder}")
