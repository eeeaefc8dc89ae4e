"""AWQ's GEMM layout: 4 bits, eight neighbouring rows to a word in an order of its own, and zero points.

`qweight` I32 [in, out / 8], `qzeros` I32 [groups, out / 8], `scales` [groups, out] (AutoAWQ, packing_utils.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import (
    FLOATS,
    Floats,
    Format,
    Matrix,
    Parts,
    Settings,
    centred,
    check_setting,
    columns_of,
    float_columns,
    group_of,
    stored_dtype,
    unpacked,
)
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError

BITS = 4
WORD = 32 // BITS
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight rows in a word; it has rows 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on


def _check(settings: Settings) -> None:
    check_setting(settings, ("bits", "w_bit"), (BITS,), BITS)
    check_setting(settings, ("version", "format", "checkpoint_format"), ("gemm",), "gemm")


def _matrix(settings: Settings, parts: Parts) -> Matrix:
    codes, (width, words) = parts.table("qweight", ("I32",))
    group = group_of(settings, ("group_size", "q_group_size"), width)
    if width % group:
        raise CheckpointError(f"tensor {parts.name}.qweight has {width} inputs, not a multiple of the group of {group}")
    groups, rows = width // group, words * WORD
    scales = parts.need("scales", FLOATS, (groups, rows))
    zeros = parts.need("qzeros", ("I32",), (groups, words)) if settings.get("zero_point", True) else None

    def integers(info: TensorInfo, first: int, last: int) -> NDArray[np.int8]:
        packed = columns_of(info, first // WORD, last // WORD)  # [words, in]
        every = unpacked(packed[..., None], BITS)[..., PLACES]  # [words, in, 8]
        return centred(np.ascontiguousarray(every.transpose(0, 2, 1)).reshape(last - first, -1), BITS)

    def steps(first: int, last: int) -> tuple[Floats, NDArray[np.int8] | None]:
        return float_columns(scales, first, last), None if zeros is None else integers(zeros, first, last)

    held = (codes, scales) if zeros is None else (codes, scales, zeros)
    scheme = Scheme(stored_dtype(BITS), group)
    return Matrix(
        parts.weight, (rows, width), held, lambda first, last: integers(codes, first, last), steps, WORD, scheme=scheme
    )


AWQ = Format(_check, _matrix, ("qweight",), ("qweight", "qzeros", "scales"))
