"""A quantised matrix of a checkpoint, whatever its format: codes, scales and zero points, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.safetensors import TensorInfo, read_bits, widen_bf16
from vtx.runtime.bundle.spec.stored import MIN_BLOCK, Scheme
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.precision import STORED

Floats = NDArray[np.float32]
Settings = Mapping[str, Any]  # of a quantization_config
FLOATS = ("F16", "BF16", "F32")
STEPS = 1 << 20  # scales that are looked at together
LARGEST = float(np.finfo(np.float16).max)
LOST = 2.0**-11  # of a scale that float16 rounds, at most


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a quantised matrix, [n, in]: a weight is (code - zero) * scale, in float32.

    `codes`: integers, or the values that a table has for them. `scales` and `zeros`: [n, blocks]. `columns` [in]: the
    block of each column; None: blocks have one size and follow each other.
    """

    codes: NDArray[np.int8] | Floats
    scales: Floats
    zeros: NDArray[np.int8] | None = None
    columns: NDArray[np.int64] | None = None

    def values(self) -> Floats:
        codes, scales, zeros = self.codes.astype(np.float32), self.scales, self.zeros
        if self.columns is not None:
            if zeros is not None:
                codes -= zeros[:, self.columns]
            codes *= scales[:, self.columns]
            return codes
        blocks = codes.reshape(*scales.shape, -1)
        if zeros is not None:
            blocks -= zeros[..., None]
        blocks *= scales[..., None]
        return codes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantised matrix [out, in], which the bundle's weight of that name is made of.

    `codes` and `steps` read rows from a first one up to another, both multiples of `align` or the end: the codes, and
    the scales and zero points. `parts` are its tensors, the codes first. `columns`: as in `Rows`. `scheme`: the storage
    of a bundle that takes such codes; None if they are not integers, or not in blocks of one size.
    """

    name: str
    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    codes: Callable[[int, int], NDArray[np.int8] | Floats] = field(repr=False)
    steps: Callable[[int, int], tuple[Floats, NDArray[np.int8] | None]] = field(repr=False)
    align: int = 1
    columns: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    scheme: Scheme | None = None

    def info(self) -> TensorInfo:
        """The matrix as a tensor of float32 whose rows are computed."""
        held = self.parts[0]
        return TensorInfo(self.name, "F32", self.shape, held.file, 0, 4 * prod(self.shape), held.identity, source=self)

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """The rows of these numbers."""
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        parts = [self._run(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._run(0, 0)
        zeros = None if parts[0].zeros is None else np.concatenate([part.zeros for part in parts])
        codes, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        return Rows(codes, scales, zeros, self.columns)

    def _run(self, first: int, last: int) -> Rows:
        start = first - first % self.align
        end = min(last + -last % self.align, self.shape[0])
        wanted = slice(first - start, last - start)
        scales, zeros = self.steps(start, end)
        return Rows(
            self.codes(start, end)[wanted], scales[wanted], None if zeros is None else zeros[wanted], self.columns
        )

    def read(self, rows: NDArray[np.int64]) -> Floats:
        return self.rows(rows).values()

    def as_it_is(self) -> tuple[Scheme, bool] | None:
        """The storage of a bundle that takes the codes and scales, and whether zero points go with them.

        None if there is none: engines read blocks of a power of two, or a row, and scales in float16. All scales are
        read, and checked: raises CheckpointError for NaN and infinity.
        """
        scheme, width = self.scheme, self.shape[1]
        if scheme is None or width % MIN_BLOCK:
            return None
        block = scheme.block
        if block != width and (block < MIN_BLOCK or block & (block - 1) or width % block):
            return None
        zeroed = False
        for scales, zeros in self._all_steps():
            if not np.isfinite(scales).all():
                raise CheckpointError(
                    f"the scales of tensor {self.name} hold NaN or infinity; download the checkpoint again"
                )
            if float(np.abs(scales).max(initial=0)) > LARGEST:
                return None
            if (np.abs(scales.astype(np.float16).astype(np.float32) - scales) > LOST * np.abs(scales)).any():
                return None
            zeroed = zeroed or (zeros is not None and bool(zeros.any()))
        return scheme, zeroed

    def _all_steps(self) -> Iterator[tuple[Floats, NDArray[np.int8] | None]]:
        assert self.scheme is not None
        height, step = self.shape[0], max(1, STEPS // self.scheme.scales(self.shape[1]))
        step += -step % self.align
        return (self.steps(first, min(first + step, height)) for first in range(0, height, step))


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one matrix by the end of their names, in a checkpoint quantised by `method`."""

    method: str
    name: str
    tensors: Mapping[str, TensorInfo]

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    def need(self, end: str, dtypes: Sequence[str], shape: tuple[int, ...] | None = None) -> TensorInfo:
        """The tensor with this end, which must have one of `dtypes`, and `shape` if one is given."""
        info = self.tensors.get(end)
        if info is None:
            raise CheckpointError(f"tensor {self.name}.{end} is missing, which {self.method} needs; download it again")
        if info.dtype not in dtypes or (shape is not None and info.shape != shape):
            sizes = "" if shape is None else f" {list(shape)}"
            raise CheckpointError(
                f"tensor {self.name}.{end} is {info.dtype} {list(info.shape)}, {self.method} needs "
                f"{' or '.join(dtypes)}{sizes} here; correct the quantization_config, or download it again"
            )
        return info

    def table(self, end: str, dtypes: Sequence[str]) -> tuple[TensorInfo, tuple[int, int]]:
        """The tensor with this end, and its two sizes."""
        info = self.need(end, dtypes)
        if len(info.shape) != 2 or not all(info.shape):
            raise CheckpointError(
                f"tensor {self.name}.{end} has shape {list(info.shape)}, {self.method} needs a matrix here"
            )
        return info, (info.shape[0], info.shape[1])


