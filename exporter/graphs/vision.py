"""The vision graph: a CLIP or SigLIP tower up to the last feature layer that is used, and the projector."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.axial import build_axial
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder
from vtx.exporter.graphs.convolutional import build_convolutional
from vtx.exporter.graphs.encoder import build_block, project_patches, projected
from vtx.exporter.graphs.joined import build_joined
from vtx.exporter.graphs.merge import Merged, class_attention, merge_windows, received_attention
from vtx.exporter.graphs.naflex import merge_squares, naflex_embeddings, naflex_squares
from vtx.exporter.graphs.native import build_native
from vtx.exporter.graphs.native_blocks import Grid
from vtx.exporter.graphs.pixtral import build_pixtral
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.model_spec import TextTowerSpec
from vtx.tools.model.tensors import Shapes
from vtx.tools.model.towers import vision_shapes
from vtx.tools.model.towers.encoder import POST_NORM, TOWER
from vtx.tools.model.towers.paired import BESIDE
from vtx.tools.model.vision import VisionConfig

IMAGES = "vision."  # prefixes of towers' weights
VIDEO = "video."
MAX_ROW = 1 << 30
NEWLINE = "image_newline"  # a weight of the layout that no graph reads


def vision_tensors(c: ModelConfig, *, last_attention: bool = False) -> Shapes:
    """Canonical names and shapes of the weights of tower and projector; `last_attention` as in `Extras`."""
    yield from vision_shapes(c, c.text.hidden, last_attention=last_attention)
    if c.layout.newline and not c.vision.native:
        yield NEWLINE, (c.text.hidden,)


def video_tensors(c: ModelConfig) -> Shapes:
    """Canonical names and shapes of the weights of a separate tower for videos."""
    if c.frames is None or c.video is None or not c.video.own_tower:
        return
    for name, shape in vision_tensors(c.frames):
        if name.startswith(IMAGES):
            yield VIDEO + name.removeprefix(IMAGES), shape


@dataclass(frozen=True, slots=True)
class Extras:
    """The work and the outputs of a vision graph in addition to its tokens.

    `merges`: windows of similar patches merge after the first block. The graph then computes one image at a time, and
    the number of tokens is known only at run time, or an output marks the removed ones. The others are outputs:
    `attention` of the class token to each token in the last used block, `last_attention` in the tower's last block,
    `text_tower`: each token in the space of that CLIP's text tower, `tower_tokens`: the tower's own tokens,
    `received`: the attention that each token gets in that block and in the last used one.
    """

    merges: bool = False
    attention: bool = False
    last_attention: bool = False
    text_tower: TextTowerSpec | None = None
    tower_tokens: bool = False
    received: int | None = None


NO_EXTRAS = Extras()
_BUILD = {"axial": build_axial, "native": build_native, "pixtral": build_pixtral}  # of towers at native resolution


@dataclass(slots=True)
class _TowerGraph:
    """The tower under construction: its hidden states [images, tokens, hidden], the embeddings first.

    `query` and `key` are the last used block's; `merged` is set if windows merge, `grid` if images have native
    resolution. `received` is the attention that tokens get in the blocks in question, [images, tokens, 1] each.
    """

    states: list[ir.Value]
    query: ir.Value | None = None
    key: ir.Value | None = None
    merged: Merged | None = None
    grid: Grid | None = None
    received: list[ir.Value] = field(default_factory=list)

    def attention(self, b: Builder, v: VisionConfig) -> ir.Value:
        """The class token's attention to each token in the last used block."""
        assert self.query is not None
        assert self.key is not None
        return class_attention(b, v, self.query, self.key, _seen(self))


