"""Writing a bundle's weights: each source byte is read, checked, converted and hashed once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.weights.journal import ExportJournal, Written
from vtx.exporter.weights.plan import WeightEntry, WeightFile, WeightPlan
from vtx.exporter.weights.quantize import quantise
from vtx.exporter.weights.scaling import Scaling
from vtx.exporter.weights.whole import pieces, take_whole
from vtx.runtime.bundle.safetensors import DTYPES, TensorInfo, read_bits, widen_bf16
from vtx.runtime.bundle.spec.manifest import FileRecord
from vtx.runtime.errors import ExportError
from vtx.runtime.precision import PRECISIONS

CHUNK = 1 << 18  # elements that one thread converts at a time: their float32 copies stay in a core's cache
THREADS = min(2, os.cpu_count() or 1)
LARGEST = {"F16": 65504.0, "BF16": 3.3895e38}
AHEAD = 2 * THREADS + 2  # converted chunks that wait to be written: a slow disk would let them pile up
Converted = tuple[bytes, bytes, int]  # a chunk, its scales, and the source bytes it came from
NONE: Mapping[str, Scaling] = {}


def write_weights(
    plan: WeightPlan,
    folder: Path,
    journal: ExportJournal,
    report: Callable[[int], None],
    scalings: Mapping[str, Scaling] = NONE,
) -> dict[str, FileRecord]:
    """Write all weight files under `folder` that `journal` lacks; `report` gets the source bytes of each block.

    The weights named in `scalings` are multiplied first.

    Returns size and checksum of each file by its name in the bundle.

    Raises:
        CheckpointError: a weight is NaN or infinite, or a source file has changed.
        ExportError: the disk is full, or a value does not fit the precision.

    """
    (folder / "weights").mkdir(exist_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        for file in plan.files:
            if file.name in journal.files:
                report(file.work)
                continue
            try:
                digest = (
                    take_whole(file, folder / file.name, pool, report)
                    if file.whole
                    else _rewrite(file, folder / file.name, pool, journal, report, scalings)
                )
            except OSError as e:
                raise ExportError(
                    f"cannot write {folder / file.name} ({e.strerror}); free some space and run the same command again"
                ) from e
            journal.add_file(file.name, FileRecord(file.size, digest))
    return {file.name: journal.files[file.name] for file in plan.files}


def _rewrite(
    file: WeightFile,
    target: Path,
    pool: ThreadPoolExecutor,
    journal: ExportJournal,
    report: Callable[[int], None],
    scalings: Mapping[str, Scaling],
) -> str:
    """Write the file's unfinished tensors in their new form. Returns its SHA-256."""
    header, finished = file.header or b"", 0
    digest = hashlib.sha256(header)
    # the tensors that an interrupted export finished
    with contextlib.suppress(OSError), target.open("rb") as source:
        source.seek(len(header))
        for entry, record in zip(file.entries, journal.tensors.get(file.name, []), strict=False):
            after, crc = digest.copy(), 0
            for size in pieces(entry.end - source.tell()):
                data = source.read(size)
                after.update(data)
                crc = zlib.crc32(data, crc)
            if (entry.name, entry.end, crc) != (record.tensor, record.end, record.crc):
                break
            digest, finished = after, finished + 1
    with target.open("r+b" if finished else "wb") as out:
        if finished:
            out.truncate(out.seek(file.entries[finished - 1].end))
            report(sum(entry.source.nbytes for entry in file.entries[:finished]))
        else:
            out.write(header)
        for entry in file.entries[finished:]:
            crc = write_tensor(entry, out, digest, pool, report, scalings.get(entry.name))
            journal.add_tensor(Written(file.name, entry.name, entry.end, crc))
            forget(out)
        os.fsync(out.fileno())
    return digest.hexdigest()


def write_tensor(
    entry: WeightEntry,
    out: BinaryIO,
    digest: hashlib._Hash,
    pool: ThreadPoolExecutor,
    report: Callable[[int], None],
    scaling: Scaling | None = None,
) -> int:
    """Append a tensor in its new form to `out`, and its bytes to `digest`. Returns their CRC-32.

    It is converted by chunks in the threads of `pool`.
    """
    source = entry.source if entry.scheme or scaling else entry.source.flat  # chunks are whole rows if rows matter
    length = source.shape[0]
    step = max(1, CHUNK // max(1, prod(source.shape[1:])))
    spans = (slice(start, min(start + step, length)) for start in range(0, length, step))
    crc, parts = 0, []
    for data, more, nbytes in in_order(pool, lambda span: _converted(entry, scaling, source, span), spans):
        out.write(data)
        digest.update(data)
        crc = zlib.crc32(data, crc)
        parts.append(more)
        report(nbytes)
    scales = b"".join(parts)
    out.write(scales)
    digest.update(scales)
    out.flush()
    return zlib.crc32(scales, crc)


def forget(out: BinaryIO) -> None:
    """Drop written pages from the cache, which is needed for those still to be read."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_order(
    pool: ThreadPoolExecutor, convert: Callable[[slice], Converted], spans: Iterable[slice]
) -> Iterator[Converted]:
    """`pool.map` with at most `AHEAD` converted chunks that wait."""
    ahead = deque[Future[Converted]]()
    for span in spans:
        ahead.append(pool.submit(convert, span))
        if len(ahead) == AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _converted(entry: WeightEntry, scaling: Scaling | None, source: TensorInfo, span: slice) -> Converted:
    """A chunk of `source`, the entry's tensor, in its new form. Raises `CheckpointError` for NaN."""
    stored = read_bits(source, span)
    check_finite(stored, entry.name)
    if entry.source.dtype == entry.dtype and not scaling:
        return stored.tobytes(), b"", stored.nbytes
    values: NDArray[np.float32] = (
        widen_bf16(stored) if entry.source.dtype == "BF16" else stored.astype(np.float32, copy=False)
    )
    if scaling:
        values = scaling.apply(values, span.start)
    if entry.scheme:
        integers, scales = quantise(values, entry.scheme, entry.name)
        return integers.tobytes(), scales.tobytes(), stored.nbytes
    with np.errstate(over="ignore"):
        out: NDArray[Any] = narrow_bf16(values) if entry.dtype == "BF16" else values.astype(DTYPES[entry.dtype][1])
    if entry.dtype in LARGEST and values.size:
        largest = float(np.abs(values).max())
        if largest > LARGEST[entry.dtype]:
            rounded = widen_bf16(out) if entry.dtype == "BF16" else out
            if not np.isfinite(rounded).all():
                precision = next(row.name for row in PRECISIONS.values() if row.stored == entry.dtype)
                raise ExportError(
                    f"tensor {entry.name} holds {largest:g}, {precision} reaches "
                    f"{LARGEST[entry.dtype]:g} at most; export with --precision fp32"
                )
    return out.tobytes(), b"", stored.nbytes


def narrow_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bits of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
