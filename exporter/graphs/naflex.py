"""Parts of SigLIP 2's tower for images at native resolution (NaFlex): patches, positions, and squares of patches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import VisionConfig
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.native import Grid

PATCHES, POSITIONS = "vision.embeddings.patch_embedding", "vision.embeddings.position_embedding.weight"


def naflex_embeddings(b: Builder, v: VisionConfig, pixels: ir.Value) -> tuple[ir.Value, Grid]:
    """Embedded patches [1, patches, hidden] of an image [1, 3, height, width], row by row, and the grid of patches."""
    side = b.constant([v.patch])
    grid = tuple(b.op("Div", b.op("Shape", pixels, start=axis, end=axis + 1), side) for axis in (2, 3))
    rows, columns = grid
    split = b.op("Concat", b.constant([3]), rows, side, columns, side, axis=0)
    squares = b.op("Transpose", b.op("Reshape", pixels, split), perm=[1, 3, 2, 4, 0])
    patches = b.linear(b.reshape(squares, -1, 3 * v.patch**2), PATCHES, bias=True)
    assert v.position_grid is not None
    table = b.reshape(b.weight(POSITIONS), v.position_grid, v.position_grid, v.hidden)
    down, across = (b.from_float32(_stretching(b, v.position_grid, count)) for count in (rows, columns))
    # [rows, grid] x [grid, grid * hidden], then [columns, grid] x [rows, grid, hidden]
    tall = b.op("MatMul", down, b.reshape(table, v.position_grid, -1))
    positions = b.op("MatMul", across, b.reshape(tall, -1, v.position_grid, v.hidden))
    return b.op("Unsqueeze", b.op("Add", patches, b.reshape(positions, -1, v.hidden)), b.constant([0])), (rows, columns)


def _stretching(b: Builder, side: int, count: ir.Value) -> ir.Value:
    """The matrix [count, side] of bilinear stretching: triangles around each new place, wider where it shrinks.

    They are those of torch's `interpolate` with antialias=True and align_corners=False.
    """

    def floats(x: ir.Value) -> ir.Value:
        return b.op("Cast", x, to=FLOAT.value)

    def single(value: float) -> ir.Value:
        return b.constant(np.array(value, np.float32))

    every = b.op("Range", b.constant(np.array(0)), b.op("Squeeze", count), b.constant(np.array(1)))
    scale = b.op("Div", single(side), floats(count))
    centres = b.op("Mul", b.op("Add", floats(every), single(0.5)), scale)
    places = b.constant(np.arange(side, dtype=np.float32) + np.float32(0.5))
    away = b.op("Abs", b.op("Sub", b.op("Unsqueeze", centres, b.constant([1])), places))
    near = b.op("Max", b.op("Sub", single(1), b.op("Div", away, b.op("Max", scale, single(1)))), single(0))
    return b.op("Div", near, b.op("ReduceSum", near, b.constant([1]), keepdims=1))


def naflex_squares(b: Builder, v: VisionConfig, features: ir.Value, grid: Grid) -> ir.Value:
    """Features [1, patches, hidden] in squares of `shuffle` x `shuffle` patches, row by row and so within a square."""
    side, width = b.constant([v.shuffle]), v.hidden
    rows, columns = (b.op("Div", count, side) for count in grid)
    split = b.op("Concat", rows, side, columns, side, b.constant([width]), axis=0)
    return b.op("Transpose", b.op("Reshape", features, split), perm=[0, 2, 1, 3, 4])
