"""The vision graph: a CLIP or SigLIP tower up to the last feature layer that is used, and the projector."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.axial import axial_tensors, build_axial
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.exporter.graphs.convolutional import build_convolutional, convolutional_tensors
from vtx.exporter.graphs.encoder import block_tensors, build_block, project_patches, projected
from vtx.exporter.graphs.joined import build_joined, joined_tensors
from vtx.exporter.graphs.merge import Merged, class_attention, merge_windows, received_attention
from vtx.exporter.graphs.naflex import merge_squares, merger_tensors, naflex_embeddings, naflex_squares
from vtx.exporter.graphs.native import Grid, build_native, native_tensors
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.tools.model.tensors import Shapes, linear_tensors, norm_tensors
from vtx.tools.model.vision import VisionConfig

IMAGES, VIDEO = "vision.", "video."  # prefixes of towers' weights
TOWER, BESIDE = "vision", "vision.beside"  # the first parts of their names in a graph
MAX_ROW = 1 << 30
POST_NORM = "vision.post_layernorm"
NEWLINE = "image_newline"  # a weight of the layout that no graph reads


def vision_tensors(c: ModelConfig, *, last_attention: bool = False) -> Shapes:
    """Canonical names and shapes of the weights of tower and projector; `last_attention` as in `build_vision`."""
    v = c.vision
    if v.native:
        yield from native_tensors(c) if v.axis_positions is None else axial_tensors(c)
        return
    if v.towers:
        yield from joined_tensors(v)
    else:
        of_patches = _tower_tensors(v, max(c.feature_layers), last_attention)
        yield from convolutional_tensors(v) if v.stage_blocks else of_patches
    if v.beside is not None:
        yield from _tower_tensors(v.beside, v.beside.layers - 1, last_attention=False, tower=BESIDE)
    width = feature_width(c)
    if c.projector_norm_eps is not None:
        yield from norm_tensors("projector.norm", width, bias=not c.projector_rms)
    between = c.projector_widths or [c.projector_width] * (c.projector_layers - 1)
    widths = [width, *between, c.text.hidden]
    for name, (into, out) in zip(projector_layers(c), pairwise(widths), strict=True):
        yield from linear_tensors(name, out, into, bias=c.projector_bias)
    if c.layout.newline:
        yield NEWLINE, (c.text.hidden,)


def _tower_tensors(v: VisionConfig, used: int, last_attention: bool, tower: str = TOWER) -> Shapes:
    kernel = (3 * v.patch**2,) if v.naflex and not v.nearest else (3, v.patch, v.patch)
    yield f"{tower}.embeddings.patch_embedding.weight", (v.hidden, *kernel)
    batch = (1,) if v.batch_axis else ()
    positions = v.position_grid**2 + v.class_token if v.position_grid else v.states
    positions = v.grid**2 if v.registers else positions
    yield f"{tower}.embeddings.position_embedding.weight", (*batch, positions, v.hidden)
    if v.class_token:
        yield f"{tower}.embeddings.class_embedding", (*batch, *batch, v.hidden)
    if v.registers:
        yield f"{tower}.embeddings.registers", (v.registers, v.hidden)
    if v.pre_norm:
        yield from norm_tensors("vision.pre_layrnorm", v.hidden)
    else:
        yield f"{tower}.embeddings.patch_embedding.bias", (v.hidden,)
    for layer in range(max(used, v.layers - 1) if last_attention else used):
        yield from block_tensors(v, f"{tower}.encoder.layers.{layer}")
    if last_attention and used < v.layers:
        last = f"vision.encoder.layers.{v.layers - 1}"
        used_parts = f"{last}.layer_norm1", f"{last}.self_attn.q_", f"{last}.self_attn.k_"
        yield from (tensor for tensor in block_tensors(v, last) if tensor[0].startswith(used_parts))
    if v.merged_after is not None:
        yield from merger_tensors(v)
    if v.post_norm:
        yield from norm_tensors(POST_NORM, v.hidden)


def projector_layers(c: ModelConfig) -> list[str]:
    """The canonical names of the projector's matrices, with an activation between them."""
    return [f"projector.linear_{number}" for number in range(1, c.projector_layers + 1)]


def video_tensors(c: ModelConfig) -> Shapes:
    """Canonical names and shapes of the weights of a separate tower for videos."""
    if c.frames is None or c.video is None or not c.video.own_tower:
        return
    for name, shape in vision_tensors(c.frames):
        if name.startswith(IMAGES):
            yield VIDEO + name.removeprefix(IMAGES), shape


