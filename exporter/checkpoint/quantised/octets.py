"""Matrices of a byte a weight, int8 or FP8 (E4M3), with scales for the whole, for rows, or for blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.quantised.matrix import FLOATS, Matrix, MatrixParts, Rows, widened
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import UnsupportedModelError

E4M3, INT8 = "F8_E4M3", "I8"


def octet_matrix(parts: MatrixParts, scale_end: str, blocks: tuple[int, int] | None, zero_end: str = "") -> Matrix:
    """The matrix of `weight` and its scales; `blocks`: rows and columns of a block, if they are known."""
    codes = parts.need("weight", (E4M3, INT8))
    rows, width = codes.shape
    held = parts.tensors[scale_end].shape
    scales = replace(parts.need(scale_end, FLOATS, held), shape=(*held, 1, 1)[:2])
    tall, wide = rows // scales.shape[0], width // scales.shape[1]
    if blocks is not None and scales.shape == (-(-rows // blocks[0]), -(-width // blocks[1])):
        tall, wide = blocks
    elif len(held) > 2 or (tall * scales.shape[0], wide * scales.shape[1]) != (rows, width):
        raise parts.error(scale_end, f"is {list(held)}, not the scales of rows, groups or blocks of {[rows, width]}")
    zeros = None
    if zero_end in parts.tensors:
        zeros = replace(parts.need(zero_end, (INT8,), held), shape=scales.shape)
    columns = None if width % wide == 0 else np.arange(width) // wide

    def part(first: int, last: int) -> Rows:
        numbers = read_bits(replace(codes, dtype=INT8), slice(first, last))
        if codes.dtype == E4M3:
            import torch

            numbers = torch.from_numpy(numbers).view(torch.float8_e4m3fn).float().numpy()
        blocks, of_rows = slice(first // tall, -(-last // tall)), np.arange(first, last) // tall - first // tall
        points = None if zeros is None else read_bits(zeros, blocks)[of_rows]
        return Rows(numbers, widened(scales, read_bits(scales, blocks))[of_rows], points, columns)

    scheme = Scheme(INT8, wide) if codes.dtype == INT8 and columns is None else None
    return Matrix((rows, width), (codes, scales), part, scheme=scheme, zeroed=zeros is not None)


def block_of(sizes: object) -> tuple[int, int] | None:
    """The rows and columns of a block as a quantization_config states them; None if it does not."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModelError(f"quantization_config: a block is {sizes!r:.40}; vtx reads [rows, columns]")
    return sizes[0], sizes[1]
