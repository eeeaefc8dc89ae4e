"""The start of every command: from the first import on, Ctrl-C ends it with one line and exit code 130."""

from __future__ import annotations

from vtx.runtime.interrupts import leave_at_interrupt

TYPE_CHECKING = False  # typing is imported once an interrupt is harmless
if TYPE_CHECKING:
    from typing import Any


def __getattr__(name: str) -> Any:
    """The command of that name, as the package's scripts import it; importing it can be interrupted."""
    if name.startswith("__"):
        raise AttributeError(f"module 'vtx.start' has no attribute {name!r}")
    leave_at_interrupt()
    from vtx import cli

    return getattr(cli, name)
