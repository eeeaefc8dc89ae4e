"""Matrices of a byte a weight, int8 or FP8 (E4M3), with scales for the whole, for rows, or for blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vtx.exporter.checkpoint.quantised.matrix import FLOATS, Floats, Matrix, Parts, Rows, widened
from vtx.runtime.bundle.safetensors import read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import UnsupportedModelError

E4M3, INT8 = "F8_E4M3", "I8"


def _e4m3() -> Floats:
    """The values of all bytes: a sign, 4 bits of exponent with a bias of 7, 3 of fraction, and NaN instead of infinity.

    arXiv 2209.05433, table 1.
    """
    octets = np.arange(128)
    exponents, fractions = octets >> 3, octets & 7
    sizes = np.where(exponents == 0, fractions * 2.0**-9, (8 + fractions) * 2.0 ** (exponents - 10))
    sizes[-1] = np.nan
    return np.concatenate((sizes, -sizes)).astype(np.float32)


VALUES = _e4m3()


def octet_matrix(parts: Parts, scale_end: str, blocks: tuple[int, int] | None, zero_end: str = "") -> Matrix:
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
    columns = np.arange(width) // wide

    def part(first: int, last: int) -> Rows:
        of_rows, stored = np.arange(first, last) // tall, read_bits(replace(codes, dtype="U8"), slice(first, last))
        numbers = stored.view(np.int8) if codes.dtype == INT8 else VALUES[stored]
        points = None if zeros is None else read_bits(zeros, of_rows)
        return Rows(numbers, widened(scales, read_bits(scales, of_rows)), columns, points)

    stored = (codes, scales) if zeros is None else (codes, scales, zeros)
    scheme = Scheme(INT8, wide) if codes.dtype == INT8 and width % wide == 0 else None
    return Matrix(f"{parts.name}.weight", (rows, width), stored, part, scheme=scheme, zeroed=zeros is not None)


def block_of(sizes: object) -> tuple[int, int] | None:
    """The rows and columns of a block as a quantization_config states them; None if it does not."""
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModelError(f"quantization_config: a block is {sizes!r:.40}; vtx reads [rows, columns]")
    return sizes[0], sizes[1]
