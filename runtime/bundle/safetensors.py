"""Safetensors files: one hardened reader for untrusted files, and a small writer.

A file is an 8-byte little-endian length N, N bytes of JSON header, then the tensors' bytes without a gap:
`{"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {"key": "text"}}`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.files import POINTER, Identity, check_fetched, open_named, reason, replacing
from vtx.runtime.errors import CheckpointError, ExportError, VtxError

# A tensor takes 100 to 200 bytes of header and a 13B LLaVA has 750 of them; parsed JSON takes up to 30 times its size.
MAX_HEADER = 8 * 2**20
MAX_TENSORS = 50_000
MAX_DEPTH = 64
MAX_DIMS = 32  # numpy 1.26's own limit
_MAX_BYTES = 2**63 - 1
_ALIGNMENT = 64

# Bits per element, and the numpy dtype of the stored bits (None: numpy has none). BF16 is stored as its bits.
DTYPES: Mapping[str, tuple[int, str | None]] = {
    "BOOL": (8, "?"), "F4": (4, None), "F6_E2M3": (6, None), "F6_E3M2": (6, None), "F8_E4M3": (8, None),
    "F8_E4M3FNUZ": (8, None), "F8_E5M2": (8, None), "F8_E5M2FNUZ": (8, None), "F8_E8M0": (8, None),
    "U8": (8, "u1"), "I8": (8, "i1"), "U16": (16, "<u2"), "I16": (16, "<i2"), "BF16": (16, "<u2"), "F16": (16, "<f2"),
    "U32": (32, "<u4"), "I32": (32, "<i4"), "F32": (32, "<f4"), "U64": (64, "<u8"), "I64": (64, "<i8"),
    "F64": (64, "<f8"), "C64": (64, "<c8"),
}  # fmt: skip
RowIndex = slice | NDArray[np.int64]  # of a tensor's first axis
EVERY = slice(None)
_NAMES = {np.dtype(stored): name for name, (_, stored) in DTYPES.items() if stored and name != "BF16"}


class RowSource(Protocol):
    """A matrix of float32 whose rows are computed from the tensors `parts` of a file."""

    @property
    def parts(self) -> tuple[TensorInfo, ...]: ...

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of `file`: `offset` and `nbytes` count bytes from the file's start, `dtype` is safetensors' name.

    `identity` is the file's when its header was read; data of another file is refused. `spread` (taken, of): the tensor
    is only the first `taken` of each `of` rows there, a part of a larger one. `order`: the places of the rows of each
    group of as many rows, if they stand in another order there. `transposed`: it is stored column by column. `source`:
    its numbers are computed, and `offset` counts from the first of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    identity: Identity | None = field(default=None, compare=False)
    spread: tuple[int, int] | None = None
    order: tuple[int, ...] = ()
    transposed: bool = False
    source: RowSource | None = field(default=None, compare=False)

    @property
    def moved(self) -> bool:
        """True if its numbers do not stand in the file in their order, one after the other."""
        return self.by_rows or self.spread is not None

    @property
    def by_rows(self) -> bool:
        """True if rows have to be read as rows, and not as numbers that follow each other."""
        return self.transposed or bool(self.order) or self.source is not None

    @property
    def turned(self) -> TensorInfo:
        """The transposed matrix."""
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    @property
    def flat(self) -> TensorInfo:
        """The same values without their shape: a row each."""
        width = math.prod(self.shape[1:])
        spread = self.spread and (self.spread[0] * width, self.spread[1] * width)
        return replace(self, shape=(math.prod(self.shape),), spread=spread)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors in the order of their bytes, and its free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path, *, error: type[VtxError] = CheckpointError) -> Header:
    """Read and check the header of `path`, and that the tensors cover its data exactly; reads no tensor.

    Raises `error` for anything but a sound file. Two things the format's own library lets through are refused:
    a name that appears twice, and a tensor of more than 32 dimensions.
    """
    path = Path(path)
    with open_named(path, error=error) as file:
        return header_of(file, path, error=error)


def header_of(file: BinaryIO, path: Path, *, error: type[VtxError] = CheckpointError) -> Header:
    """Like `read_header`, for the file at `path`, which is open at its start."""
    status = os.fstat(file.fileno())
    try:
        raw = _header_bytes(file, status.st_size, path.name, error)
    except OSError as cause:
        raise error(f"{path.name} cannot be read ({reason(cause)}); check the disk") from cause
    return _parse(raw, path, status.st_size, Identity.of(status), error)


def unpack(content: bytes, name: str, *, error: type[VtxError]) -> dict[str, NDArray[Any]]:
    """Copies of the tensors in a whole file's `content`: the stored bits, so BF16 comes as uint16. Raises `error`."""
    raw = _header_bytes(BytesIO(content), len(content), name, error)
    infos = _parse(raw, Path(name), len(content), None, error).tensors
    arrays = dict[str, NDArray[Any]]()
    for key, info in infos.items():
        arrays[key] = array = np.empty(info.shape, _stored_dtype(info, error))
        if info.nbytes:
            array[...] = np.frombuffer(content, array.dtype, array.size, info.offset).reshape(info.shape)
    return arrays


