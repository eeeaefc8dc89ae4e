"""Matrices of integers that are packed into 32-bit words: what AWQ, GPTQ and compressed-tensors have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.checkpoint.quantised.matrix import FLOATS, Matrix, MatrixParts, Rows, widened
from vtx.runtime.bundle.safetensors import TensorInfo, read_bits
from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.precision import PRECISIONS

WORDS = ("I32",)


@dataclass(frozen=True, slots=True)
class WordLayout:
    """Names of the tensors, and their axes: `turned`: a matrix is [in, out].

    `by_rows`: a word holds neighbouring rows of a matrix, else neighbouring inputs; of zero points always rows.
    `places`: those of neighbours in a word, from its lowest bits on, if they are not in their order. `zeroed`: there
    are zero points, else there may be; `shift` is added to a word of them, and if `symmetric` they are 0 then. `order`:
    the tensor of the columns' groups.
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
    symmetric: bool = False


def word_matrix(parts: MatrixParts, layout: WordLayout, shape: tuple[int, int], bits: int, group: int) -> Matrix:
    """The matrix of `shape` [out, in], with a scale for `group` weights of a row."""
    (height, width), each = shape, 32 // bits

    def need(end: str, dtypes: tuple[str, ...], rows: int, columns: int) -> TensorInfo:
        return parts.need(end, dtypes, (columns, rows) if layout.turned else (rows, columns))

    groups, tall = -(-width // group), -(-height // each)
    even = np.arange(width) // group
    order = parts.columns(layout.order, width, groups) if layout.order in parts.tensors else even
    columns = None if width % group == 0 and np.array_equal(order, even) else order
    codes = need(layout.codes, WORDS, *((tall, width) if layout.by_rows else (height, -(-width // each))))
    scales, zeros = need(layout.scales, FLOATS, height, groups), None
    if layout.zeroed or layout.zeros in parts.tensors:
        zeros = need(layout.zeros, WORDS, tall, groups)

    def cut(info: TensorInfo, first: int, last: int) -> NDArray[Any]:
        return read_bits(info).T[first:last] if layout.turned else read_bits(info, slice(first, last))

    def of_rows(info: TensorInfo, first: int, last: int, shift: int = 0) -> NDArray[np.int8]:
        words = cut(info, first // each, -(-last // each)).astype(np.uint32) + np.uint32(shift)
        neighbours = _unpacked(words[..., None], bits)[..., layout.places or slice(None)]
        return _signed(neighbours.transpose(0, 2, 1).reshape(-1, words.shape[1])[: last - first], bits)

    def part(first: int, last: int) -> Rows:
        if layout.by_rows:
            integers = of_rows(codes, first, last)
        else:
            integers = _signed(_unpacked(cut(codes, first, last), bits)[:, :width], bits)
        points = None if zeros is None else of_rows(zeros, first, last, layout.shift)
        return Rows(integers, widened(scales, cut(scales, first, last)), points, columns)

    scheme = Scheme(PRECISIONS[f"int{bits}"].stored, group) if columns is None else None
    return Matrix(shape, (codes, scales), part, each, scheme, zeros is not None and not layout.symmetric)


def _unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The unsigned integers in the last axis of words, from the lowest bits on."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack((octets & 15, octets >> 4), -1).reshape(*octets.shape[:-1], -1)


def _signed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Integers less the middle of their range."""
    return np.ascontiguousarray(codes - np.uint8(1 << (bits - 1))).view(np.int8)
