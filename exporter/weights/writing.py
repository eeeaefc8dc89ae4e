"""Writing a bundle's weights: each source byte is read once, checked, converted and hashed in passing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
Report = Callable[[int], None]
Converted = tuple[bytes, bytes, int]  # a chunk, its scales, and the source bytes it came from
NONE: Mapping[str, Scaling] = {}


class Chunk(NamedTuple):
    """A part of a tensor's `stored` bits, from row `start`, or from value `start` where they are flat."""

    start: int
    stored: NDArray[Any]


def write_weights(
    plan: WeightPlan, folder: Path, journal: ExportJournal, report: Report, scalings: Mapping[str, Scaling] = NONE
) -> dict[str, FileRecord]:
    """Write all weight files under `folder` that `journal` lacks; `report` gets the source bytes of each block.

    The weights that `scalings` names are multiplied first.

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
    report: Report,
    scalings: Mapping[str, Scaling],
) -> str:
    """Write the file's unfinished tensors in their new form. Returns its SHA-256."""
    header = file.header or b""
    finished, digest = _finished(file, target, journal.tensors.get(file.name, []))
    with target.open("r+b" if finished else "wb") as out:
        if finished:
            out.truncate(out.seek(file.entries[finished - 1].end))
            report(sum(entry.source.nbytes for entry in file.entries[:finished]))
        else:
            out.write(header)
        for entry in file.entries[finished:]:
            crc = write_tensor(entry, out, digest, pool, report, scalings.get(entry.name))
            journal.add_tensor(file.name, Written(entry.name, entry.end, crc))
            forget(out)
        os.fsync(out.fileno())
    checksum: str = digest.hexdigest()
    return checksum


def write_tensor(
    entry: WeightEntry,
    out: BinaryIO,
    digest: Any,
    pool: ThreadPoolExecutor,
    report: Report,
    scaling: Scaling | None = None,
) -> int:
    """Append a tensor in its new form to `out`, and its bytes to `digest`. Returns their CRC-32."""
    crc = 0
    for data in _tensor_bytes(entry, scaling, pool, report):
        out.write(data)
        digest.update(data)
        crc = zlib.crc32(data, crc)
    out.flush()
    return crc


def _finished(file: WeightFile, target: Path, written: Sequence[Written]) -> tuple[int, Any]:
    """The number of tensors that an interrupted export finished in the file, and the hash up to there."""
    count, digest = 0, hashlib.sha256(file.header or b"")
    with contextlib.suppress(OSError), target.open("rb") as source:
        source.seek(len(file.header or b""))
        for entry, record in zip(file.entries, written, strict=False):
            after, crc = digest.copy(), 0
            for size in pieces(entry.end - source.tell()):
                data = source.read(size)
                after.update(data)
                crc = zlib.crc32(data, crc)
            if (entry.name, entry.end, crc) != (record.tensor, record.end, record.crc):
                break
            digest, count = after, count + 1
    return count, digest


def forget(out: BinaryIO) -> None:
    """Keep written pages from evicting those still to be read."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _tensor_bytes(
    entry: WeightEntry, scaling: Scaling | None, pool: ThreadPoolExecutor, report: Report
) -> Iterator[bytes]:
    """A tensor as it is stored, chunk by chunk in order, converted in the threads of `pool`."""
    source, convert = _read_as(entry, scaling), _quantised if entry.scheme else _converted

    def read_and_convert(span: slice) -> Converted:
        return convert(entry, scaling, Chunk(span.start, read_bits(source, span)))

    scales = []
    for data, beside, nbytes in in_order(pool, read_and_convert, _spans(entry, scaling)):
        yield data
        scales.append(beside)
        report(nbytes)
    if entry.scheme:
        yield b"".join(scales)


def in_order(
    pool: ThreadPoolExecutor, convert: Callable[[slice], Converted], spans: Iterable[slice]
) -> Iterator[Converted]:
    """As `pool.map`, but no more than `AHEAD` chunks are converted before they are taken."""
    ahead = deque[Future[Converted]]()
    for span in spans:
        ahead.append(pool.submit(convert, span))
        if len(ahead) == AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _spans(entry: WeightEntry, scaling: Scaling | None) -> Iterator[slice]:
    """The rows of a tensor, or its values where rows do not matter, a bounded number at a time."""
    shape = _read_as(entry, scaling).shape
    step = max(1, CHUNK // max(1, prod(shape[1:])))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _read_as(entry: WeightEntry, scaling: Scaling | None) -> TensorInfo:
    """The source tensor as it is cut into chunks: flat, unless its rows matter."""
    flat = not entry.scheme and not scaling
    return entry.source.flat if flat else entry.source


def _quantised(entry: WeightEntry, scaling: Scaling | None, chunk: Chunk) -> Converted:
    assert entry.scheme is not None
    integers, scales = quantise(_values(entry, scaling, chunk), entry.scheme, entry.name)
    return integers.tobytes(), scales.tobytes(), chunk.stored.nbytes


def _converted(entry: WeightEntry, scaling: Scaling | None, chunk: Chunk) -> Converted:
    if entry.source.dtype == entry.dtype and not scaling:
        check_finite(chunk.stored, entry.name)
        return chunk.stored.tobytes(), b"", chunk.stored.nbytes
    values = _values(entry, scaling, chunk)
    with np.errstate(over="ignore"):
        out: NDArray[Any] = narrow_bf16(values) if entry.dtype == "BF16" else values.astype(DTYPES[entry.dtype][1])
    if entry.dtype in LARGEST and values.size:
        largest = float(np.abs(values).max())
        if largest > LARGEST[entry.dtype] and not _finite(out):
            precision = next(row.name for row in PRECISIONS.values() if row.stored == entry.dtype)
            raise ExportError(
                f"tensor {entry.name} holds {largest:g}, {precision} reaches "
                f"{LARGEST[entry.dtype]:g} at most; export with --precision fp32"
            )
    return out.tobytes(), b"", chunk.stored.nbytes


def _finite(stored: NDArray[Any]) -> bool:
    values = widen_bf16(stored) if stored.dtype == np.uint16 else stored
    return bool(np.isfinite(values).all())


def _values(entry: WeightEntry, scaling: Scaling | None, chunk: Chunk) -> NDArray[np.float32]:
    """A chunk's values as they are to be stored, but not yet in their form. Raises `CheckpointError` for NaN."""
    check_finite(chunk.stored, entry.name)
    values = _wide(chunk.stored, entry.source)
    return scaling.apply(values, chunk.start) if scaling else values


def _wide(chunk: NDArray[Any], source: TensorInfo) -> NDArray[np.float32]:
    """The float32 values of stored bits."""
    return widen_bf16(chunk) if source.dtype == "BF16" else chunk.astype(np.float32, copy=False)


def narrow_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bits of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
