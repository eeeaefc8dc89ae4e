"""A grid of tokens made smaller, with the numbers of torch's bilinear `interpolate` (align_corners=False)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.vision.tokens import Ids

Grid = NDArray[np.float32]


def resized(grid: Grid, rows: int, columns: int) -> Grid:
    """[height, width, hidden] float32 to [rows, columns, hidden], each a mean of the four nearest; no antialiasing."""
    return _along(_along(grid, rows).swapaxes(0, 1), columns).swapaxes(0, 1)


def nearest(size: int, wanted: int) -> Ids:
    """The one of `size` steps along a side that is in the middle of each of `wanted` steps, [wanted]."""
    near: Ids = np.minimum(_middles(size, wanted) + 0.5, size - 1).astype(np.int64)
    return near


def _along(grid: Grid, wanted: int) -> Grid:
    size = len(grid)
    middles = np.maximum(_middles(size, wanted), 0)
    first = middles.astype(np.int64)
    share = (middles - first).astype(np.float32)[:, None, None]
    out: Grid = grid[first] * (1 - share)
    out += grid[np.minimum(first + 1, size - 1)] * share
    return out


def _middles(size: int, wanted: int) -> NDArray[np.floating[Any]]:
    return (np.arange(wanted) + 0.5) * (size / wanted) - 0.5
