"""The vision graph of Eagle-X5: the features of five towers, each of the same picture, side by side on one grid.

CLIP without its class token, ConvNeXt, SAM's encoder, EVA-02 and Pix2Struct's encoder. Resizing between fixed sizes is
two products with small matrices, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import Builder, Heads
from vtx.exporter.graphs.encoder import build_block
from vtx.tools.model.towers.joined import eva02, pix2struct, sam
from vtx.tools.model.towers.joined.clip import CLIP
from vtx.tools.model.towers.joined.convnext import CONVNEXT, KERNEL, STEM
from vtx.tools.model.towers.joined.eva02 import EVA
from vtx.tools.model.towers.joined.pix2struct import PIX2STRUCT
from vtx.tools.model.towers.joined.sam import SAM
from vtx.tools.model.towers.joined.windows import attention_side
from vtx.tools.model.vision import NECK_SQUARE, VisionConfig

THETA = 10_000.0  # of EVA-02's rotation: its base, and the patches a side that positions are scaled to
TRAINED = 16
WHITE = 255.0  # the largest pixel that Pix2Struct sees
END = 1 << 30


def build_joined(b: Builder, v: VisionConfig, pixels: ir.Value) -> ir.Value:
    """[images, 3, side, side] float32 to the features of all towers, [images, tokens, hidden]."""
    parts = []
    for tower in v.towers:
        x, side = _BUILD[tower.family](b, tower, pixels, v.image)
        parts.append(_stretched(b, x, side, v.grid, tower.width, corners=True))
    return b.reshape(b.op("Concat", *parts, axis=-1), -1, v.grid**2, v.hidden)


def constant_bytes(v: VisionConfig) -> int:
    """Bytes of the larger constants in the graph, about: matrices that resize pixels, and tables of rotations."""
    pixels = sum(v.image * tower.image for tower in v.towers if tower.image != v.image)
    turned = [tower for tower in v.towers if tower.family == "eva02"]
    return 4 * pixels + sum(4 * tower.hidden // tower.heads * 2 * tower.grid**2 for tower in turned)


def resizing(
    count: int, out: int, *, corners: bool = False, cubic: bool = False, antialias: bool = False
) -> NDArray[np.float32]:
    """The matrix [out, count] that resizes one axis as PyTorch's `interpolate` does, places in float32 as there.

    Linear or `cubic`; `corners`: the first and the last values keep their places (`align_corners`), of linear alone.
    `antialias`: filters are as wide as a step of the result.
    """
    matrix = np.zeros((out, count))
    if corners:
        step = np.float32(count - 1) / np.float32(max(out - 1, 1))
        for row in range(out):
            at = float(np.float32(row) * step)
            low = min(int(at), count - 1)
            matrix[row, low] += 1 - (at - low)
            matrix[row, min(low + 1, count - 1)] += at - low
        return matrix.astype(np.float32)
    step = np.float32(count) / np.float32(out)
    spread = max(float(step), 1.0) if antialias else 1.0
    curve = -0.5 if antialias else -0.75
    for row in range(out):
        centre = float(step * np.float32(row + 0.5))
        first = math.floor(centre - 2 * spread - 1)
        taps = np.arange(first, math.ceil(centre + 2 * spread + 1) + 1)
        far = np.abs(taps + 0.5 - centre) / spread
        weights = _cubic(far, curve) if cubic else np.maximum(1 - far, 0)
        inside = (taps >= 0) & (taps < count)
        if antialias:  # taps beyond the border count nothing, else they have its value
            taps = taps[inside]
            weights = weights[inside] / weights[inside].sum()
        np.add.at(matrix[row], np.clip(taps, 0, count - 1), weights)
    return matrix.astype(np.float32)


def _cubic(far: NDArray[Any], curve: float) -> NDArray[Any]:
    """Keys' cubic convolution at distances from the centre."""
    near = ((curve + 2) * far - (curve + 3)) * far**2 + 1
    wide = ((curve * far - 5 * curve) * far + 8 * curve) * far - 4 * curve
    return np.where(far <= 1, near, np.where(far < 2, wide, 0.0))


def _stretched(b: Builder, x: ir.Value, side: int, out: int, width: int, **how: bool) -> ir.Value:
    """[images, side, side, width] as [images, out, out, width], computed in float32."""
    if side == out:
        return x
    matrix = b.constant(resizing(side, out, **how))
    x = b.op("MatMul", matrix, b.to_float32(x))
    x = b.op("MatMul", matrix, b.reshape(x, -1, side, out * width))
    return b.from_float32(b.reshape(x, -1, out, out, width))


