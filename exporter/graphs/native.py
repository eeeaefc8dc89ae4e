"""The vision graph of towers that see images at native resolution: rotary positions, windows, and mergers.

The patches of a square become one token, so the tower's hidden states are in the order of squares: row by row, and row
by row within a square. The size of the image determines their number.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.encoder import norm
from vtx.exporter.graphs.native_blocks import END, Grid, Windows, attend, convolve, downsample, merge
from vtx.runtime.bundle.spec import names
from vtx.tools.model.towers.native import FIRST_NORM, LAST_NORM, MERGER, MOMENTS, PATCHES, POSITIONS, map_merger
from vtx.tools.model.vision import VisionConfig


def build_native(b: Builder, c: ModelConfig) -> None:
    """[images, 3, height, width] float32, both multiples of a square's side, to [1, tokens, hidden] float32.

    Of a video it is a pair of frames, of an image the image alone, which fills both moments of a patch. Maps for the
    decoder are further outputs, [tokens, hidden] each.
    """
    v = c.vision
    patches = _embedded(b, c)
    side = b.constant([v.shuffle])
    rows, columns = (b.op("Div", b.size(patches, axis), side) for axis in (2, 3))
    split = b.op("Concat", b.constant([v.hidden]), rows, side, columns, side, axis=0)
    squares = b.transpose(b.op("Reshape", patches, split), 1, 3, 2, 4, 0)
    x = b.reshape(squares, -1, v.hidden)
    if v.first_norm:
        x = norm(b, v, x, FIRST_NORM)
    grid = (rows, columns)
    turn = _rotation(b, v, grid)
    windows = _windows(b, v, grid) if v.window is not None else None
    wide = v.hidden * v.shuffle**2
    for layer in range(v.layers):
        name = f"vision.blocks.{layer}"
        y = norm(b, v, x, f"{name}.norm1")
        if layer in v.convolved:
            y = convolve(b, v, y, f"{name}.conv", grid)
        else:
            y = attend(b, v, y, f"{name}.attn", turn, None if layer in v.full_blocks else windows)
        x = b.op("Add", x, y)
        x = b.op("Add", x, _mlp(b, v, norm(b, v, x, f"{name}.norm2"), f"{name}.mlp"))
        if layer in v.maps:
            number = v.maps.index(layer)
            merger = map_merger(number)
            tokens = merge(b, c, norm(b, v, b.reshape(x, -1, wide), f"{merger}.ln_q"), merger)
            output = names.token_input(c.token_inputs[number + 1].name)
            b.output(b.to_float32(tokens), output, FLOAT, ["tokens", c.text.hidden])
    if v.post_norm:
        x = norm(b, v, x, LAST_NORM)
    merged = downsample(b, c, x) if v.downsampled else merge(b, c, b.reshape(_merger_norm(b, c, x), -1, wide), MERGER)
    out = b.to_float32(b.reshape(merged, 1, -1, c.text.hidden))
    b.output(out, names.FEATURES, FLOAT, [1, "tokens", c.text.hidden])


def _mlp(b: Builder, v: VisionConfig, x: ir.Value, name: str) -> ir.Value:
    """A block's MLP, with a gate or without."""
    if v.gated:
        return gated_mlp(b, x, name, v.activation, bias=v.qkv_bias)
    y = activate(b, b.linear(x, f"{name}.fc1", bias=v.qkv_bias), v.activation)
    return b.linear(y, f"{name}.fc2", bias=v.qkv_bias)


def _embedded(b: Builder, c: ModelConfig) -> ir.Value:
    """Embedded patches [1, hidden, rows, columns], with their positions if the tower has a table of these."""
    v = c.vision
    kernel = b.weight(PATCHES)
    pictures = 1 if c.video is None else "images"
    pixels = b.from_float32(b.input(names.PIXELS, FLOAT, [pictures, 3, "height", "width"]))
    if c.video is None:  # both moments are alike, so their kernels add up
        kernel = b.sum(kernel, 2)
    else:
        ends = [b.slice(pixels, a, e, 0) for a, e in ((0, 1), (-1, END))]
        pixels = b.op("Concat", *ends, axis=1)
        kernel = b.transpose(kernel, 0, 2, 1, 3, 4)
        kernel = b.reshape(kernel, v.hidden, MOMENTS * 3, v.patch, v.patch)
    # embedded patches [patches, hidden]
    bias = [b.weight("vision.patch_embed.proj.bias")] if v.patch_bias else []
    patches = b.squares(v.patch, pixels, kernel, *bias)
    if v.position_grid is not None:  # the table of positions, stretched to the patches, in float32
        table = b.reshape(b.to_float32(b.weight(POSITIONS)), 1, v.position_grid, v.position_grid, v.hidden)
        sizes = b.op("Concat", b.constant([1, v.hidden]), b.op("Shape", patches, start=2, end=4), axis=0)
        stretched = b.op(
            "Resize",
            b.transpose(table, 0, 3, 1, 2),
            None,
            None,
            sizes,
            mode="linear",
            coordinate_transformation_mode="half_pixel" if v.half_pixel else "align_corners",
        )
        patches = b.op("Add", patches, b.from_float32(stretched))
    return patches


