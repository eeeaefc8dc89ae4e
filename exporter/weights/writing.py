"""Writing a bundle's weights: each source byte is read, checked and hashed once.

Files that need no conversion are cloned, linked or copied; others are converted tensor by tensor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.loader import check_finite
from vtx.exporter.checkpoint.quantised.matrix import Matrix
from vtx.exporter.weights.journal import ExportJournal, Written
from vtx.exporter.weights.plan import WeightEntry, WeightFile, WeightPlan
from vtx.exporter.weights.quantize import Feedback, pack, quantise
from vtx.exporter.weights.scaling import Scaling
from vtx.runtime.bundle.safetensors import DTYPES, TensorInfo, open_data, read_bits, source_rows, widen_bf16
from vtx.runtime.bundle.spec.manifest import FileRecord
from vtx.runtime.bundle.spec.stored import SCALES
from vtx.runtime.errors import CheckpointError, ExportError
from vtx.runtime.precision import STORED

CHUNK = 1 << 18  # elements that one thread converts at a time: their float32 copies stay in a core's cache
THREADS = min(2, os.cpu_count() or 1)
ROUNDED = 2.0**-11  # of a scale of a quantised checkpoint, the most that float16 changes it by
LARGEST = {"F16": 65504.0, "BF16": 3.3895e38}
BLOCK = 1 << 23  # bytes that are read at a time
FICLONE = 0x40049409  # Linux: share another file's blocks, copied on write
AHEAD = 2 * THREADS + 2  # converted chunks that wait to be written: a slow disk would let them pile up
# The same of a quantised checkpoint, of which a chunk is read from several places, and of rounding with feedback.
COMPUTED = 1 << 22
Converted = tuple[list[bytes], int]  # a chunk, its scales and zero points if it has any; the source bytes it came from
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

    Returns size and checksum of each file by its name in the bundle. Raises CheckpointError, ExportError.
    """
    (folder / "weights").mkdir(exist_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        for file in plan.files:
            if file.name in journal.files:
                report(file.work)
                continue
            path = folder / file.name
            try:
                if file.whole:
                    digest = _take_whole(file, path, pool, report)
                else:
                    digest = _rewrite(file, path, pool, journal, report, scalings)
            except OSError as e:
                raise ExportError(
                    f"cannot write {path} ({e.strerror}); free some space and run the same command again"
                ) from e
            journal.add_file(file.name, FileRecord(file.size, digest))
    return {file.name: journal.files[file.name] for file in plan.files}


def _take_whole(file: WeightFile, target: Path, pool: ThreadPoolExecutor, report: Callable[[int], None]) -> str:
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
                    check_finite(np.frombuffer(raw, DTYPES[used.form.dtype][1]), used.name)
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


def pieces(size: int) -> list[int]:
    return [min(BLOCK, size - start) for start in range(0, size, BLOCK)]


def _rewrite(
    file: WeightFile,
    target: Path,
    pool: ThreadPoolExecutor,
    journal: ExportJournal,
    report: Callable[[int], None],
    scalings: Mapping[str, Scaling],
) -> str:
    """Write the file's unfinished tensors in their new form, converted by chunks in `pool`. Returns its SHA-256."""
    header = file.header or b""
    groups = file.groups
    finished = 0
    digest = hashlib.sha256(header)
    # the tensors that an interrupted export finished
    with contextlib.suppress(OSError), target.open("rb") as source:
        source.seek(len(header))
        for group, record in zip(groups, journal.tensors.get(file.name, []), strict=False):
            last = group[-1]
            after = digest.copy()
            crc = 0
            for size in pieces(last.end - source.tell()):
                data = source.read(size)
                after.update(data)
                crc = zlib.crc32(data, crc)
            if (last.name, last.end, crc) != (record.tensor, record.end, record.crc):
                break
            digest = after
            finished = finished + 1
    with target.open("r+b" if finished else "wb") as out:
        if finished:
            out.truncate(out.seek(groups[finished - 1][-1].end))
            report(sum(entry.source.nbytes for entry in chain.from_iterable(groups[:finished])))
        else:
            out.write(header)
        for group in groups[finished:]:
            crc = 0
            following = list[list[bytes]]()
            for entry in group:
                for (data, *more), nbytes in _converted_chunks(entry, scalings.get(entry.name), pool):
                    out.write(data)
                    digest.update(data)
                    crc = zlib.crc32(data, crc)
                    following.append(more)
                    report(nbytes)
            data = b"".join(chain.from_iterable(zip(*following, strict=True)))
            out.write(data)
            digest.update(data)
            out.flush()
            last = group[-1]
            journal.add_tensor(Written(file.name, last.name, last.end, zlib.crc32(data, crc)))
            with contextlib.suppress(AttributeError, OSError):  # keep the cache for pages still to be read
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.fsync(out.fileno())
    return digest.hexdigest()


def _converted_chunks(entry: WeightEntry, scaling: Scaling | None, pool: ThreadPoolExecutor) -> Iterator[Converted]:
    """The chunks of an entry in its new form, in the order of its rows."""
    by_rows = entry.form.scheme or scaling or entry.source.by_rows  # they stay whole
    tensor = entry.source if by_rows else entry.source.flat
    convert, elements = _conversion(entry, scaling, tensor)
    length = tensor.shape[0]
    step = max(1, elements // max(1, prod(tensor.shape[1:])))
    return in_order(pool, convert, (slice(start, min(start + step, length)) for start in range(0, length, step)))


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


def _conversion(
    entry: WeightEntry, scaling: Scaling | None, tensor: TensorInfo
) -> tuple[Callable[[slice], Converted], int]:
    """The conversion of rows of an entry, whose tensor is `tensor`, and the elements to convert at a time."""
    if entry.form.matrix is not None:
        return partial(_taken, entry, entry.form.matrix), COMPUTED
    scheme = entry.form.scheme
    rounded = scheme is not None and scheme.bits == 4
    feedback = scaling.feedback() if scaling and rounded else None
    convert = partial(_converted, entry, scaling, tensor, feedback=feedback)
    large = feedback is not None or entry.source.source is not None
    return convert, COMPUTED if large else CHUNK


def _taken(entry: WeightEntry, matrix: Matrix, span: slice) -> Converted:
    """Rows of a quantised matrix of the checkpoint: its codes, scales and zero points. Raises `CheckpointError`."""
    rows = matrix.rows(source_rows(entry.source, span))
    name = entry.name
    check_finite(rows.scales, f"{name}{SCALES}")
    exact = rows.scales * np.float32(entry.factor)
    with np.errstate(over="ignore"):
        scales = exact.astype(np.float16)
    if (np.abs(scales - exact) > ROUNDED * np.abs(exact)).any():
        raise CheckpointError(f"the scales of tensor {name} are beyond float16; export with --precision fp16 or fp32")
    codes = pack(rows.codes) if entry.form.dtype == "I4" else rows.codes
    parts = [codes.tobytes(), scales.tobytes()]
    if matrix.zeroed:
        parts.append(rows.zeros.tobytes())
    return parts, 4 * rows.codes.size


def _converted(
    entry: WeightEntry, scaling: Scaling | None, source: TensorInfo, span: slice, feedback: Feedback | None = None
) -> Converted:
    """A chunk of `source`, the entry's tensor, in its new form. Raises `CheckpointError` for NaN."""
    stored = read_bits(source, span)
    check_finite(stored, entry.name)
    dtype = entry.form.dtype
    scheme = entry.form.scheme
    if entry.source.dtype == dtype and not scaling and entry.factor == 1 and not entry.shift:
        return [stored.tobytes()], stored.nbytes
    narrow = entry.source.dtype == "BF16"
    values: NDArray[np.float32] = widen_bf16(stored) if narrow else stored.astype(np.float32, copy=False)
    if entry.factor != 1:
        values = values * np.float32(entry.factor)
    if entry.shift:
        values = values + np.float32(entry.shift)
    if scaling:
        values = scaling.apply(values, span.start)
    if scheme:
        parts = quantise(values, scheme, entry.name, feedback)
        return [part.tobytes() for part in parts if part is not None], stored.nbytes
    return [_rounded(entry, values).tobytes()], stored.nbytes


def _rounded(entry: WeightEntry, values: NDArray[np.float32]) -> NDArray[Any]:
    """The values in the entry's type of floats. Raises ExportError for one that is beyond it."""
    dtype = entry.form.dtype
    with np.errstate(over="ignore"):
        out: NDArray[Any] = narrow_bf16(values) if dtype == "BF16" else values.astype(DTYPES[dtype][1])
    if dtype in LARGEST and values.size:
        largest = float(np.abs(values).max())
        most = LARGEST[dtype]
        if largest > most and not np.isfinite(widen_bf16(out) if dtype == "BF16" else out).all():
            raise ExportError(
                f"tensor {entry.name} holds {largest:g}, {STORED[dtype].name} reaches {most:g} at most; export "
                "with --precision fp32"
            )
    return out


def narrow_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bits of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
