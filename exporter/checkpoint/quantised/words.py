"""Matrices of integers that are packed into 32-bit words: what AWQ, GPTQ and compressed-tensors have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import FLOATS, Matrix, MatrixParts, Rows, floats, stored_scheme
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits

WORDS = ("I32",)


@dataclass(frozen=True, slots=True)
class WordLayout:
    """Names of the tensors, and their axes: `turned`: a matrix is [in, out].

    `by_rows`: a word holds neighbouring rows of a matrix, else neighbouring inputs; of zero points always rows.
    `places`: those of neighbours in a word, from its lowest bits on, if they are not in their order. `zeroed`: there
    are zero points, else there may be; `shift` is added to a word of them. `order`: the tensor of the columns' groups.
    """

    codes: str
    scales: str
    zeros: str
    turned: bool = True
    by_rows: bool = False
    places: tuple[int, ...] | None = None
    zeroed: bool = True
    order: str = ""
    shift: int = 0


def word_matrix(parts: MatrixParts, layout: WordLayout, shape: tuple[int, int], bits: int, group: int) -> Matrix:
    """The matrix of `shape` [out, in], with a scale for `group` weights of a row."""
    height, width = shape
    each = 32 // bits

    def need(end: str, dtypes: tuple[str, ...], rows: int, columns: int) -> TensorInfo:
        info = parts.need(end, dtypes, (columns, rows) if layout.turned else (rows, columns))
        return replace(info, shape=(rows, columns), transposed=layout.turned)

    groups = -(-width // group)
    tall = -(-height // each)
    even = np.arange(width) // group
    order = parts.columns(layout.order, width, groups) if layout.order in parts.tensors else even
    in_turn = width % group == 0 and np.array_equal(order, even)
    columns = slice(None) if in_turn else order
    codes = need(layout.codes, WORDS, *((tall, width) if layout.by_rows else (height, -(-width // each))))
    scales = need(layout.scales, FLOATS, height, groups)
    zeros = None
    if layout.zeroed or layout.zeros in parts.tensors:
        zeros = need(layout.zeros, WORDS, tall, groups)

    def of_rows(info: TensorInfo, first: int, last: int, shift: int = 0) -> NDArray[np.int8]:
        words = read_bits(info, slice(first // each, -(-last // each))) + np.int32(shift)
        neighbours = _unpacked(words, bits)[..., layout.places or slice(None)].transpose(0, 2, 1)
        return neighbours.reshape(-1, words.shape[1])[first % each :][: last - first]

    def part(first: int, last: int) -> Rows:
        if layout.by_rows:
            integers = of_rows(codes, first, last)
        else:
            integers = _unpacked(read_bits(codes, slice(first, last)), bits).reshape(last - first, -1)[:, :width]
        if zeros is None:
            points = np.zeros((last - first, groups), np.int8)
        else:
            points = of_rows(zeros, first, last, layout.shift)
        return Rows(integers, floats(scales, slice(first, last))[:, columns], points[:, columns])

    scheme = stored_scheme(f"I{bits}", width, group) if in_turn else None
    zeroed = zeros is not None and bool(of_rows(zeros, 0, height, layout.shift).any())
    return Matrix(shape, (codes, scales), part, scheme, zeroed)


def _unpacked(words: NDArray[Any], bits: int) -> NDArray[np.int8]:
    """The integers in words, from the lowest bits on, less the middle of their range; they are a last axis."""
    octets = np.ascontiguousarray(words[..., None]).view(np.uint8)
    codes = np.stack([octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1)
    return (codes.reshape(*words.shape, -1) - np.uint8(1 << (bits - 1))).view(np.int8)
