"""Parts of SigLIP 2's tower for images at native resolution (NaFlex): patches, positions, and squares of patches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder, Heads
from vtx.exporter.graphs.encoder import projected
from vtx.exporter.graphs.native_blocks import Grid
from vtx.tools.model.towers.naflex import MERGER
from vtx.tools.model.vision import MERGED, VisionConfig

PATCHES = "vision.embeddings.patch_embedding"
POSITIONS = "vision.embeddings.position_embedding.weight"
MERGER_ACTIVATION = "gelu_pytorch_tanh"
LAST = f"{MERGER}.linear_2"


def naflex_embeddings(b: Builder, v: VisionConfig, pixels: ir.Value) -> tuple[ir.Value, Grid]:
    """Embedded patches [1, patches, hidden] of an image [1, 3, height, width], row by row, and the grid of patches."""
    side = b.constant([v.patch])
    grid = tuple(b.op("Div", b.size(pixels, axis), side) for axis in (2, 3))
    rows, columns = grid
    assert v.position_grid is not None
    if v.nearest:
        kernel, bias = (b.weight(f"{PATCHES}.{part}") for part in ("weight", "bias"))
        found = b.squares(v.patch, pixels, kernel, bias)
        patches = b.transpose(b.reshape(found, 1, v.hidden, -1), 0, 2, 1)
        down, across = (places(b, v.position_grid, count) for count in (rows, columns))
        before = b.unsqueeze(b.op("Mul", down, b.constant([v.position_grid])), 1)
        positions = b.op("Gather", b.weight(POSITIONS), b.reshape(b.op("Add", before, across), -1))
        return b.op("Add", patches, positions), (rows, columns)
    split = b.op("Concat", b.constant([3]), rows, side, columns, side, axis=0)
    squares = b.transpose(b.op("Reshape", pixels, split), 1, 3, 2, 4, 0)
    patches = b.linear(b.reshape(squares, -1, 3 * v.patch**2), PATCHES, bias=True)
    table = b.reshape(b.weight(POSITIONS), v.position_grid, v.position_grid, v.hidden)
    down, across = (b.from_float32(_stretching(b, v.position_grid, count)) for count in (rows, columns))
    # [rows, grid] x [grid, grid * hidden], then [columns, grid] x [rows, grid, hidden]
    tall = b.op("MatMul", down, b.reshape(table, v.position_grid, -1))
    positions = b.op("MatMul", across, b.reshape(tall, -1, v.position_grid, v.hidden))
    return b.unsqueeze(b.op("Add", patches, b.reshape(positions, -1, v.hidden)), 0), (rows, columns)


def later_edges(side: int) -> NDArray[np.int64]:
    """1 for each edge k / side, k from 1 to side, that is above this fraction in transformers' float32 sums, else 0.

    A place that is exactly there has the entry before.
    """
    import torch

    edges = torch.arange(1 / side, 1.0, 1 / side).numpy()[: side - 1]
    later = np.zeros(side, np.int64)
    later[: len(edges)] = edges > (np.arange(1, len(edges) + 1) / side).astype(np.float32)
    return later


def places(b: Builder, side: int, count: ir.Value) -> ir.Value:
    """The entry [count], int64, of each of `count` places along a table with `side` entries: the edges before it.

    In whole numbers, as engines divide in different ways.
    """
    every = b.numbers(count)
    reached = b.unsqueeze(b.op("Mul", every, b.constant([side])), 1)
    edges = b.op("Add", b.op("Mul", b.constant(np.arange(1, side + 1)), count), b.constant(later_edges(side)))
    before = b.cast(b.op("GreaterOrEqual", reached, edges), INT64)
    return b.sum(before, 1)


def _stretching(b: Builder, side: int, count: ir.Value) -> ir.Value:
    """The matrix [count, side] of bilinear stretching: triangles around each new place, wider where it shrinks.

    They are those of torch's `interpolate` with antialias=True and align_corners=False.
    """
    every = b.numbers(count)
    scale = b.op("Div", b.single(side), b.cast(count, FLOAT))
    centres = b.op("Mul", b.op("Add", b.cast(every, FLOAT), b.single(0.5)), scale)
    places = b.constant(np.arange(side, dtype=np.float32) + np.float32(0.5))
    away = b.op("Abs", b.op("Sub", b.unsqueeze(centres, 1), places))
    near = b.op("Max", b.op("Sub", b.single(1), b.op("Div", away, b.op("Max", scale, b.single(1)))), b.single(0))
    return b.op("Div", near, b.sum(near, 1, keepdims=True))


def naflex_squares(b: Builder, side: int, width: int, features: ir.Value, grid: Grid) -> tuple[ir.Value, Grid]:
    """Features [1, patches, width] in squares of `side` x `side` patches, and the grid of squares.

    [rows, columns, side, side, width]: row by row, and so within a square.
    """
    sides = b.constant([side])
    rows, columns = (b.op("Div", count, sides) for count in grid)
    split = b.op("Concat", rows, sides, columns, sides, b.constant([width]), axis=0)
    return b.transpose(b.op("Reshape", features, split), 0, 2, 1, 3, 4), (rows, columns)


def merge_squares(b: Builder, v: VisionConfig, x: ir.Value, grid: Grid) -> tuple[ir.Value, Grid]:
    """Hidden states [1, patches, hidden] with one patch for each square, and their grid.

    The patches of a square attend to each other; the new one is their mean and what an MLP makes of all together.
    """
    patches = MERGED**2
    hidden = v.hidden
    by_square, grid = naflex_squares(b, MERGED, hidden, x, grid)
    squares = b.reshape(by_square, -1, patches, hidden)
    q, k, w = projected(b, v, squares, MERGER, (-1, patches, hidden), "qkv")
    y = b.dialect.tower_attention(b, q, k, w, Heads(v.heads, hidden // v.heads))
    y = b.linear(b.reshape(y, -1, hidden), f"{MERGER}.self_attn.out_proj", bias=True)
    squares = b.op("Add", squares, b.reshape(y, -1, patches, hidden))
    joined = b.dialect.layer_norm(b, b.reshape(squares, -1, patches * hidden), f"{MERGER}.pre_norm", v.eps)
    y = b.linear(activate(b, b.linear(joined, f"{MERGER}.linear_1", bias=True), MERGER_ACTIVATION), LAST, bias=True)
    means = b.op("Mul", b.sum(squares, 1), b.scalar(1 / patches))
    return b.unsqueeze(b.op("Add", y, means), 0), grid
