"""The parts that reductions add to the vision graph: merging of similar windows, and the class token's attention.

The number of tokens of an image then depends on the image, so these graphs take one image at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.config import VisionConfig
from vtx.exporter.graphs.builder import Builder

SIDE = 3  # of a window, in patches
WINDOW = SIDE**2
PAIRS = WINDOW * (WINDOW - 1)  # both ways
UNSEEN = np.array(-1e30, np.float32)  # of a masked product: nothing is left of it after the softmax
TINY = 1e-8  # below it a token has no direction; torch's cosine_similarity uses the same


def patch_indices(v: VisionConfig) -> NDArray[np.int64]:
    """Raster index of the patch of each token of the tower; the class token has -1."""
    return np.arange(v.rows, dtype=np.int64) - v.class_token


@dataclass(frozen=True, slots=True)
class Merged:
    """The tower's tokens after merging: `hidden` [1, n, hidden], `patch_index` and `merged` [n] int64.

    `similarity` [n] float32 is the mean cosine of a merged window, 0 of other tokens. `seen` [1, 1, 1, n] bool: the
    tokens that remain, None for all. A removed token has -1 for merged.
    """

    hidden: ir.Value
    patch_index: ir.Value
    merged: ir.Value
    similarity: ir.Value
    seen: ir.Value | None


def merge_windows(b: Builder, v: VisionConfig, x: ir.Value, tau: ir.Value) -> Merged:
    """LSM (MustDrop Eq. 5): of x [1, n, hidden], every similar 3x3 window becomes the mean of its nine tokens.

    Windows do not overlap; they start at the first patch, and rows and columns left over at the far borders stay. A
    window is similar when the mean cosine of its 36 pairs is at least `tau`. A merged window takes its first patch's
    index. Its other tokens are removed, or masked where the dialect cannot have sizes that depend on values.
    """
    windows = _windows(v)
    hidden = b.reshape(x, v.rows, v.hidden)
    inside = b.op("Gather", hidden, b.constant(windows))
    cosine = _mean_cosine(b, b.to_float32(inside))
    alike = b.op("GreaterOrEqual", cosine, tau)

    window_of, member, stands = np.zeros(v.rows, np.int64), np.zeros(v.rows, bool), np.ones(v.rows, bool)
    window_of[windows] = np.arange(len(windows))[:, None]
    member[windows], stands[windows[:, 1:]] = True, False
    of_window = b.constant(window_of)
    in_merged = b.op("And", b.op("Gather", alike, of_window), b.constant(member))
    means = b.op("Div", b.op("ReduceSum", inside, b.constant([1]), keepdims=0), b.scalar(WINDOW))
    now = b.op("Where", b.op("Unsqueeze", in_merged, b.constant([1])), b.op("Gather", means, of_window), hidden)

    kept = b.op("Or", b.constant(stands), b.op("Not", in_merged))
    merged = b.op("Cast", in_merged, to=ir.DataType.INT64.value)
    zero = b.constant(np.array(0, np.float32))
    similarity = b.op("Where", in_merged, b.op("Gather", cosine, of_window), zero)
    patch_index = b.constant(patch_indices(v))
    if b.dialect.sizes_from_values:
        return _leave(b, now, patch_index, merged, similarity, kept)
    return _hide(b, v, now, patch_index, merged, similarity, kept)


def _leave(
    b: Builder, hidden: ir.Value, patch_index: ir.Value, merged: ir.Value, similarity: ir.Value, kept: ir.Value
) -> Merged:
    indices = b.op("Squeeze", b.op("NonZero", kept), b.constant([0]))
    hidden, patch_index, merged, similarity = (
        b.op("Gather", x, indices) for x in (hidden, patch_index, merged, similarity)
    )
    return Merged(b.op("Unsqueeze", hidden, b.constant([0])), patch_index, merged, similarity, None)


def _hide(
    b: Builder, v: VisionConfig, hidden: ir.Value, patch_index: ir.Value, merged: ir.Value, similarity: ir.Value,
    kept: ir.Value,
) -> Merged:  # fmt: skip
    merged = b.op("Where", kept, merged, b.constant(np.array(-1)))
    hidden, seen = b.op("Unsqueeze", hidden, b.constant([0])), b.reshape(kept, 1, 1, 1, v.rows)
    return Merged(hidden, b.op("Identity", patch_index), merged, similarity, seen)


def class_attention(b: Builder, v: VisionConfig, q: ir.Value, k: ir.Value, seen: ir.Value | None) -> ir.Value:
    """Head-mean attention [images, tokens] float32 of token 0, from a block's q and k [images, tokens, hidden] (Eq. 6).

    `seen` as in `Merged`.
    """
    size = v.hidden // v.heads
    first = b.to_float32(b.op("Slice", q, b.constant([0]), b.constant([1]), b.constant([1])))
    scaled = b.op("Mul", first, b.constant(np.array(size**-0.5, np.float32)))
    query = b.reshape(scaled, -1, v.heads, 1, size)
    key = b.op("Transpose", b.reshape(b.to_float32(k), 0, -1, v.heads, size), perm=[0, 2, 3, 1])
    products = b.op("MatMul", query, key)
    if seen is not None:
        products = b.op("Where", seen, products, b.constant(UNSEEN))
    weights = b.op("Softmax", products, axis=-1)
    mean = b.op("Div", weights, b.constant(np.array(v.heads, np.float32)))
    return b.op("ReduceSum", mean, b.constant([1, 2]), keepdims=0)


def _windows(v: VisionConfig) -> NDArray[np.int64]:
    """Token indices of the patches of each window, [windows, 9], both in raster order."""
    grid = np.arange(v.rows - v.grid**2, v.rows, dtype=np.int64).reshape(v.grid, v.grid)
    along = v.grid // SIDE
    whole = grid[: along * SIDE, : along * SIDE].reshape(along, SIDE, along, SIDE)
    return whole.transpose(0, 2, 1, 3).reshape(-1, WINDOW)


def _mean_cosine(b: Builder, hidden: ir.Value) -> ir.Value:
    """Mean over the pairs of a window [windows, 9, hidden]: of unit vectors u, (|sum u|^2 - sum |u|^2) / 72."""
    square = b.op("ReduceSum", b.op("Mul", hidden, hidden), b.constant([2]), keepdims=1)
    length = b.op("Max", b.op("Sqrt", square), b.constant(np.array(TINY, np.float32)))
    unit = b.op("Div", hidden, length)
    together = b.op("ReduceSum", unit, b.constant([1]), keepdims=0)
    crossed = b.op("ReduceSum", b.op("Mul", together, together), b.constant([1]), keepdims=0)
    own = b.op("ReduceSum", b.op("Mul", unit, unit), b.constant([1, 2]), keepdims=0)
    return b.op("Div", b.op("Sub", crossed, own), b.constant(np.array(PAIRS, np.float32)))
