"""Whether this process is a command of vtx, so that nobody else uses its engines, or an application's; how it ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_owned = threading.Event()
_succeeded = threading.Event()


def own_process() -> None:
    """Say that this process is a command's. It is, until it ends."""
    _owned.set()


def owns_process() -> bool:
    return _owned.is_set()


@contextmanager
def without_collections() -> Iterator[None]:
    """No search for garbage meanwhile: imports and a load make many objects that stay, and no circles.

    In a process of our own they are not looked through later either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if owns_process():
            gc.freeze()
        if enabled:
            gc.enable()


def leave_on_success() -> None:
    """Once the process ends well, after all that is registered later for its end, leave it as it is.

    The system takes back memory, files and threads in one go, which the interpreter would do object by object.
    """
    atexit.register(_leave)


def succeed() -> None:
    """Say that this process, which is ours, ends well."""
    _succeeded.set()


def _leave() -> None:
    if _succeeded.is_set():
        sys.stdout.flush()
        os._exit(0)
