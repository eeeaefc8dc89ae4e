"""What reductions add to the vision graph: windows of like patches merge, and what the class token looks at.

The row count of an image then depends on the image, so these graphs take one image at a time.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.graphs.builder import Builder
from vtx.exporter.hf.config import VisionConfig

SIDE = 3  # of a window, in patches
WINDOW = SIDE**2
PAIRS = WINDOW * (WINDOW - 1)  # both ways
TINY = 1e-8  # below it a row has no direction; torch's cosine_similarity uses the same


def unmerged_places(v: VisionConfig) -> NDArray[np.int64]:
    """Raster index of the patch in each row of the tower; the class token has -1."""
    return np.arange(v.rows, dtype=np.int64) - (v.family == "clip")


def merge_windows(b: Builder, v: VisionConfig, x: ir.Value, tau: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """LSM (MustDrop Eq. 5): of x [1, rows, hidden], every 3x3 window that is alike becomes the mean of its nine rows.

    Windows do not overlap; they start at the first patch, and rows and columns left over at the far borders stay. A
    window is alike when the mean cosine of its 36 pairs is at least `tau`. A merged window stands at its first patch.
    Returns the rows left [1, n, hidden], their places [n] int64, and which are merged [n] int64.
    """
    windows = _windows(v)
    count, all_rows = len(windows), np.arange(v.rows)
    rows = b.reshape(x, v.rows, v.hidden)
    inside = b.op("Gather", rows, b.constant(windows))
    alike = b.op("GreaterOrEqual", _mean_cosine(b, b.to_float32(inside)), tau)

    window_of = np.full(v.rows, count, np.int64)  # `count`: no window
    window_of[windows] = np.arange(count)[:, None]
    stands = np.ones(v.rows, bool)
    stands[windows[:, 1:]] = False
    never = b.constant(np.zeros(1, bool))
    in_merged = b.op("Gather", b.op("Concat", alike, never, axis=0), b.constant(window_of))
    left = b.op("Squeeze", b.op("NonZero", b.op("Or", b.constant(stands), b.op("Not", in_merged))), b.constant([0]))

    total = b.op("ReduceSum", inside, b.constant([1]), keepdims=0)
    means = b.op("Div", total, b.scalar(WINDOW))
    source = b.op("Where", in_merged, b.constant(window_of), b.constant(count + all_rows))
    chosen = b.op("Gather", b.op("Concat", means, rows, axis=0), b.op("Gather", source, left))
    places = b.op("Gather", b.constant(unmerged_places(v)), left)
    merged = b.op("Cast", b.op("Gather", in_merged, left), to=ir.DataType.INT64.value)
    return b.op("Unsqueeze", chosen, b.constant([0])), places, merged


def class_attention(b: Builder, v: VisionConfig, q: ir.Value, k: ir.Value) -> ir.Value:
    """Head-mean attention [images, rows] float32 of row 0, from a block's q and k [images, rows, hidden] (Eq. 6)."""
    size = v.hidden // v.heads
    first = b.to_float32(b.op("Slice", q, b.constant([0]), b.constant([1]), b.constant([1])))
    scaled = b.op("Mul", first, b.constant(np.array(size**-0.5, np.float32)))
    query = b.reshape(scaled, -1, v.heads, 1, size)
    key = b.op("Transpose", b.reshape(b.to_float32(k), 0, -1, v.heads, size), perm=[0, 2, 3, 1])
    weights = b.op("Softmax", b.op("MatMul", query, key), axis=-1)
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