def _merger_norm(b: Builder, c: ModelConfig, x: ir.Value) -> ir.Value:
    assert c.projector_norm_eps is not None
    if c.projector_rms:
        return b.dialect.norm(b, x, f"{MERGER}.ln_q.weight", c.projector_norm_eps)
    return b.dialect.layer_norm(b, x, f"{MERGER}.ln_q", c.projector_norm_eps)


def _rotation(b: Builder, v: VisionConfig, grid: Grid) -> tuple[ir.Value, ir.Value]:
    """Cos and sin [1, patches, 1, head_dim / 2]: half of the angles by a patch's row, the others by its column."""
    rows, columns = grid
    quarter = v.hidden // v.heads // 4
    side = v.shuffle
    rates = (1.0 / np.float32(v.theta) ** (np.arange(quarter, dtype=np.float32) / np.float32(quarter))).astype(
        np.float32
    )
    everywhere = b.op("Concat", rows, columns, b.constant([side, side, quarter]), axis=0)
    one = b.constant([1])
    sides = b.constant([side])

    def angles(count: ir.Value, *shape: ir.Value) -> ir.Value:
        along = b.cast(b.numbers(b.op("Mul", count, sides)), FLOAT)
        turned = b.op("Mul", b.op("Unsqueeze", along, one), b.constant(rates))
        spread = b.op("Concat", *shape, b.constant([quarter]), axis=0)
        return b.op("Expand", b.op("Reshape", turned, spread), everywhere)

    by_row = angles(rows, rows, one, sides, one)
    by_column = angles(columns, one, columns, one, sides)
    every = b.reshape(b.op("Concat", by_row, by_column, axis=-1), 1, -1, 1, 2 * quarter)
    return b.from_float32(b.op("Cos", every)), b.from_float32(b.op("Sin", every))


def _windows(b: Builder, v: VisionConfig, grid: Grid) -> Windows:
    """Windows cover the grid from its first square; the part beyond the grid is padding."""
    assert v.window is not None
    side = v.window // v.shuffle
    of_window = v.shuffle**2
    squares = b.constant([side])
    down, across = (b.op("Div", b.op("Add", count, b.constant([side - 1])), squares) for count in grid)
    full = [b.op("Mul", count, squares) for count in (down, across)]
    count = b.op("Mul", b.op("Mul", *grid), b.constant([of_window]))
    numbers = b.op("Reshape", b.numbers(count), b.op("Concat", *grid, b.constant([of_window]), axis=0))
    missing = [b.op("Sub", full_side, part_side) for full_side, part_side in zip(full, grid, strict=True)]
    pads = b.op("Concat", b.constant([0, 0, 0]), *missing, b.constant([0]), axis=0)
    padded = b.op("Pad", numbers, pads, b.constant(-1))
    split = b.op("Concat", down, squares, across, squares, b.constant([of_window]), axis=0)
    by_window = b.reshape(b.transpose(b.op("Reshape", padded, split), 0, 2, 1, 3, 4), -1)
    size = side * side * of_window
    visible = b.reshape(b.op("GreaterOrEqual", by_window, b.constant(0)), -1, 1, 1, size)
    indices = b.numbers(b.op("Shape", by_window))
    windows = b.op("Concat", down, across, b.constant([side, side, of_window]), axis=0)
    back = b.transpose(b.op("Reshape", indices, windows), 0, 2, 1, 3, 4)
    full_side = b.op("Reshape", back, b.op("Concat", *full, b.constant([of_window]), axis=0))
    ends = b.op("Concat", *grid, axis=0)
    part_side = b.op("Slice", full_side, b.constant([0, 0]), ends, b.constant([0, 1]))
    return Windows(size, b.op("Max", by_window, b.constant(0)), b.reshape(part_side, -1), visible)
