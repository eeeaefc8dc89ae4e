"""The process: a command of vtx, which may settle things for all of it, or an application; its user's directories."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTED = time.monotonic()  # of a command: this is imported before anything that takes long
_owned = threading.Event()
_succeeded = threading.Event()


def own_process() -> None:
    """Mark this process as a command, until it ends."""
    _owned.set()


def owns_process() -> bool:
    return _owned.is_set()


def home(variable: str, default: str) -> Path:
    """The user's directory that an environment variable names, or that path below the home directory."""
    return Path(os.environ.get(variable) or Path.home() / default)


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection: imports and a load make many objects that stay, and no cycles.

    In a process of our own, later collections skip these objects too.
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
    """End a successful process at once, after all exit handlers that are registered later.

    The system takes back memory, files and threads at once; the interpreter would do so object by object.
    """

    def leave() -> None:
        if _succeeded.is_set():
            sys.stdout.flush()
            os._exit(0)

    atexit.register(leave)


def mark_success() -> None:
    """Mark this process, which is our own, as successful."""
    _succeeded.set()
