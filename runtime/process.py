"""Whether this process is a command of vtx, so that nobody else uses its engines, or an application's."""

from __future__ import annotations

import threading

_owned = threading.Event()


def own_process() -> None:
    """Say that this process is a command's. It is, until it ends."""
    _owned.set()


def owns_process() -> bool:
    return _owned.is_set()
