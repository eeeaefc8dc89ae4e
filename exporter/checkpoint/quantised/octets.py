"""Matrices of a byte a weight, int8 or FP8 (E4M3), with scales for the whole, for rows, or for blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import FLOATS, Floats, Matrix, Parts, floats
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import CheckpointError

E4M3, INT8 = "F8_E4M3", "I8"


def _e4m3() -> Floats:
    """The values of all bytes: a sign, 4 bits of exponent with a bias of 7, 3 of fraction, and NaN instead of infinity.

    arXiv 2209.05433, table 1.
    """
    octets = np.arange(256)
    exponents, fractions = (octets >> 3) & 15, (octets & 7) / 8
    sizes = np.where(exponents == 0, fractions * 2.0**-6, (1 + fractions) * 2.0 ** (exponents - 7))
    sizes[(octets & 127) == 127] = np.nan
    return np.where(octets < 128, sizes, -sizes).astype(np.float32)


VALUES = _e4m3()


def octet_matrix(
    parts: Parts, scale_end: str, blocks: tuple[int, int] | None, zero_end: str | None = None, factor: float = 1.0
) -> Matrix:
    """The matrix of `weight` and its scales, which are multiplied by `factor`; `blocks`: sizes of a block, if known."""
    codes, (rows, width) = parts.table("weight", (E4M3, INT8))
    scales = parts.need(scale_end, FLOATS)
    counts = (*scales.shape, 1, 1)[:2]
    tall, wide = _block(rows, counts[0]), _block(width, counts[1])
    if blocks is not None and counts == (-(-rows // blocks[0]), -(-width // blocks[1])):
        tall, wide = blocks
    if len(scales.shape) > 2 or not tall or not wide:
        raise CheckpointError(
            f"tensor {parts.name}.{scale_end} has shape {list(scales.shape)}, which is not that of rows, groups or "
            f"blocks of {list(codes.shape)} weights; correct the quantization_config, or download it again"
        )
    zeros = None
    if zero_end is not None:
        zeros = replace(parts.need(zero_end, (INT8,), scales.shape), shape=counts)
    scales = replace(scales, shape=counts)
    columns = None if width == wide * counts[1] else np.arange(width) // wide

    def spread(table: NDArray[Any], first: int, last: int) -> NDArray[Any]:
        return table[np.arange(first, last) // tall - first // tall]

    def steps(first: int, last: int) -> tuple[Floats, NDArray[np.int8] | None]:
        part = slice(first // tall, -(-last // tall))
        points = None if zeros is None else spread(read_bits(zeros, part), first, last)
        return spread(floats(scales, part), first, last) * np.float32(factor), points

    def values(first: int, last: int) -> NDArray[np.int8] | Floats:
        if codes.dtype == INT8:
            integers: NDArray[np.int8] = read_bits(codes, slice(first, last))
            return integers
        numbers: Floats = VALUES[read_bits(replace(codes, dtype="U8"), slice(first, last))]
        return numbers

    held: tuple[TensorInfo, ...] = (codes, scales) if zeros is None else (codes, scales, zeros)
    scheme = Scheme(INT8, wide) if codes.dtype == INT8 and columns is None else None
    return Matrix(parts.weight, (rows, width), held, values, steps, 1, columns, scheme)


def _block(size: int, count: int) -> int:
    """The size of each of `count` equal blocks, 0 if there are none."""
    return 0 if count < 1 or size % count else size // count
