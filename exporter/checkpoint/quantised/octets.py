"""Matrices of a byte a weight, int8 or FP8 (E4M3), with scales for the whole, for rows, or for blocks.

FP8 as of DeepSeek and Qwen: a weight is the product of `weight` F8_E4M3 [out, in] and, for its block or the whole
matrix, `weight_scale_inv` [blocks of rows, blocks of columns].
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.quantised.matrix import (
    FLOATS,
    WEIGHT,
    Matrix,
    MatrixParts,
    QuantisedFormat,
    Rows,
    Settings,
    check_setting,
    floats,
    stored_scheme,
)
from vtx.runtime.bundle.safetensors import is_sizes, read_bits
from vtx.runtime.errors import UnsupportedModelError

E4M3 = "F8_E4M3"
INT8 = "I8"
SCALE = ".weight_scale_inv"


def octet_matrix(parts: MatrixParts, scale_end: str, blocks: tuple[int, int] | None, zero_end: str = "") -> Matrix:
    """The matrix of `weight` and its scales; `blocks`: rows and columns of a block, if they are known."""
    codes = parts.need(WEIGHT, (E4M3, INT8))
    rows, width = codes.shape
    stored = parts.tensors[scale_end].shape
    shape = (*stored, 1, 1)[: max(2, len(stored))]
    scales = replace(parts.need(scale_end, FLOATS, stored), shape=shape)
    equal = rows // shape[0], width // shape[1]
    for tall, wide in (blocks or equal, equal):
        if 0 not in (tall, wide) and (-(-rows // tall), -(-width // wide)) == shape:
            break
    else:
        raise parts.error(scale_end, f"is {list(stored)}, not the scales of rows, groups or blocks of {[rows, width]}")
    zeros = None
    if zero_end in parts.tensors:
        zeros = replace(parts.need(zero_end, (INT8,), stored), shape=shape)
    columns = slice(None) if width % wide == 0 else np.arange(width) // wide

    def part(first: int, last: int) -> Rows:
        numbers = read_bits(replace(codes, dtype=INT8), slice(first, last))
        if codes.dtype == E4M3:
            import torch

            numbers = torch.from_numpy(numbers).view(torch.float8_e4m3fn).float().numpy()
        blocks = slice(first // tall, -(-last // tall))
        of_rows = np.arange(first, last) // tall - first // tall
        steps = floats(scales, blocks)[of_rows][:, columns]
        points = np.zeros(steps.shape, np.int8) if zeros is None else read_bits(zeros, blocks)[of_rows][:, columns]
        return Rows(numbers, steps, points)

    scheme = stored_scheme(INT8, width, wide) if codes.dtype == INT8 and width % wide == 0 else None
    return Matrix((rows, width), (codes, scales), part, scheme, zeros is not None)


def block_of(sizes: object) -> tuple[int, int] | None:
    """The rows and columns of a block as a quantization_config states them; None if it does not."""
    if sizes is None:
        return None
    if not is_sizes(sizes) or len(sizes) != 2 or 0 in sizes:
        raise UnsupportedModelError(f"quantization_config: a block is {sizes!r:.40}; vtx reads [rows, columns]")
    return sizes[0], sizes[1]


def _check(settings: Settings) -> None:
    check_setting(settings, "fmt", ("e4m3", None))
    block_of(settings.get("weight_block_size"))


def _matrix(settings: Settings, parts: MatrixParts) -> Matrix:
    return octet_matrix(parts, SCALE, block_of(settings.get("weight_block_size", [128, 128])))


FP8 = QuantisedFormat(_check, _matrix, (SCALE,), (WEIGHT, SCALE), (".input_scale", ".activation_scale"))
