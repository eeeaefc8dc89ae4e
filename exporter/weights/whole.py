"""Weight files that are used unchanged: cloned, linked or copied, and checked while they are read."""

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


def take_whole(file: WeightFile, target: Path, pool: ThreadPoolExecutor, report: Callable[[int], None]) -> str:
    """Link the file, or copy it while it is read to be checked. Returns its SHA-256."""
    digest = hashlib.sha256()
    target.unlink(missing_ok=True)
    segments: list[tuple[WeightEntry | None, int]] = []  # the used tensors and the gaps between them (None), in bytes
    at = 0
    for entry in sorted(file.entries, key=lambda e: e.source.offset):
        segments += (None, entry.source.offset - at), (entry, entry.source.nbytes)
        at = entry.source.offset + entry.source.nbytes
    segments.append((None, file.size - at))
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_data(file.entries[0].source))
        copy = None if shared(source, file.source, target) else stack.enter_context(target.open("wb"))
        hashing: Future[None] | None = None
        for used, size in segments:
            for count in pieces(size):
                try:
                    raw = source.read(count)
                except OSError as e:
                    raise CheckpointError(
                        f"cannot read {file.source} ({e.strerror}); check the disk, or download it again"
                    ) from e
                if len(raw) != count:
                    raise CheckpointError(f"{file.source.name} became shorter while it was read; download it again")
                if hashing:
                    hashing.result()
                hashing = pool.submit(digest.update, raw)
                if used:
                    check_finite(np.frombuffer(raw, DTYPES[used.dtype][1]), used.name)
                if copy:
                    copy.write(raw)
                report(count)
        if hashing:
            hashing.result()
    return digest.hexdigest()


def shared(source: BinaryIO, path: Path, target: Path) -> bool:
    """Make `target` share the bytes on the disk: a clone if the file system supports it, else a hard link.

    `source` is `path`, opened; a link to another file that has since replaced it is removed.
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


def pieces(size: int) -> Iterator[int]:
    """The sizes of the blocks of `size` bytes."""
    for start in range(0, size, BLOCK):
        yield min(BLOCK, size - start)
