"""The vision graph of Gemma 4: patches with a position on each axis, whose means over squares are an image's tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, Builder, Heads
from vtx.exporter.graphs.decoder import add_layer_inputs
from vtx.runtime.bundle.spec import names
from vtx.tools.model.decoder import PER_LAYER
from vtx.tools.model.towers.axial import BOUNDS, NORMS, PATCHES, POSITIONS, PROJECTION
from vtx.tools.model.vision import VisionConfig

THETA = 100.0


def build_axial(b: Builder, c: ModelConfig) -> None:
    """[1, 3, height, width] float32 from 0 to 1, both multiples of a square's side, to [1, tokens, hidden] float32.

    Inputs of decoder layers are further outputs, if it has them.
    """
    v = c.vision
    width = c.vision.hidden // c.vision.heads
    pixels = b.input(names.PIXELS, FLOAT, [1, 3, "height", "width"])
    centred = b.op("Sub", b.op("Mul", pixels, b.single(2)), b.single(1))
    kernel = b.reshape(b.weight(PATCHES), v.hidden, v.patch, v.patch, 3)
    grid = b.squares(v.patch, b.from_float32(centred), b.transpose(kernel, 0, 3, 1, 2))
    sizes = [b.size(grid, axis) for axis in (2, 3)]  # rows, columns
    tables = b.weight(POSITIONS)
    along = []
    for number, size in enumerate(reversed(sizes)):  # columns have the first table
        table = b.op("Gather", tables, b.constant(number), axis=0)
        along.append(b.unsqueeze(b.slice(table, 0, size, 0), number))
    x = b.op("Add", b.transpose(b.squeeze(grid, 0), 1, 2, 0), b.op("Add", *along))
    x = b.reshape(x, -1, v.hidden)
    quarter = np.arange(width // 4, dtype=np.float32) / np.float32(width // 4)
    rates = (1.0 / np.float32(THETA) ** quarter).astype(np.float32)
    turns = [rotation(b, rates, sizes, axis) for axis in (1, 0)]  # of the halves of a head: by column, by row
    for layer in range(v.layers):
        name = f"vision.encoder.layers.{layer}"
        y = b.dialect.norm(b, x, f"{name}.{NORMS[0]}.weight", v.eps)
        parts = []
        for part in "qkv":
            heads = b.reshape(_linear(b, v, y, f"{name}.self_attn.{part}_proj"), -1, v.heads, width)
            heads = b.dialect.norm(b, heads, width if part == "v" else f"{name}.self_attn.{part}_norm.weight", v.eps)
            heads = heads if part == "v" else _rotated(b, heads, turns, width)
            if part == "q":  # which attention multiplies by 1 over the root of the head size
                heads = b.op("Mul", heads, b.scalar(width**0.5))
            parts.append(b.reshape(heads, 1, -1, v.hidden))
        y = b.reshape(b.dialect.tower_attention(b, parts[0], parts[1], parts[2], Heads(v.heads, width)), -1, v.hidden)
        y = _linear(b, v, y, f"{name}.self_attn.o_proj")
        x = b.op("Add", x, b.dialect.norm(b, y, f"{name}.{NORMS[1]}.weight", v.eps))
        y = b.dialect.norm(b, x, f"{name}.{NORMS[2]}.weight", v.eps)
        mlp = f"{name}.mlp"
        gate = activate(b, _linear(b, v, y, f"{mlp}.gate_proj"), v.activation)
        y = _linear(b, v, b.op("Mul", gate, _linear(b, v, y, f"{mlp}.up_proj")), f"{mlp}.down_proj")
        x = b.op("Add", x, b.dialect.norm(b, y, f"{name}.{NORMS[3]}.weight", v.eps))
    # means over squares, in float32: their scale is beyond half precision
    joined = b.op("Reshape", b.to_float32(x), b.op("Concat", b.constant([1]), *sizes, b.constant([v.hidden]), axis=0))
    means = b.op(
        "AveragePool",
        b.transpose(joined, 0, 3, 1, 2),
        kernel_shape=[v.shuffle] * 2,
        strides=[v.shuffle] * 2,
    )
    tokens = b.transpose(b.reshape(means, v.hidden, -1), 1, 0)
    tokens = b.op("Mul", tokens, b.single(v.hidden**0.5))
    if v.standardised:
        tokens = b.op(
            "Mul", b.op("Sub", tokens, b.weight("vision.std_bias", FLOAT)), b.weight("vision.std_scale", FLOAT)
        )
    normed = b.dialect.norm(b, b.from_float32(tokens), v.hidden, v.eps)
    features = b.to_float32(b.linear(normed, PROJECTION, bias=False))
    if c.text.per_layer is not None:
        add_layer_inputs(b, c.text, features, b.stored_rows(PER_LAYER, c.text.padding_id or 0, 1))
    b.output(b.reshape(features, 1, -1, c.text.hidden), names.FEATURES, FLOAT, [1, "tokens", c.text.hidden])


def _linear(b: Builder, v: VisionConfig, x: ir.Value, name: str) -> ir.Value:
    low, high, least, most = (b.weight(f"{name}.{bound}") if v.clipped else None for bound in BOUNDS)
    x = b.op("Clip", x, low, high) if v.clipped else x
    y = b.linear(x, f"{name}.linear", bias=False)
    return b.op("Clip", y, least, most) if v.clipped else y


def rotation(b: Builder, rates: NDArray[np.float32], sizes: list[ir.Value], axis: int) -> tuple[ir.Value, ir.Value]:
    """Cos and sin [patches, 1, rates] by a patch's row (axis 0) or column, in a grid of `sizes` rows and columns."""
    numbers = b.numbers(sizes[axis])
    angles = b.op("Mul", b.unsqueeze(b.cast(numbers, FLOAT), 1), b.constant(rates))
    spread = b.unsqueeze(angles, 1 - axis)
    every = b.op("Expand", spread, b.op("Concat", *sizes, b.constant([len(rates)]), axis=0))
    flat = b.reshape(every, -1, 1, len(rates))
    return b.from_float32(b.op("Cos", flat)), b.from_float32(b.op("Sin", flat))


def _rotated(b: Builder, x: ir.Value, turns: list[tuple[ir.Value, ir.Value]], width: int) -> ir.Value:
    """Heads [patches, heads, width], each half turned by its own axis."""
    quarter = width // 4
    parts = list[ir.Value]()
    for half, (cos, sin) in enumerate(turns):
        first, second = (
            b.slice(x, start, start + quarter, 2) for start in (2 * half * quarter, (2 * half + 1) * quarter)
        )
        parts.append(b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)))
        parts.append(b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)))
    return b.op("Concat", *parts, axis=-1)
