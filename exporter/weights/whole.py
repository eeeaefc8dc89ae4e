"""Weight files that are taken as they are: cloned, linked or copied, and checked while they are read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.weights.plan import WeightEntry, WeightFile
from vtx.runtime.bundle.safetensors import DTYPES, open_data
from vtx.runtime.errors import CheckpointError

BLOCK = 1 << 23  # bytes that are read at a time
FICLONE = 0x40049409  # Linux: let a file share another's blocks, copied when one of them is written
Report = Callable[[int], None]


def take_whole(file: WeightFile, target: Path, pool: ThreadPoolExecutor, report: Report) -> str:
    """Link the file, or copy it while it is read to be checked. Returns its SHA-256."""
    digest = hashlib.sha256()
    target.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_data(file.entries[0].source))
        copy = None if shared(source, file.source, target) else stack.enter_context(target.open("wb"))
        hashing: Future[None] | None = None
        for entry, size in _segments(file):
            for count in pieces(size):
                raw = _read(source, count, file.source)
                if len(raw) != count:
                    raise CheckpointError(f"{file.source.name} has shrunk while it was read; download it again")
                if hashing:
                    hashing.result()
                hashing = pool.submit(digest.update, raw)
                if entry:
                    check_finite(np.frombuffer(raw, DTYPES[entry.dtype][1]), entry.name)
                if copy:
                    copy.write(raw)
                report(count)
        if hashing:
            hashing.result()
    return digest.hexdigest()


def _read(source: BinaryIO, count: int, path: Path) -> bytes:
    try:
        return source.read(count)
    except OSError as e:
        raise CheckpointError(f"cannot read {path} ({e.strerror}); check the disk, or download it again") from e


def shared(source: BinaryIO, path: Path, target: Path) -> bool:
    """Let `target` be the same bytes on the disk: a clone where the file system has them, else a hard link.

    `source` is `path`, opened; a link to another file that has replaced it is not kept.
    """
    try:
        with target.open("xb") as clone:
            fcntl.ioctl(clone.fileno(), FICLONE, source.fileno())
    except OSError:
        target.unlink(missing_ok=True)
    else:
        return True
    try:
        os.link(path.resolve(), target)
    except OSError:
        return False
    if os.path.samestat(os.lstat(target), os.fstat(source.fileno())):
        return True
    target.unlink()
    return False


def _segments(file: WeightFile) -> Iterator[tuple[WeightEntry | None, int]]:
    """A file from its first byte to its last: the tensors that are used, and the gaps between them (None), in bytes."""
    at = 0
    for entry in sorted(file.entries, key=lambda e: e.source.offset):
        yield None, entry.source.offset - at
        yield entry, entry.source.nbytes
        at = entry.source.offset + entry.source.nbytes
    yield None, file.size - at


def pieces(size: int) -> Iterator[int]:
    """So many bytes in blocks."""
    for start in range(0, size, BLOCK):
        yield min(BLOCK, size - start)