def feature_width(c: ModelConfig) -> int:
    second = 0 if c.vision.beside is None else c.vision.beside.hidden
    return c.vision.hidden * len(c.feature_layers) * c.vision.shuffle**2 + second


@dataclass(slots=True)
class _Tower:
    """The tower under construction: its hidden states [images, tokens, hidden], the embeddings first.

    `query` and `key` are the last used block's; `merged` is set if windows merge.
    """

    states: list[ir.Value]
    query: ir.Value | None = None
    key: ir.Value | None = None
    merged: Merged | None = None


def build_vision(
    b: Builder, c: ModelConfig, *, merges: bool = False, attention: bool = False, last_attention: bool = False,
    text_tower: TextTowerSpec | None = None, tower_tokens: bool = False,
    received: int | None = None,
) -> None:  # fmt: skip
    """[images, 3, side, side] float32 to [images, view_tokens, hidden] float32.

    `merges`: windows of similar patches merge after the first block. The graph then computes one image at a time, and
    the number of tokens is known only at run time, or an output marks the removed ones. `attention` adds an output of
    the class token's attention to each token in the last used block, `last_attention` in the tower's last block,
    `text_tower` each token in the space of that CLIP's text tower, `tower_tokens` the tower's own tokens,
    `received` the attention that each token gets in that block and in the last used one. Images at native
    resolution: `build_native`.
    """
    v = c.vision
    if v.native:
        assert not any((merges, attention, last_attention, text_tower, tower_tokens, received)), (
            "refused for these towers"
        )
        (build_native if v.axis_positions is None else build_axial)(b, c)
        return
    images, sides = 1 if merges or v.naflex else "images", ("height", "width") if v.naflex else (v.image, v.image)
    given = b.input(names.PIXELS, FLOAT, [images, 3, *sides])
    pixels = given if v.towers else b.from_float32(given)
    tau = b.input(names.TAU, FLOAT, [1]) if merges else None
    grid: Grid | None = None
    if v.naflex:
        x, grid = naflex_embeddings(b, v, pixels)
    elif v.towers:
        x = build_joined(b, v, pixels)
    else:
        x = build_convolutional(b, v, pixels) if v.stage_blocks else _embeddings(b, v, pixels)
    tower, of_block, whole = _Tower([x]), list[ir.Value](), bool(v.stage_blocks or v.towers)
    if whole:
        tower.states.append(x)
    for layer in range(0 if whole else max(c.feature_layers)):
        name, shape = f"vision.encoder.layers.{layer}", _shape(b, c, tower)
        x, tower.query, tower.key = build_block(b, v, x, name, shape, _seen(tower))
        if received is not None and layer + 1 in (received, max(c.feature_layers)):
            of_block.append(b.op("Unsqueeze", received_attention(b, v, tower.query, tower.key), b.constant([2])))
        if layer == 0 and tau is not None:
            tower.merged = merge_windows(b, v, x, tau)
            x = tower.merged.hidden
        if grid is not None and layer + 1 == v.merged_after:
            x, grid = merge_squares(b, v, x, grid)
        tower.states.append(x)
    chosen = [_select(b, c, tower.states[number]) for number in c.feature_layers]
    features = _features(b, c, chosen)
    if v.beside is not None:
        features = b.op("Concat", features, _beside(b, v.beside, given), axis=-1)
    grouped = _grouped(b, c, features) if grid is None else naflex_squares(b, v.shuffle, v.hidden, features, grid)[0]
    hidden = _project(b, c, b.reshape(grouped, -1, feature_width(c)))
    removes = (merges and b.dialect.sizes_from_values) or v.naflex
    out = b.to_float32(b.reshape(hidden, *((1, -1) if removes else (-1, c.view_tokens)), c.text.hidden))
    count = "tokens" if removes else c.view_tokens
    b.output(out, names.FEATURES, FLOAT, [images, count, c.text.hidden])
    if tower.merged:
        for value, name in ((tower.merged.patch_index, names.PATCH_INDEX), (tower.merged.merged, names.MERGED)):
            b.output(_select(b, c, value, axis=0), name, ir.DataType.INT64, [count])
        b.output(_select(b, c, tower.merged.similarity, axis=0), names.SIMILARITY, FLOAT, [count])
    each = [count if merges else "all_rows"]
    if attention:
        assert tower.query is not None
        assert tower.key is not None
        given = _select(b, c, class_attention(b, v, tower.query, tower.key, _seen(tower)))
        b.output(b.reshape(given, -1), names.CLS_ATTENTION, FLOAT, each)
    if last_attention:
        given = _select(b, c, class_attention(b, v, *_last_block(b, c, tower), _seen(tower)))
        b.output(b.reshape(given, -1), names.CLS_ATTENTION_LAST, FLOAT, each)
    if received is not None:
        if received == 1 and tower.merged:  # windows merge behind block 1: of its tokens those that remain count
            remain = b.op("Add", tower.merged.patch_index, b.constant(np.array(int(v.class_token))))
            of_block[0] = b.op("Gather", of_block[0], remain, axis=1)
        both = b.op("Concat", of_block[0], of_block[-1], axis=-1)
        b.output(b.reshape(_select(b, c, both), -1, 2), names.RECEIVED, FLOAT, [*each, 2])
    if text_tower is not None:
        project_patches(b, text_tower, features, v.hidden, *each)
    if tower_tokens:
        assert tower.query is not None
        assert tower.key is not None
        size = v.hidden // v.heads
        keys = b.reshape(b.to_float32(tower.key), 0, -1, v.heads, size)
        keys = b.op("ReduceSum", keys, b.constant([2]), keepdims=0)
        keys = b.op("Div", keys, b.constant(np.array(v.heads, np.float32)))
        given = class_attention(b, v, tower.query, tower.key, _seen(tower))
        given = b.op("Unsqueeze", given, b.constant([2]))
        states = b.to_float32(_features(b, c, [tower.states[number] for number in c.feature_layers]))
        width = feature_width(c) + size + 1
        packed = b.op("Concat", states, keys, given, axis=-1)
        b.output(packed, names.TOWER_TOKENS, FLOAT, [1 if merges else "images", "states", width])


