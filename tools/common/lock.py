"""Locks on files and directories that end with the process that holds them, killed or not."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def open_directory(folder: Path) -> int:
    """A descriptor of a directory, to be locked. Raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def locked(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed; return False if another process holds the lock.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
