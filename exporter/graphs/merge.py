"""The parts that reductions add to the vision graph: merging of similar windows, and the class token's attention.

The number of tokens then depends on the image, so these graphs compute one image at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vtx.exporter.graphs.builder import INT64, Builder
from vtx.tools.model.vision import VisionConfig

SIDE = 3  # of a window, in patches
WINDOW = SIDE**2
PAIRS = WINDOW * (WINDOW - 1)  # both ways
UNSEEN = np.array(-1e30, np.float32)  # a masked product, 0 after the softmax
TINY = 1e-8  # the least length of a token, as in torch's cosine_similarity


@dataclass(frozen=True, slots=True)
class Merged:
    """The tower's tokens after merging: `hidden` [1, n, hidden], `patch_index` and `merged` [n] int64.

    `similarity` [n] float32 is the mean cosine of a merged window, 0 for other tokens. `seen` [1, 1, 1, n] bool: the
    tokens that remain, None for all. `merged` is -1 for a removed token.
    """

    hidden: ir.Value
    patch_index: ir.Value
    merged: ir.Value
    similarity: ir.Value
    seen: ir.Value | None


def merge_windows(b: Builder, v: VisionConfig, x: ir.Value, tau: ir.Value) -> Merged:
    """LSM (MustDrop Eq. 5): of x [1, n, hidden], every similar 3x3 window becomes the mean of its nine tokens.

    Windows do not overlap; they start at the first patch, and the rest of the rows and columns at the far borders is
    not merged. A window is similar if the mean cosine of its 36 pairs is at least `tau`. A merged window has its first
    patch's index. Its other tokens are removed, or masked if the dialect cannot have sizes that depend on values.
    """
    grid = np.arange(v.states - v.grid**2, v.states, dtype=np.int64).reshape(v.grid, v.grid)
    along = v.grid // SIDE
    blocks = grid[: along * SIDE, : along * SIDE].reshape(along, SIDE, along, SIDE)
    windows = blocks.transpose(0, 2, 1, 3).reshape(-1, WINDOW)  # token indices [windows, 9], in raster order
    hidden = b.reshape(x, v.states, v.hidden)
    inside = b.op("Gather", hidden, b.constant(windows))
    # The mean cosine of a window's pairs: of unit vectors u, (|sum u|^2 - sum |u|^2) / 72.
    wide = b.to_float32(inside)
    square = b.sum(b.op("Mul", wide, wide), 2, keepdims=True)
    unit = b.op("Div", wide, b.op("Max", b.op("Sqrt", square), b.single(TINY)))
    together = b.sum(unit, 1)
    crossed = b.sum(b.op("Mul", together, together), 1)
    squares = b.sum(b.op("Mul", unit, unit), 1, 2)
    cosine = b.op("Div", b.op("Sub", crossed, squares), b.single(PAIRS))
    similar = b.op("GreaterOrEqual", cosine, tau)

    window_of = np.zeros(v.states, np.int64)
    member = np.zeros(v.states, bool)
    first = np.ones(v.states, bool)
    window_of[windows] = np.arange(len(windows))[:, None]
    member[windows], first[windows[:, 1:]] = True, False
    of_window = b.constant(window_of)
    in_merged = b.op("And", b.op("Gather", similar, of_window), b.constant(member))
    means = b.op("Div", b.sum(inside, 1), b.scalar(WINDOW))
    hidden = b.op("Where", b.unsqueeze(in_merged, 1), b.op("Gather", means, of_window), hidden)

    stays = b.op("Or", b.constant(first), b.op("Not", in_merged))
    merged = b.cast(in_merged, INT64)
    zero = b.single(0)
    similarity = b.op("Where", in_merged, b.op("Gather", cosine, of_window), zero)
    patch_index = b.constant(np.arange(v.states, dtype=np.int64) - v.class_token)  # raster order; the class token: -1
    if not b.dialect.sizes_from_values:
        merged = b.op("Where", stays, merged, b.constant(-1))
        hidden = b.unsqueeze(hidden, 0)
        visible = b.reshape(stays, 1, 1, 1, v.states)
        return Merged(hidden, b.op("Identity", patch_index), merged, similarity, visible)
    indices = b.squeeze(b.op("NonZero", stays), 0)
    hidden, patch_index, merged, similarity = (
        b.op("Gather", value, indices) for value in (hidden, patch_index, merged, similarity)
    )
    return Merged(b.unsqueeze(hidden, 0), patch_index, merged, similarity, None)


def class_attention(b: Builder, v: VisionConfig, q: ir.Value, k: ir.Value, seen: ir.Value | None) -> ir.Value:
    """Head-mean attention [images, tokens] of token 0, from a block's q and k [images, tokens, hidden] (Eq. 6)."""
    size = v.hidden // v.heads
    first = b.to_float32(b.slice(q, 0, 1, 1))
    scaled = b.op("Mul", first, b.single(size**-0.5))
    query = b.reshape(scaled, -1, v.heads, 1, size)
    key = b.transpose(b.reshape(b.to_float32(k), 0, -1, v.heads, size), 0, 2, 3, 1)
    products = b.op("MatMul", query, key)
    if seen is not None:
        products = b.op("Where", seen, products, b.constant(UNSEEN))
    weights = b.op("Softmax", products, axis=-1)
    mean = b.op("Div", weights, b.single(v.heads))
    return b.sum(mean, 1, 2)


def received_attention(b: Builder, v: VisionConfig, q: ir.Value, k: ir.Value) -> ir.Value:
    """The attention [images, tokens] float32 that each token gets, mean over heads and over all tokens."""
    size = v.hidden // v.heads
    query = b.op("Mul", b.to_float32(q), b.single(size**-0.5))
    query = b.transpose(b.reshape(query, 0, -1, v.heads, size), 0, 2, 1, 3)
    key = b.transpose(b.reshape(b.to_float32(k), 0, -1, v.heads, size), 0, 2, 3, 1)
    weights = b.op("Softmax", b.op("MatMul", query, key), axis=-1)
    mean = b.op("Div", weights, b.single(v.heads * v.states))
    return b.sum(mean, 1, 2)
