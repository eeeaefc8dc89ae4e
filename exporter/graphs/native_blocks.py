"""Blocks and the merger of towers at native resolution: attention, a gated convolution, and what makes tokens."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import Builder, Heads
from vtx.tools.model.towers.native import DOWNSAMPLE, MERGER
from vtx.tools.model.vision import VisionConfig

END = 1 << 30  # of any axis
Grid = tuple[ir.Value, ir.Value]  # the numbers of rows and columns of squares, [1] int64 each


@dataclass(frozen=True, slots=True)
class Windows:
    """Patches grouped by windows of `size`: `into` [windows * size] are their indices, padded with 0.

    `back` [patches] is the inverse, `seen` [windows, 1, 1, size] bool is false for padding.
    """

    size: int
    into: ir.Value
    back: ir.Value
    seen: ir.Value


def attend(
    b: Builder, v: VisionConfig, x: ir.Value, name: str, turn: tuple[ir.Value, ir.Value], within: Windows | None
) -> ir.Value:
    """Attention of hidden states [patches, hidden] to all others, or to those in their window."""
    width = v.hidden // v.heads
    kv_heads = v.kv_heads or v.heads
    q, k, w = _projected(b, v, x, name)
    q = rotated(b, v, q, turn, f"{name}.q_norm.weight")
    k = rotated(b, v, k, turn, f"{name}.k_norm.weight")
    w = b.reshape(w, 1, -1, kv_heads, width)
    if kv_heads < v.heads:
        k, w = (_repeated(b, part, v.heads // kv_heads) for part in (k, w))
    parts = [b.reshape(part, -1, v.hidden) for part in (q, k, w)]
    size = -1
    visible = None
    if within is not None:
        parts = [b.op("Gather", part, within.into) for part in parts]
        size = within.size
        visible = within.seen
    batch = 1 if within is None else -1
    q, k, w = (b.reshape(part, batch, size, v.hidden) for part in parts)
    y = b.reshape(b.dialect.tower_attention(b, q, k, w, Heads(v.heads, width), visible), -1, v.hidden)
    if within is not None:
        y = b.op("Gather", y, within.back)
    return b.linear(y, f"{name}.proj", bias=v.qkv_bias)


def _projected(b: Builder, v: VisionConfig, x: ir.Value, name: str) -> list[ir.Value]:
    """Queries, keys and values, [patches, heads * size] each."""
    if v.kv_heads is not None:
        return [b.linear(x, f"{name}.{part}_proj", bias=v.qkv_bias) for part in "qkv"]
    return _thirds(b, v, b.linear(x, f"{name}.qkv", bias=v.qkv_bias))


def _thirds(b: Builder, v: VisionConfig, together: ir.Value) -> list[ir.Value]:
    return [b.slice(together, start, start + v.hidden, 1) for start in range(0, 3 * v.hidden, v.hidden)]


def rotated(b: Builder, v: VisionConfig, x: ir.Value, turn: tuple[ir.Value, ir.Value], norm: str = "") -> ir.Value:
    """Queries or keys [patches, heads * size] with the halves of each head turned by cos and sin.

    [1, patches, heads, size]; heads have the `norm` first if the tower has one.
    """
    cos, sin = turn
    half = v.hidden // v.heads // 2
    heads = b.reshape(x, 0, -1, 2 * half)
    if v.head_norms:
        heads = b.dialect.norm(b, heads, norm, v.eps)
    first = b.slice(heads, 0, half, 2)
    second = b.slice(heads, half, END, 2)
    turned = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
    return b.op("Concat", turned, b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)), axis=-1)


def _repeated(b: Builder, heads: ir.Value, times: int) -> ir.Value:
    """Heads [1, patches, heads, size], each `times` times in a row."""
    return b.op("Concat", *[b.unsqueeze(heads, 3)] * times, axis=3)


def convolve(b: Builder, v: VisionConfig, x: ir.Value, name: str, grid: Grid) -> ir.Value:
    """The gated convolution of hidden states [patches, hidden] over the grid of patches, which come by squares."""
    first, last, inner = _thirds(b, v, b.linear(x, f"{name}.in_proj", bias=False))
    side = b.constant([v.shuffle])
    rows, columns = grid
    width = b.constant([v.hidden])
    by_squares = b.op("Concat", rows, columns, side, side, width, axis=0)
    squares = b.op("Reshape", b.op("Mul", first, inner), by_squares)
    planes = b.transpose(squares, 4, 0, 2, 1, 3)
    sides = b.op("Concat", b.constant([1]), width, b.op("Mul", rows, side), b.op("Mul", columns, side), axis=0)
    mixed = b.op(
        "Conv",
        b.op("Reshape", planes, sides),
        b.weight(f"{name}.spatial_conv.weight"),
        kernel_shape=[v.conv_kernel] * 2,
        pads=[v.conv_kernel // 2] * 4,
        group=v.hidden,
    )
    split = b.op("Concat", width, rows, side, columns, side, axis=0)
    back = b.transpose(b.op("Reshape", mixed, split), 1, 3, 2, 4, 0)
    return b.linear(b.op("Mul", last, b.reshape(back, -1, v.hidden)), f"{name}.out_proj", bias=False)


def merge(b: Builder, c: ModelConfig, squares: ir.Value, name: str) -> ir.Value:
    """Tokens [tokens, hidden] of the joined states of squares, by the merger called `name`."""
    hidden = activate(b, b.linear(squares, f"{name}.mlp.0", bias=c.projector_bias), c.projector_activation)
    return b.linear(hidden, f"{name}.mlp.2", bias=c.projector_bias)


def downsample(b: Builder, c: ModelConfig, x: ir.Value) -> ir.Value:
    """Tokens [tokens, hidden] of states [patches, hidden], by a convolution over squares and a gated MLP."""
    v = c.vision
    side = v.shuffle
    squares = b.transpose(b.reshape(x, -1, side, side, v.hidden), 0, 3, 1, 2)
    weights = [b.weight(f"{DOWNSAMPLE}.{part}") for part in ("weight", "bias")]
    states = b.reshape(b.squares(side, squares, *weights), -1, c.text.hidden)
    states = b.linear(states, f"{MERGER}.proj", bias=False)
    assert c.projector_norm_eps is not None
    normed = b.dialect.layer_norm(b, states, f"{MERGER}.post_projection_norm", c.projector_norm_eps)
    states = activate(b, normed, c.projector_activation)
    return gated_mlp(b, states, MERGER, v.activation)