@dataclass(frozen=True, slots=True)
class Format:
    """A way of storing quantised matrices.

    `check` raises UnsupportedModelError for settings with which weights are not what vtx would compute. A matrix is
    where a tensor's name ends in one of `markers`; `ends` are those of all its tensors, `unused` those of tensors about
    activations.
    """

    check: Callable[[Settings], None]
    matrix: Callable[[Settings, Parts], Matrix]
    markers: tuple[str, ...]
    ends: tuple[str, ...]
    unused: tuple[str, ...] = ()


def check_setting(settings: Settings, names: Sequence[str], known: Sequence[Any], default: Any) -> None:
    """Raise UnsupportedModelError if the first of the settings `names` that is there is not among `known`."""
    name = next((name for name in names if settings.get(name) is not None), names[0])
    value = settings.get(name)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if isinstance(value, float | list | dict) or value not in known:
        raise UnsupportedModelError(
            f"quantization_config: {name} is {value!r:.60}; vtx reads {', '.join(map(str, known))}; use another "
            "checkpoint of the model"
        )


def group_of(settings: Settings, names: Sequence[str], width: int) -> int:
    """The number of neighbouring weights of a row with one scale: -1 or none says all of them."""
    size = next((settings[name] for name in names if settings.get(name) is not None), -1)
    if type(size) is not int or size == 0 or size < -1:
        raise CheckpointError(f"quantization_config: {names[0]} is {size!r:.40}; it must be -1 or at least 1")
    return width if size == -1 else min(size, width)


def floats(info: TensorInfo, rows: slice | None = None) -> Floats:
    """A tensor of floats, or some of its rows, as float32."""
    bits = read_bits(info) if rows is None else read_bits(info, rows)
    return widen_bf16(bits) if info.dtype == "BF16" else bits.astype(np.float32)


def columns_of(info: TensorInfo, first: int, last: int) -> NDArray[Any]:
    """Columns of a matrix, transposed: [last - first, rows], the stored bits."""
    height, width = info.shape
    size = info.nbytes // (height * width)
    part = replace(
        info, shape=(height * (last - first),), offset=info.offset + first * size, spread=(last - first, width)
    )
    return np.ascontiguousarray(read_bits(part).reshape(height, last - first).T)


def float_columns(info: TensorInfo, first: int, last: int) -> Floats:
    bits = columns_of(info, first, last)
    return widen_bf16(bits) if info.dtype == "BF16" else bits.astype(np.float32)


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The unsigned integers of 4 or 8 bits in the last axis of 32-bit words, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack((octets & 15, octets >> 4), -1).reshape(*octets.shape[:-1], -1)


def centred(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Unsigned integers without the middle of their range, half of 2 ** bits."""
    return (codes ^ np.uint8(1 << (bits - 1))).view(np.int8) if bits == 8 else codes.view(np.int8) - np.int8(8)


def stored_dtype(bits: int) -> str:
    return next(dtype for dtype, row in STORED.items() if row.bits == bits)
