"""Result files, written whole or not at all; locks that end with the process that holds them, killed or not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.files import read_named, replacing
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import CheckpointError, ExportError, RequestError, VtxError


def check_folder(path: Path) -> None:
    """Raise RequestError if a file cannot be written to `path`: before the work, not after it."""
    folder = path.parent
    if path.is_dir():
        raise RequestError(f"cannot write {path}: it is a directory; name a file")
    if not folder.is_dir():
        raise RequestError(f"cannot write {path}: {folder} is not a directory; make it, or name another file")
    if not os.access(folder, os.W_OK):
        raise RequestError(f"cannot write {path}: {folder} may not be written to; name another file")


def read_json_object(path: Path, limit: int, *, error: type[VtxError] = CheckpointError) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes from a file that the user named; raises `error` for anything else."""
    return json_object(read_named(path, limit, error=error), path.name, error=error)


def json_object(content: bytes, name: str, *, error: type[VtxError] = CheckpointError) -> dict[str, Any]:
    """Parse the JSON object in the file `name`; raises `error` for anything else."""
    value = parse_json(content, name, error=error)
    if not isinstance(value, dict):
        raise error(f"{name} is a JSON {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path`, which is replaced only once complete. Raises ExportError."""
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as e:
        raise ExportError(f"cannot write {path} ({e.strerror}); free some space or name another directory") from e


def open_directory(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def locked(descriptor: int, *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed; return False if another process holds the lock.

    Several may hold it if all are `shared`. Raises OSError on a file system without locks.
    """
    import fcntl  # which Windows does not have

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