def _resized(b: Builder, pixels: ir.Value, side: int, out: int, **how: bool) -> ir.Value:
    """Pixels [images, 3, side, side] float32 as [images, 3, out, out]."""
    if side == out:
        return pixels
    matrix = b.constant(resizing(side, out, **how))
    return b.op("MatMul", matrix, b.op("MatMul", pixels, b.transpose(matrix, 1, 0)))


def _patches(b: Builder, v: VisionConfig, pixels: ir.Value, name: str, *, bias: bool = True) -> ir.Value:
    """Embedded patches [images, rows, columns, hidden] of pixels in float32."""
    weights = [b.weight(f"{name}.weight"), *([b.weight(f"{name}.bias")] if bias else [])]
    x = b.squares(v.patch, b.from_float32(pixels), *weights)
    return b.transpose(x, 0, 2, 3, 1)


# CLIP, whose class token leaves before its first norm


def _clip(b: Builder, v: VisionConfig, pixels: ir.Value, side: int) -> tuple[ir.Value, int]:
    resized = _resized(b, pixels, side, v.image, corners=True)
    x = _patches(b, v, resized, f"{CLIP}.embeddings.patch_embedding", bias=False)
    x = b.op("Add", x, _positions(b, v, f"{CLIP}.embeddings.position_embedding.weight", antialias=True))
    x = b.dialect.layer_norm(b, x, f"{CLIP}.pre_layrnorm", v.eps)
    x = b.reshape(x, -1, v.grid**2, v.hidden)
    for layer in range(v.layers):
        x, _, _ = build_block(b, v, x, f"{CLIP}.encoder.layers.{layer}", (-1, v.grid**2, v.hidden))
    return b.reshape(x, -1, v.grid, v.grid, v.hidden), v.grid


def _positions(b: Builder, v: VisionConfig, name: str, *, antialias: bool) -> ir.Value:
    """The table of positions without the class token's, resized to the patches: [1, rows, columns, hidden]."""
    grid = v.position_grid or v.grid
    table = b.reshape(b.weight(name), -1, v.hidden)
    own = b.slice(table, 1, END, 0)
    return _stretched(
        b, b.reshape(own, 1, grid, grid, v.hidden), grid, v.grid, v.hidden, cubic=True, antialias=antialias
    )


# ConvNeXt: its stages, without the norm and the head behind them


