"""The cache of bundles that commands export by themselves; those used least recently leave when it is full."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vtx.runtime.errors import ExportError
from vtx.runtime.process import home
from vtx.runtime.units import parse_size, size
from vtx.tools.common.files import locked, open_directory

LIMIT = "VTX_CACHE_LIMIT"


class CachedBundle(NamedTuple):
    """A bundle of the cache, or the hidden directory of an interrupted export; `used` is the time of its last use."""

    folder: Path
    bytes: int
    used: float


def folder() -> Path:
    return home("XDG_CACHE_HOME", ".cache") / "vtx" / "bundles"


def limit() -> int:
    """The bytes that the cache may hold. Raises RequestError."""
    return parse_size(os.environ.get(LIMIT) or "40GB", LIMIT)


def entries() -> list[CachedBundle]:
    """Everything in the cache, what was used least recently first."""
    entries_of = []
    for path in folder().glob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # another process removes it
            if path.is_dir():
                total = sum(file.lstat().st_size for file in path.rglob("*"))
                entries_of.append(CachedBundle(path, total, path.stat().st_mtime))
    return sorted(entries_of, key=lambda entry: entry.used)


def hold(bundle: Path) -> int | None:
    """A descriptor that keeps a bundle from being removed while it is open; None if there is no such bundle."""
    if not os.path.isfile(bundle / "vtx.json"):
        return None
    descriptor = open_directory(bundle)
    with suppress(OSError):
        locked(descriptor, wait=True, shared=True)
    if os.path.isfile(bundle / "vtx.json"):
        with suppress(OSError):
            os.utime(bundle)
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def adding(bundle: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from adding the same bundle. Raises ExportError if the cache cannot be written to."""
    try:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        lock = bundle.with_name(f".{bundle.name}.lock").open("w")
    except OSError as e:
        raise ExportError(f"cannot write to the cache {bundle.parent} ({e.strerror}); set XDG_CACHE_HOME") from e
    with lock:
        with suppress(OSError):
            if not locked(lock.fileno()):
                say(f"another process makes {bundle.name}; waiting for it")
                locked(lock.fileno(), wait=True)
        yield


def trim(allowed: int, needed: int = 0, for_bundle: Path | None = None) -> Iterator[str]:
    """Remove what was used least recently until `needed` more bytes fit into `allowed`; yield the names.

    What an interrupted export of `for_bundle` left stays. Raises ExportError if what is in use leaves no room.
    """
    prefix = f".{for_bundle.name}.partial-" if for_bundle else "/"
    present = [entry for entry in entries() if not entry.folder.name.startswith(prefix)]
    used_bytes = sum(entry.bytes for entry in present)
    for entry in present:
        if needed <= allowed < used_bytes + needed and remove(entry.folder):
            used_bytes -= entry.bytes
            yield entry.folder.name
    if used_bytes + needed > allowed:
        in_use = f", and {size(used_bytes)} are in use" if needed <= allowed else ""
        what = f"{size(needed)} for this bundle are too much for the cache" if needed else "the cache is too large"
        raise ExportError(
            f"{what}: its limit is {size(allowed)}{in_use}; raise {LIMIT}, or choose a smaller --precision"
        )


def remove(bundle: Path) -> bool:
    """Remove a bundle; return False if a process uses it, or the file system has no locks that say so."""
    with suppress(OSError):
        descriptor = open_directory(bundle)
        try:
            if locked(descriptor):
                shutil.rmtree(bundle.rename(bundle.with_name(f".{bundle.name}.removed-{secrets.token_hex(4)}")))
                return True
        finally:
            os.close(descriptor)
    return False
