"""Matrices as 4-bit or 8-bit integers with scales, some rows at a time.

A weight is scale * q, with a zero point scale * (q - zero). int8 has a scale a row and q in -127..127. int4 has a scale
for every `block` weights along a row and q in -8..7, two to a byte, the first in the low half; zero points of 4 bits
too. Scales are float16 and never zero; q is chosen for the rounded scale. A block gets the scale, and the zero point if
it has one, with the least squared error of a few. Matrices of quantised checkpoints, which keep their integers, may
have other blocks.

With `Feedback` from measured inputs, the weights of a row are rounded one after another, and those that follow make up
for the error on these inputs: GPTQ (arXiv 2210.17323, Eq. 3), in the form without an inverse (arXiv 2307.13304, Eq. 2
and theorem 6). Few tokens are measured, so the damping is larger than GPTQ's own
0.01: with a tenth of it the products of other texts lose up to a quarter more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.stored import Scheme
from vtx.runtime.errors import ExportError

LEAST = float(np.finfo(np.float16).smallest_subnormal)
LARGEST = float(np.finfo(np.float16).max)
# Relative to the scale for the block's largest weight. The best for a Gaussian block of 64 is near 0.87.
RATIOS = {4: (1.0, 0.94, 0.875, 0.82, 0.76), 8: (1.0,)}
RANGES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)  # of a block with a zero point
Floats = NDArray[np.float32]


DAMPING = 0.5  # of the mean square of an input, added to the square of each


@dataclass(frozen=True, slots=True)
class Feedback:
    """Of the inputs of a matrix: `squares` [in], in the mean 1, and the upper factor `shares` [in, in].

    What a weight lost, times its row of `shares`, is added to the weights that follow.
    """

    squares: Floats
    shares: Floats

    @classmethod
    def of(cls, inputs: Floats) -> Feedback:
        """From a sample of inputs [tokens, in], of any scale.

        The matrix [in, in] is in memory once, as float32: numpy's own factorisation takes seven times that.
        """
        import torch

        backward = inputs[:, ::-1].copy()  # for an upper factor from LAPACK's lower one
        moments = backward.T @ backward
        del backward
        diagonal = np.einsum("ii->i", moments)
        diagonal += np.float32(DAMPING * diagonal.mean() or 1)
        sums = diagonal[::-1].copy()
        factor = torch.from_numpy(moments).mT  # symmetric, and laid out as LAPACK has it
        torch.linalg.cholesky_ex(factor, check_errors=True, out=(factor, torch.empty(0, dtype=torch.int32)))
        moments /= diagonal.copy()[:, None]
        return cls(sums / sums.mean(), moments.T[::-1, ::-1])


Quantised = tuple[NDArray[Any], NDArray[np.float16], NDArray[Any] | None]


def quantise(rows: Floats, scheme: Scheme, name: str, feedback: Feedback | None = None) -> Quantised:
    """Finite weights [n, in] as integers [n, bytes] (int8, or uint8 with two weights each), scales and zero points.

    Scales are [n, blocks], zero points too, or two to a byte; a symmetric `scheme` has none. Raises ExportError.
    """
    blocks = rows.reshape(len(rows), -1, scheme.block)
    levels = 7 if scheme.bits == 4 else 127
    peak = np.abs(blocks).max(-1)
    if peak.size and float(peak.max()) > LARGEST * levels:
        raise ExportError(
            f"tensor {name} holds {float(peak.max()):g}, int{scheme.bits} reaches {LARGEST * levels:g} at most; "
            "export it with --precision fp32"
        )
    if feedback is not None and scheme.bits == 4:
        return _fed_back(rows, scheme, feedback)
    if scheme.zero_bits:
        shifted, steps, zeros = _search_with_zeros(blocks)
        return pack(shifted.reshape(rows.shape)), steps, pack(zeros) if scheme.zero_bits == 4 else zeros
    low = -8 if scheme.bits == 4 else -levels
    integers, scales = _search(blocks, peak / levels, low, levels, RATIOS[scheme.bits])
    flat = integers.reshape(rows.shape)
    return (pack(flat) if scheme.bits == 4 else flat), scales, None


def _fed_back(rows: Floats, scheme: Scheme, feedback: Feedback) -> Quantised:
    """As `quantise` to 4 bits, where each weight's error is made up for by the weights that follow."""
    losses = np.empty_like(rows)
    width = scheme.block
    count = rows.shape[1] // width
    integers = np.empty(rows.shape, np.int8)
    scales = np.empty((len(rows), count), np.float16)
    zeros = np.zeros((len(rows), count), np.int8)
    for number in range(count):
        span = slice(number * width, (number + 1) * width)
        before = slice(span.start)
        # Of the errors of this block: so it has what those before would have it make up for before its scale is chosen.
        shares = np.linalg.inv(feedback.shares[span, span])
        block = rows[:, span] + losses[:, before] @ feedback.shares[before, span] @ shares
        weights = feedback.squares[span]
        if scheme.zero_bits:
            _, step, zero = _search_with_zeros(block[:, None], weights)
            zeros[:, number] = zero[:, 0]
        else:
            peak = np.abs(block).max(-1, keepdims=True)
            _, step = _search(block[:, None], peak / 7, -8, 7, RATIOS[4], weights)
        scales[:, number] = step[:, 0]
        wide = step[:, 0].astype(np.float32)
        point = zeros[:, number].astype(np.float32)
        for column in range(width):
            rounded = np.clip(np.rint(block[:, column] / wide) + point, -8, 7)
            restored = (rounded - point) * wide
            integers[:, span.start + column] = rounded
            losses[:, span.start + column] = rows[:, span.start + column] - restored
            block[:, column + 1 :] -= (block[:, column] - restored)[:, None] * shares[column, column + 1 :]
    if scheme.zero_bits == 4:
        return pack(integers), scales, pack(zeros)
    return pack(integers), scales, zeros if scheme.zero_bits else None