def _beside(b: Builder, v: VisionConfig, pixels: ir.Value) -> ir.Value:
    """The patches' features [images, patches, hidden] in a second tower, of the first one's pixel values in float32."""
    scale, shift = (b.constant(np.array(p, np.float32).reshape(1, -1, 1, 1)) for p in (v.pixel_scale, v.pixel_shift))
    x = _embeddings(b, v, b.from_float32(b.op("Add", b.op("Mul", pixels, scale), shift)), BESIDE)
    for layer in range(v.layers - 1):
        x, _, _ = build_block(b, v, x, f"{BESIDE}.encoder.layers.{layer}", (-1, v.states, v.hidden))
    return x


def build_projector(b: Builder, c: ModelConfig) -> None:
    """The tower's hidden states [tokens, width] float32 to image tokens [tokens, hidden] float32."""
    states = b.from_float32(b.input(names.TOWER_STATES, FLOAT, ["tokens", feature_width(c)]))
    b.output(b.to_float32(_project(b, c, states)), names.HIDDEN, FLOAT, ["tokens", c.text.hidden])


def _features(b: Builder, c: ModelConfig, chosen: list[ir.Value]) -> ir.Value:
    """The features that are projected, [images, tokens, width], of the hidden states of the feature layers."""
    if c.vision.post_norm:
        chosen = [b.dialect.layer_norm(b, state, POST_NORM, c.vision.eps) for state in chosen]
    return b.op("Concat", *chosen, axis=-1) if len(chosen) > 1 else chosen[0]


def _project(b: Builder, c: ModelConfig, hidden: ir.Value) -> ir.Value:
    if c.projector_norm_eps is not None and c.projector_rms:
        hidden = b.dialect.norm(b, hidden, "projector.norm.weight", c.projector_norm_eps)
    elif c.projector_norm_eps is not None:
        hidden = b.dialect.layer_norm(b, hidden, "projector.norm", c.projector_norm_eps)
    for number, name in enumerate(projector_layers(c)):
        hidden = activate(b, hidden, c.projector_activation) if number else hidden
        hidden = b.linear(hidden, name, bias=c.projector_bias)
    return hidden