def _convnext(b: Builder, v: VisionConfig, pixels: ir.Value, side: int) -> tuple[ir.Value, int]:
    def convolved(x: ir.Value, name: str, kernel: int, **how: Any) -> ir.Value:
        """Of channels last, which norms and matrices take."""
        planes = b.transpose(x, 0, 3, 1, 2)
        weights = b.weight(f"{name}.weight"), b.weight(f"{name}.bias")
        y = b.op("Conv", planes, *weights, kernel_shape=[kernel] * 2, **how)
        return b.transpose(y, 0, 2, 3, 1)

    stem = b.weight(f"{CONVNEXT}.stem.0.weight"), b.weight(f"{CONVNEXT}.stem.0.bias")
    x = b.squares(STEM, b.from_float32(pixels), *stem)
    x = b.dialect.layer_norm(b, b.transpose(x, 0, 2, 3, 1), f"{CONVNEXT}.stem.1", v.eps)
    side //= STEM
    for stage, (blocks, width) in enumerate(zip(v.stage_blocks, v.stage_widths, strict=True)):
        p = f"{CONVNEXT}.stages.{stage}"
        if stage:
            side //= 2
            x = b.dialect.layer_norm(b, x, f"{p}.downsample.0", v.eps)
            x = convolved(x, f"{p}.downsample.1", 2, strides=[2, 2])
        for name in (f"{p}.blocks.{number}" for number in range(blocks)):
            y = convolved(x, f"{name}.conv_dw", KERNEL, pads=[KERNEL // 2] * 4, group=width)
            y = b.reshape(b.dialect.layer_norm(b, y, f"{name}.norm", v.eps), -1, width)
            y = activate(b, b.linear(y, f"{name}.mlp.fc1", bias=True), v.activation)
            y = b.op("Mul", b.linear(y, f"{name}.mlp.fc2", bias=True), b.weight(f"{name}.weight"))
            x = b.op("Add", x, b.reshape(y, -1, side, side, width))
    return x, side


# windows, which SAM and EVA-02 fill with zeros beyond the last patches: those are attended to


def _in_windows(b: Builder, v: VisionConfig, x: ir.Value, window: int) -> ir.Value:
    """[images, rows, columns, hidden] as [windows, patches of each, hidden]."""
    missing = -v.grid % window
    along = -(-v.grid // window)
    if missing:
        x = b.op("Pad", x, b.constant([0, 0, 0, 0, 0, missing, missing, 0]))
    x = b.reshape(x, -1, along, window, along, window, v.hidden)
    return b.reshape(b.transpose(x, 0, 1, 3, 2, 4, 5), -1, window**2, v.hidden)


def _out_of_windows(b: Builder, v: VisionConfig, x: ir.Value, window: int) -> ir.Value:
    """The inverse, without what is beyond the patches."""
    along = -(-v.grid // window)
    x = b.transpose(b.reshape(x, -1, along, along, window, window, v.hidden), 0, 1, 3, 2, 4, 5)
    x = b.reshape(x, -1, along * window, along * window, v.hidden)
    if v.grid % window == 0:
        return x
    return b.op("Slice", x, b.constant([0, 0]), b.constant([v.grid, v.grid]), b.constant([1, 2]))


# SAM's encoder


def _sam(b: Builder, v: VisionConfig, pixels: ir.Value, _: int) -> tuple[ir.Value, int]:
    assert v.neck is not None
    x = b.op("Add", _patches(b, v, pixels, f"{SAM}.patch_embed.projection"), b.weight(f"{SAM}.pos_embed"))
    for layer in range(v.layers):
        p = f"{SAM}.layers.{layer}"
        side = attention_side(v, layer)
        y = _in_windows(b, v, b.dialect.layer_norm(b, x, f"{p}.{sam.HALVES[0]}", v.eps), side)
        y = _sam_attention(b, v, y, f"{p}.attn", side)
        y = b.reshape(b.linear(b.reshape(y, -1, v.hidden), f"{p}.attn.proj", bias=True), -1, side**2, v.hidden)
        x = b.op("Add", x, _out_of_windows(b, v, y, side))
        y = b.reshape(b.dialect.layer_norm(b, x, f"{p}.{sam.HALVES[1]}", v.eps), -1, v.hidden)
        y = b.linear(activate(b, b.linear(y, f"{p}.mlp.lin1", bias=True), v.activation), f"{p}.mlp.lin2", bias=True)
        x = b.op("Add", x, b.reshape(y, -1, v.grid, v.grid, v.hidden))
    planes = b.transpose(x, 0, 3, 1, 2)
    planes = b.op("Conv", planes, b.weight(f"{SAM}.neck.conv1.weight"), kernel_shape=[1, 1])
    x = b.dialect.layer_norm(b, b.transpose(planes, 0, 2, 3, 1), f"{SAM}.neck.layer_norm1", v.eps)
    each = NECK_SQUARE
    side = v.grid // NECK_SQUARE
    x = b.reshape(x, -1, side, each, side, each, v.neck)
    return b.reshape(b.transpose(x, 0, 1, 3, 5, 2, 4), -1, side, side, v.width), side


def _sam_attention(b: Builder, v: VisionConfig, x: ir.Value, name: str, side: int) -> ir.Value:
    """Attention within windows [windows, side * side, hidden], whose scores have a term by row and one by column.

    A term is a product of the query and the entry of its distance, for each row (column) of keys. Joined to the query,
    and 1 at a key's own row (column) joined to the key, they are a part of the heads' own product, and no matrix of
    scores is written down.
    """
    dim = v.hidden // v.heads
    tokens = side**2
    qkv = b.linear(b.reshape(x, -1, v.hidden), f"{name}.qkv", bias=True)
    q, k, w = (b.slice(qkv, start, start + v.hidden, 1) for start in range(0, 3 * v.hidden, v.hidden))
    q, k = (b.reshape(part, -1, side, side, v.heads, dim) for part in (q, k))
    numbers = np.arange(side)
    distances = b.constant(numbers[:, None] - numbers[None, :] + side - 1)
    terms = []
    for axis, turned in (("h", [0, 1, 2, 3, 4]), ("w", [0, 2, 1, 3, 4])):
        table = b.op("Gather", b.weight(f"{name}.position_embedding_{axis}"), distances, axis=0)  # [of q, of k, dim]
        lines = b.reshape(b.op("Transpose", q, perm=turned), -1, side, side * v.heads, dim)
        term = b.op("MatMul", lines, b.transpose(table, 0, 2, 1))
        terms.append(b.op("Transpose", b.reshape(term, -1, side, side, v.heads, side), perm=turned))
    wide = dim + 2 * side
    scaled = b.op("Mul", q, b.scalar((wide / dim) ** 0.5))
    q = b.op("Concat", scaled, *(b.op("Mul", term, b.scalar(wide**0.5)) for term in terms), axis=-1)
    shape = b.op("Concat", b.op("Shape", k, start=0, end=4), b.constant([side]), axis=0)
    places = np.eye(side, dtype=b.dialect.compute.numpy())
    own = [b.op("Expand", b.constant(places.reshape(1, *axes, 1, side)), shape) for axes in ((side, 1), (1, side))]
    k = b.reshape(b.op("Concat", k, *own, axis=-1), -1, tokens, v.heads * wide)
    q, w = b.reshape(q, -1, tokens, v.heads * wide), b.reshape(w, -1, tokens, v.hidden)
    return b.dialect.tower_attention(b, q, k, w, Heads(v.heads, wide, value_size=dim))


# EVA-02, as it was trained for detection


def _eva(b: Builder, v: VisionConfig, pixels: ir.Value, _: int) -> tuple[ir.Value, int]:
    x = _patches(b, v, pixels, f"{EVA}.patch_embed.proj")
    x = b.op("Add", x, _positions(b, v, f"{EVA}.pos_embed", antialias=False))
    turns = dict[int, Any]()
    for layer in range(v.layers):
        p = f"{EVA}.blocks.{layer}"
        side = attention_side(v, layer)
        if side not in turns:
            turns[side] = _rotation(b, v, side)
        y = _in_windows(b, v, b.dialect.layer_norm(b, x, f"{p}.{eva02.HALVES[0]}", v.eps), side)
        parts = []
        for part in "qkv":
            bias = None if part == "k" else f"{p}.attn.{part}_bias"
            z = b.project(b.reshape(y, -1, v.hidden), f"{p}.attn.{part}_proj.weight", bias)
            parts.append(b.reshape(z, -1, side**2, v.hidden) if part == "v" else _rotated(b, v, z, side, turns[side]))
        y = b.dialect.tower_attention(b, parts[0], parts[1], parts[2], Heads(v.heads, v.hidden // v.heads))
        y = b.reshape(b.linear(b.reshape(y, -1, v.hidden), f"{p}.attn.proj", bias=True), -1, side**2, v.hidden)
        x = b.op("Add", x, _out_of_windows(b, v, y, side))
        y = b.reshape(b.dialect.layer_norm(b, x, f"{p}.{eva02.HALVES[1]}", v.eps), -1, v.hidden)
        gate = activate(b, b.linear(y, f"{p}.mlp.w1", bias=True), v.activation)
        y = b.op("Mul", gate, b.linear(y, f"{p}.mlp.w2", bias=True))
        y = b.linear(b.dialect.layer_norm(b, y, f"{p}.mlp.ffn_ln", v.eps), f"{p}.mlp.w3", bias=True)
        x = b.op("Add", x, b.reshape(y, -1, v.grid, v.grid, v.hidden))
    return x, v.grid


def eva_angles(v: VisionConfig, side: int) -> NDArray[np.float32]:
    """Angles of the pairs of a head in a square of patches, half by row and half by column: [patches, head_dim / 2].

    Rows and columns are scaled to the size that the tower was first trained with.
    """
    axis = v.hidden // v.heads // 2
    rates = 1.0 / np.float32(THETA) ** (np.arange(0, axis, 2, dtype=np.float32) / np.float32(axis))
    numbers = np.arange(side, dtype=np.float32) / np.float32(side) * np.float32(TRAINED)
    along = (numbers[:, None] * rates.astype(np.float32)).astype(np.float32)
    return np.concatenate([np.repeat(along, side, 0), np.tile(along, (side, 1))], 1)


def _rotation(b: Builder, v: VisionConfig, side: int) -> tuple[ir.Value, ir.Value]:
    """Cos and sin [1, patches, 1, head_dim / 2, 1]."""
    angles = eva_angles(v, side)[None, :, None, :, None]
    kind = b.dialect.compute.numpy()
    return b.constant(np.cos(angles).astype(kind)), b.constant(np.sin(angles).astype(kind))


def _rotated(b: Builder, v: VisionConfig, x: ir.Value, side: int, turn: tuple[ir.Value, ir.Value]) -> ir.Value:
    """Queries or keys as [windows, patches, hidden], each pair of neighbouring numbers turned."""
    pairs = b.reshape(x, -1, side**2, v.heads, v.hidden // v.heads // 2, 2)
    cos, sin = turn
    first, second = (b.slice(pairs, number, number + 1, 4) for number in (0, 1))
    turned = (
        b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
        b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
    )
    return b.reshape(b.op("Concat", *turned, axis=-1), -1, side**2, v.hidden)


# Pix2Struct's encoder


def _pix2struct(b: Builder, v: VisionConfig, pixels: ir.Value, side: int) -> tuple[ir.Value, int]:
    x = _resized(b, _standardised(b, v, pixels, side), side, v.image, antialias=True)
    projection = f"{PIX2STRUCT}.embeddings.patch_projection"
    kernel = b.reshape(b.weight(f"{projection}.weight"), v.hidden, v.patch, v.patch, 3)
    kernel = b.transpose(kernel, 0, 3, 1, 2)
    bias = b.weight(f"{projection}.bias")
    x = b.squares(v.patch, b.from_float32(x), kernel, bias)
    x = b.transpose(x, 0, 2, 3, 1)
    for axis, shape in (("row", (1, v.grid, 1, v.hidden)), ("column", (1, 1, v.grid, v.hidden))):
        name = f"{PIX2STRUCT}.embeddings.{axis}_embedder.weight"
        own = b.stored_rows(name, 1, v.grid)  # entry 0 is of padding
        own = b.cast(own, b.dialect.compute)
        x = b.op("Add", x, b.reshape(own, *shape))
    x = b.reshape(x, -1, v.hidden)
    dim = v.hidden // v.heads
    for layer in range(v.layers):
        p = f"{PIX2STRUCT}.encoder.layer.{layer}"
        y = b.dialect.norm(b, x, f"{p}.{pix2struct.HALVES[0]}.weight", v.eps)
        q, k, w = (b.linear(y, f"{p}.attention.{part}", bias=False) for part in ("query", "key", "value"))
        q = b.op("Mul", q, b.scalar(dim**0.5))  # which attention divides by: the tower's scores have no scale
        q, k, w = (b.reshape(part, -1, v.grid**2, v.hidden) for part in (q, k, w))
        y = b.reshape(b.dialect.tower_attention(b, q, k, w, Heads(v.heads, dim)), -1, v.hidden)
        x = b.op("Add", x, b.linear(y, f"{p}.attention.output", bias=False))
        y = b.dialect.norm(b, x, f"{p}.{pix2struct.HALVES[1]}.weight", v.eps)
        gate = activate(b, b.linear(y, f"{p}.mlp.wi_0", bias=False), v.activation)
        y = b.op("Mul", gate, b.linear(y, f"{p}.mlp.wi_1", bias=False))
        x = b.op("Add", x, b.linear(y, f"{p}.mlp.wo", bias=False))
    x = b.dialect.norm(b, x, f"{PIX2STRUCT}.layernorm.weight", v.eps)
    return b.reshape(x, -1, v.grid, v.grid, v.hidden), v.grid


def _standardised(b: Builder, v: VisionConfig, pixels: ir.Value, side: int) -> ir.Value:
    """The pixels from 0 to 255 less their mean over the image, divided by their deviation, all in float32."""

    def mean(x: ir.Value) -> ir.Value:  # by rows first, so that no sum grows large
        total = b.sum(b.sum(x, 3, keepdims=True), 1, 2, keepdims=True)
        return b.op("Mul", total, b.single(1 / count))

    count = 3 * side**2
    scale, shift = (b.constant(np.array(p, np.float32).reshape(1, -1, 1, 1)) for p in (v.pixel_scale, v.pixel_shift))
    x = b.op("Mul", b.op("Add", b.op("Mul", pixels, scale), shift), b.single(WHITE))
    x = b.op("Sub", x, mean(x))
    deviation = b.op("Max", b.op("Sqrt", mean(b.op("Mul", x, x))), b.single(count**-0.5))
    return b.op("Div", x, deviation)


_Part = Callable[[Builder, VisionConfig, ir.Value, int], tuple[ir.Value, int]]
_BUILD: Mapping[str, _Part] = {
    "clip": _clip,
    "convnext": _convnext,
    "sam": _sam,
    "eva02": _eva,
    "pix2struct": _pix2struct,
}