def build_vision(b: Builder, c: ModelConfig, extras: Extras = NO_EXTRAS) -> None:
    """[images, 3, side, side] float32 to [images, view_tokens, hidden] float32.

    Images at native resolution: `build_native`, `build_axial`, `build_pixtral`.
    """
    v = c.vision
    if v.native:
        assert extras == NO_EXTRAS, "refused for these towers"
        _BUILD[v.kind](b, c)
        return
    images = 1 if extras.merges or v.naflex else "images"
    sides = ("height", "width") if v.naflex else (v.image, v.image)
    pixels = b.input(names.PIXELS, FLOAT, [images, 3, *sides])
    tower = _tower(b, c, pixels, extras)
    features = _features(b, c, [_select(b, c, tower.states[number]) for number in c.feature_layers])
    if v.beside is not None:
        features = b.op("Concat", features, _beside(b, v.beside, pixels), axis=-1)
    if tower.grid is None:
        grouped = _grouped(b, c, features)
    else:
        grouped, _ = naflex_squares(b, v.shuffle, v.hidden, features, tower.grid)
    hidden = _project(b, c, b.reshape(grouped, -1, c.feature_width))
    count: int | str = c.view_tokens
    shape = (-1, c.view_tokens)
    if v.naflex or (extras.merges and b.dialect.sizes_from_values):  # tokens are removed
        count = "tokens"
        shape = (1, -1)
    out = b.to_float32(b.reshape(hidden, *shape, c.text.hidden))
    b.output(out, names.FEATURES, FLOAT, [images, count, c.text.hidden])
    if tower.merged is not None:
        _output_merged(b, c, tower.merged, count)
    _output_extras(b, c, tower, extras, features, count if extras.merges else "all_rows")


def _output_extras(
    b: Builder, c: ModelConfig, tower: _TowerGraph, extras: Extras, features: ir.Value, tokens: int | str
) -> None:
    """The outputs in addition to the image tokens."""
    _output_attention(b, c, tower, extras, tokens)
    if extras.text_tower is not None:
        project_patches(b, extras.text_tower, features, c.vision.hidden, tokens)
    if extras.tower_tokens:
        _output_tower_tokens(b, c, tower, 1 if extras.merges else "images")


def _tower(b: Builder, c: ModelConfig, pixels: ir.Value, extras: Extras) -> _TowerGraph:
    """The hidden states of pixels in float32; of a tower without equal blocks the last ones in place of all."""
    v = c.vision
    if v.towers:
        return _TowerGraph([build_joined(b, v, pixels)] * 2)
    pixels = b.from_float32(pixels)
    if v.stage_blocks:
        return _TowerGraph([build_convolutional(b, v, pixels)] * 2)
    tau = b.input(names.TAU, FLOAT, [1]) if extras.merges else None
    grid: Grid | None = None
    if v.naflex:
        x, grid = naflex_embeddings(b, v, pixels)
    else:
        x = _embeddings(b, v, pixels)
    tower = _TowerGraph([x], grid=grid)
    blocks = max(c.feature_layers)
    for layer in range(blocks):
        name = f"vision.encoder.layers.{layer}"
        shape = _shape(b, c, tower)
        x, tower.query, tower.key = build_block(b, v, x, name, shape, _seen(tower))
        if extras.received is not None and layer + 1 in (extras.received, blocks):
            received = received_attention(b, v, tower.query, tower.key)
            tower.received.append(b.unsqueeze(received, 2))
        if layer == 0 and tau is not None:
            tower.merged = merge_windows(b, v, x, tau)
            x = tower.merged.hidden
        if tower.grid is not None and layer + 1 == v.merged_after:
            x, tower.grid = merge_squares(b, v, x, tower.grid)
        tower.states.append(x)
    return tower


def _output_merged(b: Builder, c: ModelConfig, merged: Merged, count: int | str) -> None:
    """The patch of each token, which of them are merged ones, and the similarity of each."""
    for value, name in ((merged.patch_index, names.PATCH_INDEX), (merged.merged, names.MERGED)):
        b.output(_select(b, c, value, axis=0), name, INT64, [count])
    b.output(_select(b, c, merged.similarity, axis=0), names.SIMILARITY, FLOAT, [count])