def _grouped(b: Builder, c: ModelConfig, features: ir.Value) -> ir.Value:
    """Features [images, patches, width], those of each square of patches averaged, or joined by rows or columns.

    Zeros fill squares that extend beyond the grid at the right and the bottom.
    """
    v, grid, width = c.vision, c.vision.grid, c.vision.hidden * len(c.feature_layers)
    if v.pool > 1:
        planes = b.op("Transpose", b.reshape(features, -1, grid, grid, width), perm=[0, 3, 1, 2])
        means = b.op("AveragePool", planes, kernel_shape=[v.pool] * 2, strides=[v.pool] * 2)
        features = b.op("Transpose", b.reshape(means, 0, width, -1), perm=[0, 2, 1])
    if v.shuffle == 1:
        return features
    along, missing = -(-grid // v.shuffle), -grid % v.shuffle
    if missing:
        features = b.reshape(features, -1, grid, grid, width)
        features = b.op("Pad", features, b.constant([0, 0, 0, 0, 0, missing, missing, 0]))
    squares = b.reshape(features, -1, along, v.shuffle, along, v.shuffle, width)
    return b.op("Transpose", squares, perm=[0, 3, 1, 2, 4, 5] if v.shuffle_by_columns else [0, 1, 3, 2, 4, 5])


def _last_block(b: Builder, c: ModelConfig, tower: _Tower) -> tuple[ir.Value, ir.Value]:
    """The q and k [images, tokens, hidden] of the tower's last block, which may be beyond the used ones."""
    v, x = c.vision, tower.states[-1]
    if max(c.feature_layers) == v.layers:
        assert tower.query is not None
        assert tower.key is not None
        return tower.query, tower.key
    shape = _shape(b, c, tower)
    for layer in range(max(c.feature_layers), v.layers - 1):
        x = build_block(b, v, x, f"vision.encoder.layers.{layer}", shape, _seen(tower))[0]
    q, k = projected(b, v, x, f"vision.encoder.layers.{v.layers - 1}", shape, "qk")
    return q, k


def _shape(b: Builder, c: ModelConfig, tower: _Tower) -> tuple[int, int, int]:
    """The shape of the tower's hidden states, with -1 for a size known only at run time."""
    removed = (tower.merged is not None and b.dialect.sizes_from_values) or c.vision.naflex
    return (1, -1, c.vision.hidden) if removed else (-1, c.vision.states, c.vision.hidden)


def _seen(tower: _Tower) -> ir.Value | None:
    """The tokens that the next block may attend to, [1, 1, 1, tokens] bool, or None for all."""
    return tower.merged.seen if tower.merged else None


def _embeddings(b: Builder, v: VisionConfig, pixels: ir.Value, tower: str = TOWER) -> ir.Value:
    inputs = [pixels, b.weight(f"{tower}.embeddings.patch_embedding.weight")]
    if not v.pre_norm:
        inputs.append(b.weight(f"{tower}.embeddings.patch_embedding.bias"))
    patches = b.op("Conv", *inputs, kernel_shape=[v.patch] * 2, strides=[v.patch] * 2)
    x = b.op("Transpose", b.reshape(patches, 0, v.hidden, -1), perm=[0, 2, 1])
    positions = _positions(b, v, tower)
    if not v.class_token:
        return b.op("Add", x, positions)
    images, first = b.op("Shape", pixels, start=0, end=1), b.weight(f"{tower}.embeddings.class_embedding")
    if v.registers:
        first = b.op("Concat", b.reshape(first, 1, v.hidden), b.weight(f"{tower}.embeddings.registers"), axis=0)
        x = b.op("Add", x, positions)
    shape = b.op("Concat", images, b.constant([1 + (v.registers or 0), v.hidden]), axis=0)
    x = b.op("Concat", b.op("Expand", first, shape), x, axis=1)
    if v.registers:
        return x
    x = b.op("Add", x, positions)
    return b.dialect.layer_norm(b, x, "vision.pre_layrnorm", v.eps) if v.pre_norm else x


def _positions(b: Builder, v: VisionConfig, tower: str) -> ir.Value:
    """The table of positions. Another grid's is resized, bicubic in float32, except the class token's."""
    table = b.weight(f"{tower}.embeddings.position_embedding.weight")
    if not v.position_grid:
        return table
    side, first, axis = v.position_grid, b.constant([int(v.class_token)]), b.constant([1])
    grid = b.reshape(b.op("Slice", table, first, b.constant([MAX_ROW]), axis), 1, side, side, v.hidden)
    grid = b.to_float32(b.op("Transpose", grid, perm=[0, 3, 1, 2]))
    resized = b.op(
        "Resize", grid, None, None, b.constant([1, v.hidden, v.grid, v.grid]), mode="cubic", cubic_coeff_a=-0.75,
        coordinate_transformation_mode="half_pixel",
    )  # fmt: skip
    patches = b.from_float32(b.op("Transpose", b.reshape(resized, 1, v.hidden, -1), perm=[0, 2, 1]))
    if not v.class_token:
        return patches
    return b.op("Concat", b.op("Slice", table, b.constant([0]), first, axis), patches, axis=1)


def _select(b: Builder, c: ModelConfig, x: ir.Value, axis: int = 1) -> ir.Value:
    """`default` omits the first token (CLIP's class token), and registers; `full` keeps all."""
    if not c.left_out:
        return x
    return b.op("Slice", x, b.constant([c.left_out]), b.constant([MAX_ROW]), b.constant([axis]))