def open_data(info: TensorInfo, *, error: type[VtxError] = CheckpointError) -> BinaryIO:
    """Open the file that holds a tensor. Raises `error` if it is not the file whose header was read."""
    file = open_named(info.file, error=error)
    if info.identity is not None and Identity.of(os.fstat(file.fileno())) != info.identity:
        file.close()
        raise error(f"{info.file} was replaced or written to since its header was read; start again")
    return file


def read_bits(info: TensorInfo, rows: RowIndex = EVERY, *, error: type[VtxError] = CheckpointError) -> NDArray[Any]:
    """The stored bits of a tensor, or of some of its rows, in memory of their own; BF16 comes as uint16.

    `rows` are a slice without a step, or row numbers. They are read, not mapped: a disk that fails under a mapping ends
    the process. Raises `error`.
    """
    if info.transposed:
        return np.ascontiguousarray(read_bits(info.turned, error=error).T[rows])
    if info.source is not None:
        return info.source.read(source_rows(info, rows))
    dtype = _stored_dtype(info, error)
    height = info.shape[0] if info.shape else 1
    nbytes = math.prod(info.shape[1:]) * dtype.itemsize
    count = 0
    if isinstance(rows, slice):
        first, last, step = rows.indices(height)
        assert step == 1, rows
        count = max(0, last - first)
    if isinstance(rows, slice) and not (info.spread or info.order):
        parts = [(0, count, first)]
    else:
        stored = _stored_rows(info, rows)
        count = len(stored)
        starts = np.flatnonzero(np.diff(stored, prepend=-2) != 1)  # rows that follow each other are read at once
        parts = [(start, end, int(stored[start])) for start, end in pairwise([*starts.tolist(), count])]
    out = np.empty((count, *info.shape[1:]), dtype)
    try:
        with open_data(info, error=error) as file:
            for start, end, row in parts:
                file.seek(info.offset + row * nbytes)
                buffer = out[start:end].reshape(-1).view(np.uint8).data
                while buffer.nbytes:
                    if not (read := file.readinto(buffer)):  # type: ignore[attr-defined]
                        raise EOFError("it ends too early")  # noqa: TRY301
                    buffer = buffer[read:]
        return out if info.shape else out.reshape(())
    except (OSError, EOFError) as cause:
        raise error(
            f"cannot read tensor {shown(info.name)} of {info.file.name} ({reason(cause)}); check the disk"
        ) from cause


def _stored_rows(info: TensorInfo, rows: RowIndex) -> NDArray[np.int64]:
    """The numbers of a tensor's rows among those that are stored from its offset on."""
    numbers = np.arange(*rows.indices(info.shape[0])) if isinstance(rows, slice) else rows
    if info.order:
        group = len(info.order)
        numbers = numbers // group * group + np.array(info.order)[numbers % group]
    part, of = info.spread or (1, 1)
    stored: NDArray[np.int64] = numbers // part * of + numbers % part
    return stored