def _output_attention(b: Builder, c: ModelConfig, tower: _TowerGraph, extras: Extras, tokens: int | str) -> None:
    v = c.vision
    if extras.attention:
        attention = _select(b, c, tower.attention(b, v))
        b.output(b.reshape(attention, -1), names.CLS_ATTENTION, FLOAT, [tokens])
    if extras.last_attention:
        attention = _select(b, c, class_attention(b, v, *_last_block(b, c, tower), _seen(tower)))
        b.output(b.reshape(attention, -1), names.CLS_ATTENTION_LAST, FLOAT, [tokens])
    if extras.received is None:
        return
    first = tower.received[0]
    last = tower.received[-1]
    if extras.received == 1 and tower.merged:  # windows merge behind block 1: of its tokens those that remain count
        remain = b.op("Add", tower.merged.patch_index, b.constant(int(v.class_token)))
        first = b.op("Gather", first, remain, axis=1)
        last = first if len(tower.received) == 1 else last
    pair = b.op("Concat", first, last, axis=-1)
    b.output(b.reshape(_select(b, c, pair), -1, 2), names.RECEIVED, FLOAT, [tokens, 2])


def _output_tower_tokens(b: Builder, c: ModelConfig, tower: _TowerGraph, images: int | str) -> None:
    """Of each hidden state its features, its mean key over all heads, and the class token's attention to it."""
    v = c.vision
    size = c.vision.hidden // c.vision.heads
    assert tower.key is not None
    keys = b.reshape(b.to_float32(tower.key), 0, -1, v.heads, size)
    keys = b.sum(keys, 2)
    keys = b.op("Div", keys, b.single(v.heads))
    attention = b.unsqueeze(tower.attention(b, v), 2)
    states = b.to_float32(_features(b, c, [tower.states[number] for number in c.feature_layers]))
    packed = b.op("Concat", states, keys, attention, axis=-1)
    b.output(packed, names.TOWER_TOKENS, FLOAT, [images, "states", c.feature_width + size + 1])


def _beside(b: Builder, v: VisionConfig, pixels: ir.Value) -> ir.Value:
    """The patches' features [images, patches, hidden] in a second tower, of the first one's pixel values in float32."""
    scale, shift = (b.constant(np.array(p, np.float32).reshape(1, -1, 1, 1)) for p in (v.pixel_scale, v.pixel_shift))
    x = _embeddings(b, v, b.from_float32(b.op("Add", b.op("Mul", pixels, scale), shift)), BESIDE)
    for layer in range(v.layers - 1):
        x, _, _ = build_block(b, v, x, f"{BESIDE}.encoder.layers.{layer}", (-1, v.states, v.hidden))
    return x


def build_projector(b: Builder, c: ModelConfig) -> None:
    """The tower's hidden states [tokens, width] float32 to image tokens [tokens, hidden] float32."""
    states = b.from_float32(b.input(names.TOWER_STATES, FLOAT, ["tokens", c.feature_width]))
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
    for number, name in enumerate(c.projector_matrices):
        hidden = activate(b, hidden, c.projector_activation) if number else hidden
        hidden = b.linear(hidden, name, bias=c.projector_bias)
    return hidden


