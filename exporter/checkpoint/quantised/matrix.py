"""A quantised matrix of a checkpoint, whatever its format: codes, scales and zero points, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.safetensors import TensorInfo, read_bits, widen_bf16
from vtx.runtime.bundle.spec.stored import MIN_BLOCK, Scheme
from vtx.runtime.errors import CheckpointError, UnsupportedModelError

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Settings = Mapping[str, Any]  # of a quantization_config
FLOATS = ("F16", "BF16", "F32")
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a quantised matrix, [n, in]: a weight is (code - zero) * scale, in float32.

    `codes`: integers, or the values that a table has for them. `scales` and `zeros`: [n, blocks of one size].
    """

    codes: NDArray[Any]
    scales: Floats
    zeros: NDArray[np.int8]

    def __getitem__(self, rows: Numbers) -> Rows:
        return Rows(self.codes[rows], self.scales[rows], self.zeros[rows])

    def values(self) -> Floats:
        codes = self.codes.astype(np.float32).reshape(*self.scales.shape, -1)
        codes -= self.zeros[..., None]
        codes *= self.scales[..., None]
        return codes.reshape(len(codes), -1)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantised matrix [out, in].

    `part` reads the rows from a first one up to another. `parts` are its tensors, the codes first. `scheme`: the
    storage of a bundle that takes the codes and scales as they are, None if none does. `zeroed`: zero points are not
    all 0.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    part: Callable[[int, int], Rows] = field(repr=False)
    scheme: Scheme | None = None
    zeroed: bool = False

    def info(self, name: str) -> TensorInfo:
        """The matrix as a tensor of float32 whose rows are computed."""
        codes = self.parts[0]
        return TensorInfo(name, "F32", self.shape, codes.file, 0, 4 * prod(self.shape), codes.identity, source=self)

    def rows(self, numbers: Numbers) -> Rows:
        """The rows of these numbers; those between them are read, too."""
        first = int(numbers.min(initial=self.shape[0]))
        return self.part(first, int(numbers.max(initial=first - 1)) + 1)[numbers - first]

    def read(self, rows: Numbers) -> Floats:
        return self.rows(rows).values()


def stored_scheme(dtype: str, width: int, block: int) -> Scheme | None:
    """The storage of integers in blocks of equal size: engines read a whole row, or blocks of a power of two."""
    fits = block >= MIN_BLOCK and width % MIN_BLOCK == 0 and block in (width, block & -block)
    return Scheme(dtype, block) if fits else None


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """The tensors of the matrix `name` by the end of their names, in a checkpoint quantised by `method`."""

    method: str
    name: str
    tensors: Mapping[str, TensorInfo]

    def need(self, end: str, dtypes: Sequence[str], shape: tuple[int, ...] | None = None) -> TensorInfo:
        """The tensor with this end, of one of `dtypes` and of `shape`, or without one a matrix."""
        info = self.tensors.get(end)
        if info is None:
            raise self.error(end, "is missing")
        fits = len(info.shape) == 2 if shape is None else info.shape == shape
        if info.dtype not in dtypes or not fits or not all(info.shape):
            wanted = f"{' or '.join(dtypes)} {'of two axes' if shape is None else list(shape)}"
            raise self.error(end, f"is {info.dtype} {list(info.shape)}, not {wanted}")
        return info

    def error(self, end: str, fault: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {self.name}{end} {fault}, as {self.method} needs; correct quantization_config, or download the "
            "checkpoint again"
        )

    def columns(self, end: str, width: int, groups: int) -> Numbers:
        """The group of each column, which a tensor names."""
        order: Numbers = read_bits(self.need(end, ("I32", "I64"), (width,))).astype(np.int64)
        if order.min() < 0 or order.max() >= groups:
            raise self.error(end, f"names groups {order.min()} to {order.max()}, not 0 to {groups - 1}")
        return order


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """A way of storing quantised matrices.

    `check` raises UnsupportedModelError for settings with which weights are not what vtx would compute. A matrix is
    where a tensor's name ends in one of `markers`; `ends` are those of all its tensors, `unused` those of tensors about
    activations.
    """

    check: Callable[[Settings], None]
    matrix: Callable[[Settings, MatrixParts], Matrix]
    markers: tuple[str, ...]
    ends: tuple[str, ...]
    unused: tuple[str, ...] = ()


def check_setting(settings: Settings, name: str, known: Sequence[Any]) -> None:
    """Raise UnsupportedModelError if a setting, without regard to case, is not among `known`."""
    value = settings.get(name)
    if isinstance(value, float) or (value.lower() if isinstance(value, str) else value) not in known:
        names = ", ".join(str(value) for value in known if value is not None)
        raise UnsupportedModelError(f"quantization_config: {name} is {value!r:.60}; vtx reads {names}")


def group_of(settings: Settings, width: int) -> int:
    """The number of neighbouring weights of a row with one scale: -1 or none says all of them."""
    size = settings.get("group_size", -1)
    if type(size) is not int or size == 0 or size < -1:
        raise CheckpointError(f"quantization_config: group_size is {size!r:.40}; it must be -1 or at least 1")
    return width if size == -1 else min(size, width)


def floats(info: TensorInfo, rows: slice) -> Floats:
    """Rows of a tensor of floats as float32."""
    bits = read_bits(info, rows)
    return widen_bf16(bits) if info.dtype == "BF16" else bits.astype(np.float32)
