"""What reductions add to the vision graph: windows of like patches merge, and what the class token looks at.

How many rows an image has then depends on the image, so these graphs take one image at a time.
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
TINY = 1e-8  # below it a row has no direction; torch's cosine_similarity uses the same


def unmerged_places(v: VisionConfig) -> NDArray[np.int64]:
    """Raster index of the patch in each row of the tower; the class token has -1."""
    return np.arange(v.rows, dtype=np.int64) - (v.family == "clip")


@dataclass(frozen=True, slots=True)
class Merged:
    """The tower's rows [1, n, hidden] after windows merged, their places [n] int64, and which are merged [n] int64.

    `similarity` [n] float32 is the mean cosine of a merged window, 0 of other rows. `seen` [1, 1, 1, n] bool: the rows
    that are there, None for all. One that is gone has -1 for merged.
    """

    rows: ir.Value
    places: ir.Value
    merged: ir.Value
    similarity: ir.Value
    seen: ir.Value | None


def merge_windows(b: Builder, v: VisionConfig, x: ir.Value, tau: ir.Value) -> Merged:
    """LSM (MustDrop Eq. 5): of x [1, rows, hidden], every 3x3 window that is alike becomes the mean of its nine rows.

    Windows do not overlap; they start at the first patch, and rows and columns left over at the far borders stay. A
    window is alike when the mean cosine of its 36 pairs is at least `tau`. A merged window stands at its first patch.
    Its other rows leave, or where the dialect cannot make a size of values, stay and are to be seen by nobody.
    """
    windows = _windows(v)
    rows = b.reshape(x, v.rows, v.hidden)
    inside = b.op("Gather", rows, b.constant(windows))
    cosine = _mean_cosine(b, b.to_float32(inside))
    alike = b.op("GreaterOrEqual", cosine, tau)

    window_of, member, stands = np.zeros(v.rows, np.int64), np.zeros(v.rows, bool), np.ones(v.rows, bool)
    window_of[windows] = np.arange(len(windows))[:, None]
    member[windows], stands[windows[:, 1:]] = True, False
    of_window = b.constant(window_of)
    in_merged = b.op("And", b.op("Gather", alike, of_window), b.constant(member))
    means = b.op("Div", b.op("ReduceSum", inside, b.constant([1]), keepdims=0), b.scalar(WINDOW))
    now = b.op("Where", b.op("Unsqueeze", in_merged, b.constant([1])), b.op("Gather", means, of_window), rows)

    there = b.op("Or", b.constant(stands), b.op("Not", in_merged))
    merged = b.op("Cast", in_merged, to=ir.DataType.INT64.value)
    zero = b.constant(np.array(0, np.float32))
    similarity = b.op("Where", in_merged, b.op("Gather", cosine, of_window), zero)
    places = b.constant(unmerged_places(v))
    if b.dialect.sizes_from_values:
        return _leave(b, now, places, merged, similarity, there)
    return _hide(b, v, now, places, merged, similarity, there)


def _leave(
    b: Builder, rows: ir.Value, places: ir.Value, merged: ir.Value, similarity: ir.Value, there: ir.Value
) -> Merged:
    left = b.op("Squeeze", b.op("NonZero", there), b.constant([0]))
    rows, places, merged, similarity = (b.op("Gather", x, left) for x in (rows, places, merged, similarity))
    return Merged(b.op("Unsqueeze", rows, b.constant([0])), places, merged, similarity, None)


def _hide(
    b: Builder, v: VisionConfig, rows: ir.Value, places: ir.Value, merged: ir.Value, similarity: ir.Value,
    there: ir.Value,
) -> Merged:  # fmt: skip
    merged = b.op("Where", there, merged, b.constant(np.array(-1)))
    rows, seen = b.op("Unsqueeze", rows, b.constant([0])), b.reshape(there, 1, 1, 1, v.rows)
    return Merged(rows, b.op("Identity", places), merged, similarity, seen)


def class_attention(b: Builder, v: VisionConfig, q: ir.Value, k: ir.Value, seen: ir.Value | None) -> ir.Value:
    """Head-mean attention [images, rows] float32 of row 0, from a block's q and k [images, rows, hidden] (Eq. 6).

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
    """Rows of the patches of each window, [windows, 9], both in raster order."""
    grid = np.arange(v.rows - v.grid**2, v.rows, dtype=np.int64).reshape(v.grid, v.grid)
    along = v.grid // SIDE
    whole = grid[: along * SIDE, : along * SIDE].reshape(along, SIDE, along, SIDE)
    return whole.transpose(0, 2, 1, 3).reshape(-1, WINDOW)


def _mean_cosine(b: Builder, rows: ir.Value) -> ir.Value:
    """Mean over the pairs of a window [windows, 9, hidden]: of unit rows u, (|sum u|^2 - sum |u|^2) / 72."""
    square = b.op("ReduceSum", b.op("Mul", rows, rows), b.constant([2]), keepdims=1)
    length = b.op("Max", b.op("Sqrt", square), b.constant(np.array(TINY, np.float32)))
    unit = b.op("Div", rows, length)
    together = b.op("ReduceSum", unit, b.constant([1]), keepdims=0)
    crossed = b.op("ReduceSum", b.op("Mul", together, together), b.constant([1]), keepdims=0)
    own = b.op("ReduceSum", b.op("Mul", unit, unit), b.constant([1, 2]), keepdims=0)
    return b.op("Div", b.op("Sub", crossed, own), b.constant(np.array(PAIRS, np.float32)))