def _grouped(b: Builder, c: ModelConfig, features: ir.Value) -> ir.Value:
    """Features [images, patches, width], those of each square of patches averaged, or joined by rows or columns.

    Zeros fill squares that extend beyond the grid at the right and the bottom.
    """
    v = c.vision
    grid = c.vision.grid
    width = c.vision.hidden * len(c.feature_layers)
    if v.pool > 1:
        planes = b.transpose(b.reshape(features, -1, grid, grid, width), 0, 3, 1, 2)
        means = b.op("AveragePool", planes, kernel_shape=[v.pool] * 2, strides=[v.pool] * 2)
        features = b.transpose(b.reshape(means, 0, width, -1), 0, 2, 1)
    if v.shuffle == 1:
        return features
    along = -(-grid // v.shuffle)
    missing = -grid % v.shuffle
    if missing:
        features = b.reshape(features, -1, grid, grid, width)
        features = b.op("Pad", features, b.constant([0, 0, 0, 0, 0, missing, missing, 0]))
    squares = b.reshape(features, -1, along, v.shuffle, along, v.shuffle, width)
    return b.op("Transpose", squares, perm=[0, 3, 1, 2, 4, 5] if v.shuffle_by_columns else [0, 1, 3, 2, 4, 5])


def _last_block(b: Builder, c: ModelConfig, tower: _TowerGraph) -> tuple[ir.Value, ir.Value]:
    """The q and k [images, tokens, hidden] of the tower's last block, which may be beyond the used ones."""
    v = c.vision
    x = tower.states[-1]
    if max(c.feature_layers) == v.layers:
        assert tower.query is not None
        assert tower.key is not None
        return tower.query, tower.key
    shape = _shape(b, c, tower)
    for layer in range(max(c.feature_layers), v.layers - 1):
        x = build_block(b, v, x, f"vision.encoder.layers.{layer}", shape, _seen(tower))[0]
    q, k = projected(b, v, x, f"vision.encoder.layers.{v.layers - 1}", shape, "qk")
    return q, k


def _shape(b: Builder, c: ModelConfig, tower: _TowerGraph) -> tuple[int, int, int]:
    """The shape of the tower's hidden states, with -1 for a size known only at run time."""
    removed = (tower.merged is not None and b.dialect.sizes_from_values) or c.vision.naflex
    return (1, -1, c.vision.hidden) if removed else (-1, c.vision.states, c.vision.hidden)


def _seen(tower: _TowerGraph) -> ir.Value | None:
    """The tokens that the next block may attend to, [1, 1, 1, tokens] bool, or None for all."""
    return tower.merged.seen if tower.merged else None


def _embeddings(b: Builder, v: VisionConfig, pixels: ir.Value, tower: str = TOWER) -> ir.Value:
    inputs = [pixels, b.weight(f"{tower}.embeddings.patch_embedding.weight")]
    if not v.pre_norm:
        inputs.append(b.weight(f"{tower}.embeddings.patch_embedding.bias"))
    patches = b.squares(v.patch, *inputs)
    x = b.transpose(b.reshape(patches, 0, v.hidden, -1), 0, 2, 1)
    positions = _positions(b, v, tower)
    if not v.class_token:
        return b.op("Add", x, positions)
    images = b.size(pixels, 0)
    first = b.weight(f"{tower}.embeddings.class_embedding")
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
    side = v.position_grid
    first = b.constant([int(v.class_token)])
    axis = b.constant([1])
    grid = b.reshape(b.op("Slice", table, first, b.constant([MAX_ROW]), axis), 1, side, side, v.hidden)
    grid = b.to_float32(b.transpose(grid, 0, 3, 1, 2))
    resized = b.op(
        "Resize",
        grid,
        None,
        None,
        b.constant([1, v.hidden, v.grid, v.grid]),
        mode="cubic",
        cubic_coeff_a=-0.75,
        coordinate_transformation_mode="half_pixel",
    )
    patches = b.from_float32(b.transpose(b.reshape(resized, 1, v.hidden, -1), 0, 2, 1))
    if not v.class_token:
        return patches
    return b.op("Concat", b.op("Slice", table, b.constant([0]), first, axis), patches, axis=1)


def _select(b: Builder, c: ModelConfig, x: ir.Value, axis: int = 1) -> ir.Value:
    """`default` omits the first token (CLIP's class token), and registers; `full` keeps all."""
    if not c.left_out:
        return x
    return b.slice(x, c.left_out, MAX_ROW, axis)