def _search_with_zeros(
    blocks: Floats, weights: Floats | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.int8]]:
    """For each block 4-bit integers, scale and zero point of the least squared error among `RANGES` of its range.

    `weights` [block] of the squares, None for equal ones.
    """
    low = np.minimum(blocks.min(-1), 0)
    high = np.maximum(blocks.max(-1), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scales = np.empty(low.shape, np.float16)
    zeros = np.empty(low.shape, np.int8)
    for ratio in RANGES:
        exact = (high - low) * np.float32(ratio / 15)
        steps = np.maximum(exact, LEAST).astype(np.float16)
        steps[exact == 0] = 1  # a block of zeros
        wide = steps.astype(np.float32)
        points = np.clip(np.rint(-low * np.float32(ratio) / wide) - 8, -8, 7)
        factors = _shifted(blocks, wide, points) - points[..., None]
        steps = _fitted(factors, blocks, steps, weights)
        errors = _squares(factors * steps.astype(np.float32)[..., None] - blocks, weights)
        better = errors < best
        best[better], scales[better], zeros[better] = errors[better], steps[better], points[better]
    return _shifted(blocks, scales.astype(np.float32), zeros).astype(np.int8), scales, zeros


def _fitted(factors: Floats, blocks: Floats, scales: NDArray[Any], weights: Floats | None) -> NDArray[np.float16]:
    """The scales of the least squared error of `factors`, integers less their zero points; `scales` for all zeros."""
    weighted = factors if weights is None else factors * weights
    squares = np.einsum("nbk,nbk->nb", weighted, factors)
    fitted = np.einsum("nbk,nbk->nb", weighted, blocks) / np.maximum(squares, LEAST)
    return np.where(fitted > LEAST, np.minimum(fitted, LARGEST), scales).astype(np.float16)


def _shifted(blocks: Floats, scales: Floats, zeros: NDArray[Any]) -> Floats:
    """The integers -8..7 nearest to the weights, by scales and zero points [n, blocks]."""
    integers: Floats = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], -8, 7)
    return integers


def _search(
    blocks: Floats, reach: Floats, low: int, high: int, ratios: tuple[float, ...], weights: Floats | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """For each block the integers and the scale of the least squared error among `ratios` of `reach` [n, blocks]."""
    best = np.full(reach.shape, np.inf, np.float32)
    chosen = np.empty(reach.shape, np.float16)
    integers = np.empty_like(blocks)
    error = np.empty_like(blocks)
    for ratio in ratios:
        exact = reach * np.float32(ratio)
        scales = np.maximum(exact, LEAST).astype(np.float16)
        scales[exact == 0] = 1  # a block of zeros
        wide = scales.astype(np.float32)[..., None]
        _nearest(blocks, wide, low, high, integers)
        if len(ratios) == 1:
            return integers.astype(np.int8), scales
        np.multiply(integers, wide, out=error)
        np.subtract(error, blocks, out=error)
        errors = _squares(error, weights)
        better = errors < best
        best[better], chosen[better] = errors[better], scales[better]
    _nearest(blocks, chosen.astype(np.float32)[..., None], low, high, integers)
    return integers.astype(np.int8), chosen


def _squares(error: Floats, weights: Floats | None) -> Floats:
    """The sums of the squared errors [n, blocks, block] of each block."""
    sums: Floats = np.einsum("nbk,nbk->nb", error, error if weights is None else error * weights)
    return sums


def _nearest(blocks: Floats, scales: Floats, low: int, high: int, out: Floats) -> None:
    np.divide(blocks, scales, out=out)
    np.rint(out, out=out)
    np.clip(out, low, high, out=out)


def pack(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Integers -8..7, [n, even], two to a byte in two's complement, the first in the low half: [n, even / 2]."""
    halves = integers.view(np.uint8)
    return (halves[:, 0::2] & np.uint8(0x0F)) | (halves[:, 1::2] << np.uint8(4))


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    both = np.stack((packed << 4, packed & 0xF0), -1).view(np.int8) >> 4
    return both.reshape(len(packed), -1)


def dequantise(
    integers: NDArray[Any], scales: NDArray[np.float16], zeros: NDArray[Any] | None, scheme: Scheme
) -> Floats:
    """The weights [n, in]; `zeros` [n, blocks], or two to a byte, are subtracted from the integers first."""
    values = unpack(integers) if scheme.bits == 4 else integers
    blocks = values.reshape(len(values), -1, scheme.block).astype(np.float32)
    if zeros is not None:
        blocks -= (unpack(zeros) if zeros.dtype == np.uint8 else zeros)[..., None]
    return (blocks * scales.astype(np.float32)[..., None]).reshape(len(values), -1)
