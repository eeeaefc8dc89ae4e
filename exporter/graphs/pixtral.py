"""The vision graph of Pixtral: rotary positions of rows and columns, and a projector, also of merged patches."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.axial import rotation
from vtx.exporter.graphs.builder import FLOAT, Builder, Heads
from vtx.exporter.graphs.naflex import naflex_squares
from vtx.exporter.graphs.native_blocks import rotated
from vtx.runtime.bundle.spec import names
from vtx.tools.model.towers.pixtral import FIRST_NORM, MERGER, MERGER_NORM, PATCHES, block_name
from vtx.tools.model.vision import VisionConfig


def build_pixtral(b: Builder, c: ModelConfig) -> None:
    """[1, 3, height, width] float32, both multiples of a patch's side, to [1, tokens, hidden] float32.

    Patches beyond the last whole square of patches give no token.
    """
    v = c.vision
    pixels = b.from_float32(b.input(names.PIXELS, FLOAT, [1, 3, "height", "width"]))
    grid = b.squares(v.patch, pixels, b.weight(PATCHES))
    sizes = [b.size(grid, axis) for axis in (2, 3)]  # rows, columns
    x = b.dialect.norm(b, b.reshape(b.transpose(grid, 0, 2, 3, 1), -1, v.hidden), FIRST_NORM, v.eps)
    turn = _rotation(b, v, sizes)
    states = [x]
    for layer in range(max(c.feature_layers)):
        name = block_name(layer)
        y = b.dialect.norm(b, x, f"{name}.attention_norm.weight", v.eps)
        q, k, w = (b.linear(y, f"{name}.attention.{part}_proj", bias=False) for part in "qkv")
        parts = [b.reshape(part, 1, -1, v.hidden) for part in (rotated(b, v, q, turn), rotated(b, v, k, turn), w)]
        y = b.dialect.tower_attention(b, parts[0], parts[1], parts[2], Heads(v.heads, v.hidden // v.heads))
        x = b.op("Add", x, b.linear(b.reshape(y, -1, v.hidden), f"{name}.attention.o_proj", bias=False))
        y = b.dialect.norm(b, x, f"{name}.ffn_norm.weight", v.eps)
        x = b.op("Add", x, gated_mlp(b, y, f"{name}.feed_forward", v.activation))
        states.append(x)
    features = [states[number] for number in c.feature_layers]
    hidden = b.op("Concat", *features, axis=-1) if len(features) > 1 else features[0]
    if v.shuffle > 1:
        hidden = _merged(b, c, hidden, sizes)
    first, second = c.projector_matrices
    hidden = activate(b, b.linear(hidden, first, bias=c.projector_bias), c.projector_activation)
    out = b.to_float32(b.linear(hidden, second, bias=c.projector_bias))
    b.output(b.reshape(out, 1, -1, c.text.hidden), names.FEATURES, FLOAT, [1, "tokens", c.text.hidden])


def _rotation(b: Builder, v: VisionConfig, sizes: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Cos and sin [patches, 1, width / 2] of heads: every other rate by the row, the rest by the column."""
    width = v.hidden // v.heads
    powers = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    rates = (1.0 / np.float32(v.theta) ** powers).astype(np.float32)
    pairs = zip(rotation(b, rates[::2], sizes, 0), rotation(b, rates[1::2], sizes, 1), strict=True)
    cos, sin = (b.op("Concat", *pair, axis=-1) for pair in pairs)
    return cos, sin


def _merged(b: Builder, c: ModelConfig, features: ir.Value, sizes: list[ir.Value]) -> ir.Value:
    """Features [patches, hidden], one of each whole square of patches, channel by channel: torch's `unfold`."""
    v = c.vision
    assert c.projector_norm_eps is not None
    normed = b.dialect.norm(b, features, MERGER_NORM, c.projector_norm_eps)
    whole = [b.op("Sub", size, b.op("Mod", size, b.constant([v.shuffle]))) for size in sizes]
    grid = b.op("Reshape", normed, b.op("Concat", *sizes, b.constant([v.hidden]), axis=0))
    grid = b.op("Slice", grid, b.constant([0, 0]), b.op("Concat", *whole, axis=0), b.constant([0, 1]))
    squares, _ = naflex_squares(b, v.shuffle, v.hidden, grid, (whole[0], whole[1]))
    channels = b.transpose(squares, 0, 1, 4, 2, 3)
    return b.linear(b.reshape(channels, -1, v.hidden * v.shuffle**2), MERGER, bias=False)