def source_rows(info: TensorInfo, rows: RowIndex) -> NDArray[np.int64]:
    """The rows of `info.source` that are these rows of a tensor."""
    return info.offset // nbytes_of(info.dtype, info.shape[1:]) + _stored_rows(info, rows)


def read_tensor(info: TensorInfo, *, error: type[VtxError] = CheckpointError) -> NDArray[Any]:
    """Read a tensor into memory of its own; BF16 is widened to float32, which loses nothing. Raises `error`."""
    stored = read_bits(info, error=error)
    return widen_bf16(stored) if info.dtype == "BF16" else stored


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    wide = np.left_shift(bits, 16, dtype=np.uint32)
    return wide.view(np.float32)


def layout(
    path: Path, specs: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorInfo]]:
    """Plan a file of (name, dtype, shape): its first bytes, and the offset of each tensor, in the given order.

    The first tensor begins at a multiple of 64 bytes, each next one where the last ended, as the format demands.
    Raises `ValueError` for an unknown dtype or a name used twice.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    relative = list[TensorInfo]()
    offset = 0
    for name, dtype, shape in specs:
        nbytes = nbytes_of(dtype, shape)
        if name in header or name == "__metadata__":
            raise ValueError(f"tensor {name!r} is duplicated, or has a reserved name")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        relative.append(TensorInfo(name, dtype, tuple(shape), path, offset, nbytes))
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    placed = [replace(info, offset=8 + len(text) + info.offset) for info in relative]
    return struct.pack("<Q", len(text)) + text, placed


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path`, which is replaced only once the new file is complete."""
    unknown = next((array.dtype for array in tensors.values() if array.dtype.newbyteorder("<") not in _NAMES), None)
    if unknown is not None:
        raise ValueError(f"safetensors has no dtype for numpy's {unknown}")
    specs = [(name, _NAMES[array.dtype.newbyteorder("<")], array.shape) for name, array in tensors.items()]
    header, places = layout(path, specs, metadata)
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            file.write(header)
            for place in places:
                file.write(np.asarray(tensors[place.name], DTYPES[place.dtype][1], order="C").tobytes())
    except OSError as cause:
        raise ExportError(f"cannot write {path}: {cause.strerror}") from cause


