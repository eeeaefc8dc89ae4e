"""The matrices of experts in checkpoints: one tensor an expert, or one of all; in vtx one matrix, expert after expert.

Nothing is read here. Where the rows of an expert do not follow each other in a file they are gathered as they are read,
one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.safetensors import TensorInfo, nbytes_of, read_bits, widen_bf16
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.tools.model.decoder import NORM

# Of one tensor an expert, and of one of all: the layer's experts, the expert's number, the matrix
_APART = re.compile(r"^(text\..*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_JOINED = re.compile(r"^(text\..*\.experts)\.(gate_up_proj|down_proj)$")
QUANTISED = "quantised experts, which vtx does not read; use the unquantised checkpoint"
_QUANTISED = re.compile(r"^text\..*\.experts\..*(scale|scale_inv|qweight|scales|zeros|blocks|absmax|packed)$")


@dataclass(frozen=True, slots=True)
class Stacked:
    """Rows `first` to `first` + `height` of the matrices `parts`, [rows, width] of one expert each, as one matrix."""

    parts: tuple[TensorInfo, ...]
    first: int
    height: int

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        expert = rows // self.height
        numbers = rows % self.height + self.first
        out = np.empty((len(rows), self.parts[0].shape[1]), np.float32)
        for number in np.unique(expert):
            part = self.parts[number]
            bits = read_bits(part, numbers[expert == number])
            out[expert == number] = widen_bf16(bits) if part.dtype == "BF16" else bits
        return out

    def info(self, name: str) -> TensorInfo:
        """The matrix as a tensor of float32 whose rows are gathered."""
        shape = (len(self.parts) * self.height, self.parts[0].shape[1])
        return TensorInfo(
            name, "F32", shape, self.parts[0].file, 0, 4 * prod(shape), self.parts[0].identity, source=self
        )


def stack_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by canonical names, those of experts as one matrix for each of gate, up and down.

    Raises CheckpointError, UnsupportedModelError.
    """
    norm = tensors.get(NORM)
    width = 0 if norm is None else norm.shape[0]  # by which [in, out] is told from [out, in], as transformers does
    stacked = dict[str, TensorInfo]()
    apart = dict[str, dict[int, TensorInfo]]()
    for name, info in tensors.items():
        if _QUANTISED.match(name):
            raise UnsupportedModelError(f"tensor {name} belongs to {QUANTISED}")
        if (match := _APART.match(name)) is not None:
            apart.setdefault(f"{match[1]}.{match[3]}_proj.weight", {})[int(match[2])] = info
        elif (match := _JOINED.match(name)) is not None:
            stacked |= _split(match[1], match[2], info, width)
        else:
            stacked[name] = info
    return stacked | {name: _joined(name, parts) for name, parts in apart.items()}


def _joined(name: str, parts: Mapping[int, TensorInfo]) -> TensorInfo:
    """One matrix of one tensor an expert."""
    ordered = tuple(parts[number] for number in sorted(parts))
    if [*sorted(parts)] != [*range(len(parts))] or len({part.shape for part in ordered}) > 1:
        raise CheckpointError(
            f"the experts of {name} are {len(parts)} tensors, not of one shape and numbered from 0 on; download the "
            "checkpoint again"
        )
    if any(part.source is not None for part in ordered):
        raise UnsupportedModelError(f"{name} has {QUANTISED}")
    return Stacked(ordered, 0, ordered[0].shape[0]).info(name)


def _split(experts: str, kind: str, info: TensorInfo, width: int) -> dict[str, TensorInfo]:
    """The matrices in one tensor of all experts, [experts, out, in] or [experts, in, out]; gate and up are one."""
    if len(info.shape) != 3:
        raise CheckpointError(
            f"tensor {info.name} has shape {list(info.shape)}, not one of three axes; download it again"
        )
    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    axis = 2 if len(parts) == 2 else 1  # of the decoder's width
    turned = info.shape[axis] != width
    count, rows, columns = info.shape
    height = (columns if turned else rows) // len(parts)
    matrices = dict[str, TensorInfo]()
    for number, part in enumerate(parts):
        name = f"{experts}.{part}_proj.weight"
        if turned:
            matrices[name] = Stacked(_matrices(info), number * height, height).info(name)
            continue
        offset = info.offset + number * nbytes_of(info.dtype, (height, columns))
        spread = (height, rows) if len(parts) > 1 else None
        shape = (count * height, columns)
        matrices[name] = replace(info, shape=shape, offset=offset, nbytes=nbytes_of(info.dtype, shape), spread=spread)
    return matrices


def _matrices(info: TensorInfo) -> tuple[TensorInfo, ...]:
    """The matrix of each expert, turned to [out, in]."""
    nbytes = info.nbytes // info.shape[0]
    places = (info.offset + number * nbytes for number in range(info.shape[0]))
    return tuple(replace(info, shape=info.shape[1:], offset=offset, nbytes=nbytes).turned for offset in places)