def parse_json(raw: bytes | bytearray, where: str, *, error: type[VtxError] = CheckpointError) -> Any:
    """Parse untrusted UTF-8 JSON; `where` names it in messages.

    Raises `error` for anything else, and for text that readers disagree about: a duplicated key, NaN, Infinity,
    half a surrogate pair.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ValueError(f"{shown(counts.most_common(1)[0][0])} is duplicated")
        return members

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
        if b"\\u" in raw:
            # JSON can spell half of a surrogate pair, which is not text and would fail later, when printed or written.
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError as cause:
        raise error(f"{where} is nested deeper than the limit of {MAX_DEPTH}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{where} is not UTF-8 text (byte {cause.start:,})") from cause
    except UnicodeEncodeError as cause:
        raise error(f"{where} is not sound JSON: {cause.object[cause.start]!r} is half of a surrogate pair") from cause
    except ValueError as cause:
        reason = str(cause).partition("; use sys.")[0]  # Python's advice is to programs
        raise error(f"{where} is not sound JSON: {reason}") from cause
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        tables = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for table in tables for child in table]
    if level:
        raise error(f"{where} is nested deeper than the limit of {MAX_DEPTH}")
    return parsed


def shown(name: str) -> str:
    """Quote a name from a file for a message: one line, printable, at most 120 characters."""
    return repr(name if len(name) <= 120 else f"{name[:100]}...{name[-17:]}")


def _header_bytes(file: BinaryIO, size: int, name: str, error: type[VtxError]) -> bytes:
    if size < 8:
        raise error(f"{name} holds {size} bytes, a safetensors file has at least 8; download it again")
    start = file.read(8)
    (length,) = struct.unpack("<Q", start.ljust(8, b"\0"))
    if length > MAX_HEADER:
        check_fetched(start + file.read(len(POINTER)), name, error)
        raise error(
            f"{name} announces a header of {length:,} bytes, vtx reads at most {MAX_HEADER:,}; "
            "it is not a safetensors file, or is damaged: download it again"
        )
    if length == 0 or 8 + length > size:
        raise error(
            f"{name} holds {size:,} bytes and announces a header of {length:,}; it is cut off: download it again"
        )
    return file.read(length)


def _parse(raw: bytes, path: Path, size: int, identity: Identity | None, error: type[VtxError]) -> Header:
    parsed = parse_json(raw, f"the header of {path.name}", error=error)
    if not isinstance(parsed, dict):
        raise error(f"the header of {path.name} is not an object; download it again")
    metadata = {} if (raw_metadata := parsed.pop("__metadata__", None)) is None else raw_metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise error(f"the __metadata__ of {path.name} is not a table of strings; download it again")
    if len(parsed) > MAX_TENSORS:
        raise error(f"{path.name} lists {len(parsed):,} tensors, vtx reads at most {MAX_TENSORS:,} in a file")
    start = 8 + len(raw)
    infos = sorted(
        (_tensor_info(name, entry, path, start, identity, error) for name, entry in parsed.items()),
        key=lambda info: (info.offset, info.nbytes),
    )
    end = start
    for info in infos:  # they follow each other without overlap or gap, and end where the file ends
        if info.offset != end:
            fault = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise error(f"tensor {shown(info.name)} in {path.name} {fault}; the format forbids that: download it again")
        end += info.nbytes
    if end > size:
        raise error(f"{path.name} holds {size:,} bytes, its header says {end:,}; download it again")
    if end < size:
        raise error(f"{path.name} holds {size - end:,} bytes after its last tensor; download it again")
    return Header({info.name: info for info in infos}, metadata)


def _tensor_info(
    name: str, entry: object, path: Path, start: int, identity: Identity | None, error: type[VtxError]
) -> TensorInfo:
    """Check one entry on its own; its place among the others is checked by `_parse`."""
    where = f"tensor {shown(name)} in {path.name}"
    if not isinstance(entry, dict):
        raise error(f"{where} is not described as the format demands; download it again")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"{where} has dtype {shown(str(dtype))}, which vtx does not know")
    if not is_sizes(shape) or len(shape) > MAX_DIMS:
        raise error(f"{where} has no valid shape (at most {MAX_DIMS} non-negative integers)")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error(f"{where} has no valid data_offsets (two integers, begin <= end)")
    try:
        nbytes = nbytes_of(dtype, shape)
    except ValueError as cause:
        raise error(f"{where}: {cause}") from cause
    if offsets[1] - offsets[0] != nbytes:
        raise error(
            f"{where} has {offsets[1] - offsets[0]:,} bytes, dtype {dtype} and shape {shape} need {nbytes:,}; "
            "download it again"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], nbytes, identity)


def is_sizes(value: object) -> TypeGuard[list[int]]:
    """True if a value of a file is a list of sizes: whole numbers from 0 on that fit 63 bits."""
    # `type`, not `isinstance`: True is an int to Python, and no size.
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_BYTES for size in value)


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor. Raises `ValueError` if no file holds that many, or they are not whole."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    bits = DTYPES[dtype][0]
    # numpy multiplies the non-zero sizes even of an empty array, and refuses when they overflow.
    if math.prod(size for size in shape if size) * bits > 8 * _MAX_BYTES:
        raise ValueError(f"shape {list(shape)} needs more bytes than any file holds")
    total = math.prod(shape) * bits
    if total % 8:
        raise ValueError(f"{total} bits of {dtype} are not a whole number of bytes")
    return total // 8


def _stored_dtype(info: TensorInfo, error: type[VtxError]) -> np.dtype[Any]:
    stored = DTYPES[info.dtype][1]
    if stored is None:
        raise error(f"tensor {shown(info.name)} in {info.file.name} is {info.dtype}, which vtx cannot read")
    return np.dtype(stored)
