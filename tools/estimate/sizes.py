"""Sizes of a model: what its cost depends on. Of a model known by name, of a bundle, or of a checkpoint's spec.

`models.json` holds the known models as their published configurations state them, each in the form of
`vtx-plan --model CHECKPOINT --json` (`model`), with the layout of its images; a model is added there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.model_spec import ByLayer, DeltaSpec, ModelSpec, SlidingLayers
from vtx.runtime.strict import Strict, optional
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts import layouts, read_layout

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle

STEM, ATTENDING, KERNEL, WIDER, SQUEEZED = (
    4,
    2,
    49,
    4,
    16,
)  # of a convolutional tower (exporter/graphs/convolutional.py)
CAMERAS = 3  # of a robot, where a model does not name them: pi0 was trained with up to three
MOMENTS = 2  # of a video that a patch's kernel covers; an image fills both


@dataclass(frozen=True, slots=True)
class DecoderShape(ByLayer):
    """A decoder of the llama family; `kv_heads` below `heads` is grouped-query attention.

    `qk_norm`: an RMS norm over each head of queries and keys, unrotated. `conv_layers`, counted from 1, have in place
    of attention a gated convolution of each channel over the last `conv_taps` tokens, and keep no K and V; with
    `delta`, the gated delta rule behind it. `gated`: a sigmoid of numbers of the query's matrix, as many as its heads
    give out, multiplies what attention gives.
    `post_norms`: a norm follows attention and the MLP too, before their sum with the hidden states. `layer_scale`: a
    number by which a layer's hidden states are multiplied. `sliding` and `shared` as in `ByLayer`; `shared_ffn`: width
    of the MLPs from layer `shared` on. `per_layer`: numbers of a token's input to each layer, from a table of their
    own.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = optional(False)
    conv_layers: tuple[int, ...] = optional(())
    conv_taps: int = optional(1)
    delta: DeltaSpec | None = optional(None)
    gated: bool = optional(False)
    post_norms: bool = optional(False)
    layer_scale: bool = optional(False)
    sliding: SlidingLayers | None = optional(None)
    shared: int | None = optional(None)
    shared_ffn: int | None = optional(None)
    per_layer: int | None = optional(None)

    @property
    def attending(self) -> int:
        """The number of layers with attention."""
        return self.layers - len(self.conv_layers)

    def ffn_of(self, layer: int) -> int:
        """The width of a layer's MLP."""
        return self.ffn if self.shared_ffn is None or self.source(layer) == layer else self.shared_ffn


@dataclass(frozen=True, slots=True)
class DecoderSize(DecoderShape):
    """The work and the weights of a decoder."""

    @property
    def layer_macs(self) -> int:
        """Multiply-accumulates of an attention layer's matrices for one token, if all layers are alike."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    def macs_of(self, layers: Iterable[int]) -> int:
        """Multiply-accumulates of these layers' matrices for one token; also the number of their weights."""
        total = 0
        for layer in layers:
            if layer in self.conv_layers:
                total += self.mixer_macs + self.conv_taps * self.convolved
            else:
                kv_heads = self.kv_heads if self.keeps(layer) else 0
                total += self.hidden * self.heads_of(layer) * ((2 + self.gated) * self.heads + 2 * kv_heads)
            total += 3 * self.hidden * self.ffn_of(layer) + 2 * self.hidden * (self.per_layer or 0)
        return total

    @property
    def mixer_macs(self) -> int:
        """Multiply-accumulates of the matrices of a layer with a convolution, without the MLP's, for one token."""
        if self.delta is None:
            return 4 * self.hidden**2
        return self.hidden * (self.delta.channels + 2 * self.delta.values + 2 * self.delta.value_heads)

    def keeps(self, layer: int) -> bool:
        """True if a layer has K and V of its own."""
        return layer not in self.conv_layers and self.source(layer) == layer

    @property
    def input_macs(self) -> int:
        """Multiply-accumulates of the matrix that makes one token's inputs to all layers; also its weights."""
        return self.layers * (self.per_layer or 0) * self.hidden

    @property
    def every(self) -> range:
        """The numbers of all layers."""
        return range(1, self.layers + 1)

    def macs_after_attention(self, layer: int) -> int:
        """Multiply-accumulates of a layer after its attention, for one token."""
        return self.hidden * self.heads_of(layer) * self.heads + 3 * self.hidden * self.ffn_of(layer)

    @property
    def head_macs(self) -> int:
        return self.vocab * self.hidden

    def slot_elements(self, layer: int) -> int:
        """Elements of K and V in one KV slot of a layer."""
        return 2 * self.kv_heads * self.heads_of(layer) if self.keeps(layer) else 0

    @property
    def small_parameters(self) -> int:
        """Norms and biases of all layers, and the final norm."""
        norms = 4 if self.post_norms else 2
        layer = norms * self.hidden + self.mlp_bias * (2 * self.ffn + self.hidden) + self.layer_scale
        heads = (1 + self.gated) * self.heads + 2 * self.kv_heads
        attention = self.qkv_bias * self.head_dim * heads + self.o_bias * self.hidden
        of_heads = sum(self.heads_of(n) * (1 + self.keeps(n)) for n in self.every if n not in self.conv_layers)
        of_inputs = 0 if self.per_layer is None else self.layers * self.hidden + self.per_layer
        total = self.layers * layer + self.attending * attention + self.qk_norm * of_heads
        if self.delta is not None:
            total += len(self.conv_layers) * (2 * self.delta.value_heads + self.delta.value_dim)
        return total + of_inputs + self.hidden

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding, final norm, and the head unless it is the embedding."""
        tables = self.head_macs * (1 if self.tied else 2) + self.vocab * self.layers * (self.per_layer or 0)
        return self.macs_of(self.every) + self.input_macs + self.small_parameters + tables


@dataclass(frozen=True, slots=True)
class VisionSize:
    """A CLIP or SigLIP tower, and the projector behind it.

    One view is one pass of a tower: `patches` patches of `patch` x `patch` RGB pixels. `layers` are all layers
    of the tower, `used` those up to the last feature layer, which alone are exported. `view_tokens` tokens of
    `features` hidden states each are projected to `out` columns. One image takes `views` views and `image_tokens`
    tokens of the prompt. `towers` counts towers with weights of their own, `projector_layers` the projector's matrices.
    """

    layers: int
    used: int
    hidden: int
    ffn: int
    patches: int
    patch: int
    class_token: bool
    features: int
    view_tokens: int
    image_tokens: int
    out: int
    views: int = 1
    towers: int = 1
    projector_bias: bool = True
    projector_layers: int = 2

    def seeing(self, tokens: int) -> VisionSize:
        """The tower as it sees an image of that many tokens: the same for every image."""
        return self

    @property
    def tower_tokens(self) -> int:
        return self.patches + self.class_token

    @property
    def widest(self) -> int:
        """Numbers that a layer holds for one view: two residual vectors a token, and q, k, v or the MLP's vectors."""
        return self.tower_tokens * (2 * self.hidden + max(4 * self.hidden, 2 * self.ffn))

    @property
    def layer_macs(self) -> int:
        """One layer of the tower for one view, attention products included."""
        return self.layer_macs_on(self.tower_tokens)

    def layer_macs_on(self, tokens: int) -> int:
        h = self.hidden
        return tokens * (4 * h * h + 2 * h * self.ffn) + 2 * tokens * tokens * h

    @property
    def patch_macs(self) -> int:
        return self.patches * self.hidden * 3 * self.patch * self.patch

    @property
    def projector_token_macs(self) -> int:
        return self.features * self.hidden * self.out + (self.projector_layers - 1) * self.out * self.out

    @property
    def parameters(self) -> int:
        """Weights of the exported part of the towers, and of the projector."""
        h = self.hidden
        layer = 4 * h * h + 2 * h * self.ffn + 4 * h + self.ffn + h + 4 * h
        embeddings = h * 3 * self.patch * self.patch + self.tower_tokens * h + (3 * h if self.class_token else h)
        projector = self.projector_token_macs + self.projector_bias * self.projector_layers * self.out
        return self.towers * (self.used * layer + embeddings) + projector + self.further_norms

    @property
    def further_norms(self) -> int:
        """Weights of norms behind the tower's blocks and before the projector."""
        return 0


@dataclass(frozen=True, slots=True)
class NativeSize(VisionSize):
    """A tower with rotary positions, windows of up to `window` patches in all but `whole` layers, and a merger.

    `gated`: three matrices in place of two between the attentions, and norms without biases. `maps`: further mergers,
    for the first layers of the decoder. `positions`: of a learned table; patches then have a bias. `patches`,
    `view_tokens` and `image_tokens` describe the largest image.
    """

    gated: bool = False
    window: int = 1
    whole: int = 1
    maps: int = optional(0)
    positions: int = optional(0)

    def seeing(self, tokens: int) -> NativeSize:
        tokens = max(1, min(tokens, self.image_tokens))
        return replace(self, patches=self.features * tokens, view_tokens=tokens, image_tokens=tokens)

    @property
    def tower_tokens(self) -> int:
        return self.patches

    def layer_macs_on(self, tokens: int) -> int:
        """One layer of the tower for that number of patches: the mean of those with windows and those without."""
        h = self.hidden
        seen = (self.whole * tokens + (self.layers - self.whole) * min(tokens, self.window)) // self.layers
        return tokens * (4 * h * h + (2 + self.gated) * h * self.ffn) + 2 * tokens * seen * h

    @property
    def wide(self) -> int:
        """Width between the merger's matrices."""
        return self.features * self.hidden

    @property
    def projector_token_macs(self) -> int:
        return (1 + self.maps) * self.wide * (self.wide + self.out)

    @property
    def parameters(self) -> int:
        h, norm = self.hidden, self.hidden * (1 if self.gated else 2)
        matrices = 4 * h * h + (2 + self.gated) * h * self.ffn
        layer = matrices + 4 * h + (1 + self.gated) * self.ffn + h + 2 * norm
        biases = (1 + self.maps) * (self.wide + self.out)
        mergers = self.projector_token_macs + biases + norm + self.maps * 2 * self.wide
        learned = (self.positions + 1) * h if self.positions else 0
        return self.layers * layer + MOMENTS * h * 3 * self.patch**2 + learned + mergers


@dataclass(frozen=True, slots=True)
class NaflexSize(VisionSize):
    """A SigLIP tower of images at their own resolution or in tiles, with a table of `positions` and a final norm.

    The projector has a width of `between` between its matrices, and a norm before them if `projector_norm`. `patches`
    and `view_tokens` describe a tile.
    """

    between: int = 1
    positions: int = 1
    projector_norm: bool = True

    def seeing(self, tokens: int) -> NaflexSize:
        views = max(1, -(-tokens // self.view_tokens))
        each = max(1, -(-tokens // views))
        return replace(self, patches=self.features * each, view_tokens=each, image_tokens=views * each, views=views)

    @property
    def projector_token_macs(self) -> int:
        return self.between * (self.features * self.hidden + self.out)

    @property
    def parameters(self) -> int:
        h, wide = self.hidden, self.features * self.hidden
        layer = 4 * h * h + 2 * h * self.ffn + 4 * h + self.ffn + h + 4 * h
        embeddings = h * 3 * self.patch**2 + h + self.positions * h
        projector = self.projector_token_macs + self.projector_bias * (self.between + self.out)
        return self.used * layer + embeddings + 2 * h + projector + self.projector_norm * 2 * wide


@dataclass(frozen=True, slots=True)
class PooledSize(VisionSize):
    """A SigLIP tower with a norm behind it, whose states are averaged in squares to tokens, which have a norm, too.

    `pool` is the side of a square, in patches.
    """

    pool: int = 1

    @property
    def further_norms(self) -> int:
        return 3 * self.hidden


@dataclass(frozen=True, slots=True)
class AxialSize(VisionSize):
    """A tower of images at their own resolution, with tables of `axis_positions` for rows and for columns.

    A token is the mean of `square` patches. Blocks have four norms, no biases, and an MLP of three matrices; `clipped`:
    each matrix has four bounds; `standardised`: means have a bias and a scale. `patches`, `view_tokens` and
    `image_tokens` describe the largest image.
    """

    axis_positions: int = 1
    square: int = 1
    heads: int = 1
    clipped: bool = False
    standardised: bool = False

    def seeing(self, tokens: int) -> AxialSize:
        tokens = max(1, min(tokens, self.image_tokens))
        return replace(self, patches=self.square * tokens, view_tokens=tokens, image_tokens=tokens)

    @property
    def tower_tokens(self) -> int:
        return self.patches

    def layer_macs_on(self, tokens: int) -> int:
        h = self.hidden
        return tokens * (4 * h * h + 3 * h * self.ffn) + 2 * tokens * tokens * h

    @property
    def parameters(self) -> int:
        h = self.hidden
        layer = 4 * h * h + 3 * h * self.ffn + 4 * h + 2 * h // self.heads + self.clipped * 7 * 4
        embeddings = h * 3 * self.patch**2 + 2 * self.axis_positions * h + self.standardised * 2 * h
        return self.layers * layer + embeddings + self.projector_token_macs


@dataclass(frozen=True, slots=True)
class PairedSize(VisionSize):
    """A tower with `registers` and a second one beside it, whose features are joined; `layers` are the first one's.

    The projector has the widths `projected` between its matrices.
    """

    beside: VisionSize | None = None
    registers: int = 0
    projected: tuple[int, ...] = ()

    @property
    def second(self) -> VisionSize:
        assert self.beside is not None, "a pair has two towers"
        return self.beside

    @property
    def tower_tokens(self) -> int:
        return self.patches + self.class_token + self.registers

    def layer_macs_on(self, tokens: int) -> int:
        """A layer of the first tower, with its share of the second's."""
        other = self.second.used * self.second.layer_macs // self.used
        return VisionSize.layer_macs_on(self, tokens) + other

    @property
    def patch_macs(self) -> int:
        return self.patches * (self.hidden + self.second.hidden) * 3 * self.patch * self.patch

    def projector_shapes(self) -> Iterator[tuple[int, int]]:
        """The projector's matrices, [out, in]."""
        widths = self.features * self.hidden + self.second.hidden, *self.projected, self.out
        yield from ((out, into) for into, out in pairwise(widths))

    @property
    def projector_token_macs(self) -> int:
        return sum(out * into for out, into in self.projector_shapes())

    @property
    def parameters(self) -> int:
        towers = 0
        for size, scales, prefix in ((self, 2, 1 + self.registers), (self.second, 0, 0)):
            h = size.hidden
            layer = 4 * h * h + 2 * h * size.ffn + 4 * h + size.ffn + h + 4 * h + scales * h
            towers += size.used * layer + h * (3 * self.patch * self.patch + 1) + (self.patches + prefix) * h
        biases = sum(out for out, _ in self.projector_shapes()) if self.projector_bias else 0
        return towers + self.projector_token_macs + biases


@dataclass(frozen=True, slots=True)
class ConvolutionalSize(VisionSize):
    """A tower of convolutions in stages, which counts as one layer; the last `ATTENDING` stages have attention."""

    blocks: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def matrices(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Shapes of the matrices of attention, and their numbers."""
        for blocks, width in [*zip(self.blocks, self.widths, strict=True)][-ATTENDING:]:
            yield from (((3 * width, width), blocks), ((width, width), blocks))

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Weights of convolutions and matrices, the places that they are at, and other weights: biases and norms."""
        side = self.patch * math.isqrt(self.patches) // STEM
        first = self.widths[0]
        yield 27 * first, 4 * side**2, first
        yield 9 * first + first * first, side**2, 2 * first
        for stage, (blocks, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            places, attends = (side >> stage) ** 2, stage >= len(self.blocks) - ATTENDING
            if stage:
                yield (KERNEL + width) * width, places, 2 * width
            if attends:
                yield KERNEL * width, places, width
            mixer = 4 * width * width if attends else 9 * width
            weights = mixer + (KERNEL + 2 * WIDER * width) * width
            small = 4 * width + WIDER * width + 2 * width + (4 * width if attends else width)
            yield blocks * weights, places, blocks * small
        squeezed = self.hidden // SQUEEZED
        yield 9 * self.hidden, self.patches, self.hidden
        yield 2 * squeezed * self.hidden, 1, squeezed + self.hidden

    def layer_macs_on(self, tokens: int) -> int:
        """The whole tower for one view, attention products included."""
        products, stages = 0, len(self.blocks)
        for stage in range(stages - ATTENDING, stages):
            places = self.patches << 2 * (stages - 1 - stage)
            products += 2 * places**2 * self.widths[stage] * self.blocks[stage]
        return products + sum(weights * places for weights, places, _ in self._parts())

    @property
    def widest(self) -> int:
        side = self.patch * math.isqrt(self.patches) // STEM
        return side**2 * self.widths[0] * (2 + 2 * WIDER)

    @property
    def patch_macs(self) -> int:
        return 0

    @property
    def parameters(self) -> int:
        projector = self.projector_token_macs + self.projector_bias * self.projector_layers * self.out
        return sum(weights + small for weights, _, small in self._parts()) + projector


@dataclass(frozen=True, slots=True)
class ActionSize:
    """An expert beside the decoder, of as many layers: `rows` tokens, a state and actions, in each of `steps` passes.

    Its matrices before and after the layers are some thousandths of it and do not count. A prompt is planned with the
    pictures of `cameras` cameras.
    """

    hidden: int
    ffn: int
    heads: int
    rows: int
    steps: int
    cameras: int

    def beside(self, decoder: DecoderSize) -> DecoderSize:
        """Its layers as those of a decoder without a vocabulary."""
        own = replace(decoder, hidden=self.hidden, ffn=self.ffn, heads=self.heads, vocab=1, tied=True)
        return replace(own, qkv_bias=False, o_bias=False, mlp_bias=False)

    @classmethod
    def of(cls, spec: ActionSpec) -> ActionSize:
        """The expert of a bundle; `CAMERAS` cameras if it names none."""
        cameras = len(spec.cameras) or CAMERAS
        return cls(spec.hidden, spec.intermediate, spec.heads, spec.horizon + 1, spec.steps, cameras)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of one model; `vision` is None without a tower, `layout` for a model planned with a video.

    `action`: the expert of a model that answers with actions; `action_tokens`: the tokens of an action where each is a
    number of it, 0 for a model that answers in words. Of several data sets it is the longest action.
    """

    name: str
    source: str
    decoder: DecoderSize
    vision: VisionSize | None
    layout: Layout | None = None
    action: ActionSize | None = None
    action_tokens: int = 0

    def acting(self, spec: ActionSpec | None, bins: ActionBins | None) -> ModelSize:
        """The model with what its actions take."""
        expert = None if spec is None else ActionSize.of(spec)
        tokens = 0 if bins is None else max(len(each.low) for each in bins.ranges.values())
        return replace(self, action=expert, action_tokens=tokens)

    @property
    def parameters(self) -> int:
        expert = self.action.beside(self.decoder) if self.action else None
        others = expert.macs_of(expert.every) + expert.small_parameters if expert else 0
        return self.decoder.parameters + others + (0 if self.vision is None else self.vision.parameters)

    def views(self, vision_tokens: int) -> int:
        """Passes of the tower that `vision_tokens` in the prompt need, counted in whole images."""
        if self.vision is None:
            return 0
        return -(-vision_tokens // self.vision.image_tokens) * self.vision.views

    def picture(self, width: int, height: int) -> tuple[int, int]:
        """Tokens of an image of this size, and the passes of the tower that it takes."""
        if self.vision is None:
            return 0, 0
        if self.action is not None:
            return self.action.cameras * self.vision.image_tokens, self.action.cameras * self.vision.views
        if self.layout is None:
            return self.vision.image_tokens, self.vision.views
        return self.layout.count(width, height), self.layout.passes(width, height)

    def seeing(self, vision_tokens: int) -> ModelSize:
        return replace(self, vision=self.vision and self.vision.seeing(vision_tokens))

    def to_dict(self) -> dict[str, Any]:
        left_out = {"layout", *(name for name in ("action", "action_tokens") if not getattr(self, name))}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


def _known(
    name: str, decoder: Any, vision: Any, layout: Any, action: Any = None, action_tokens: int = 0, **_: Any
) -> ModelSize:
    read = Strict().read
    kept = layout and read(layouts()[layout["name"]], layout["parameters"], name)
    kinds: dict[str, type[VisionSize]] = {
        "window": NativeSize, "widths": ConvolutionalSize, "between": NaflexSize, "beside": PairedSize,
        "pool": PooledSize, "axis_positions": AxialSize,
    }  # fmt: skip
    kind = next((kind for field, kind in kinds.items() if field in vision), VisionSize)
    expert = action and read(ActionSize, action, name)
    tower: VisionSize = read(kind, vision, name)
    return ModelSize(name, "known", read(DecoderSize, decoder, name), tower, kept, expert, action_tokens)


_MODELS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
KNOWN: Mapping[str, ModelSize] = {name: _known(name, **data) for name, data in _MODELS.items()}


def bundle_size(bundle: Bundle) -> ModelSize:
    manifest = bundle.manifest
    size = spec_size(manifest.model, read_layout(manifest.layout, manifest.model.tower), "bundle")
    size = size.acting(manifest.action, manifest.bins)
    if size.vision is None or not manifest.dialects["ort"].vision_last_attention:
        return size
    return replace(size, vision=replace(size.vision, used=size.vision.layers))


def spec_size(m: ModelSpec, layout: Layout, source: str) -> ModelSize:
    """Sizes of a model; an image counts with its maximum of tokens and views."""
    names = [field.name for field in fields(DecoderSize)]
    values: dict[str, Any] = {name: getattr(m, name, True) for name in names if hasattr(m, name) or name in m.flags}
    sliding = m.sliding and SlidingLayers(m.sliding.layers, m.sliding.window, m.sliding.head_dim)
    decoder = DecoderSize(**values | {"ffn": m.intermediate, "sliding": sliding})
    tower = m.tower
    if tower.axis_positions is not None:
        axial = AxialSize(
            layers=tower.layers, used=tower.layers, hidden=tower.hidden, ffn=tower.intermediate,
            patches=tower.shuffle**2 * layout.max_tokens, patch=tower.patch, class_token=False, features=1,
            view_tokens=layout.max_tokens, image_tokens=layout.max_tokens, out=m.hidden, projector_bias=False,
            projector_layers=1, axis_positions=tower.axis_positions, square=tower.shuffle**2, heads=tower.heads,
            clipped="clipped" in tower.flags, standardised="standardised" in tower.flags,
        )  # fmt: skip
        return ModelSize(m.name, source, decoder, axial, layout)
    if "native" in tower.flags:
        native = NativeSize(
            layers=tower.layers, used=tower.layers, hidden=tower.hidden, ffn=tower.intermediate,
            patches=tower.shuffle**2 * layout.max_tokens, patch=tower.patch, class_token=False,
            features=tower.shuffle**2, view_tokens=layout.max_tokens, image_tokens=layout.max_tokens, out=m.hidden,
            gated="gated" in tower.flags, window=1 if tower.window is None else tower.window**2,
            whole=tower.layers if tower.window is None else max(1, len(tower.full_blocks)),
            maps=len(tower.maps), positions=(tower.position_grid or 0) ** 2,
        )  # fmt: skip
        return ModelSize(m.name, source, decoder, native, layout)
    kind: Callable[..., VisionSize] = VisionSize
    if tower.stage_blocks:
        kind = partial(ConvolutionalSize, blocks=tower.stage_blocks, widths=tower.stage_widths)
    if "naflex" in tower.flags:
        kind = partial(
            NaflexSize, between=m.projector.intermediate, positions=(tower.position_grid or 1) ** 2,
            projector_norm=m.projector.norm_eps is not None,
        )  # fmt: skip
    if tower.pool > 1:
        kind = partial(PooledSize, pool=tower.pool)
    if (second := tower.beside) is not None:
        beside = VisionSize(
            second.layers, second.used_layers, second.hidden, second.intermediate, second.grid**2, second.patch,
            second.class_token, 1, second.tokens, layout.max_tokens, m.hidden,
        )  # fmt: skip
        kind = partial(PairedSize, beside=beside, registers=tower.registers or 0, projected=m.projector.widths)
    vision = kind(
        layers=tower.layers, used=tower.used_layers, hidden=tower.hidden, ffn=tower.intermediate,
        patches=tower.grid**2, patch=tower.patch, class_token=tower.class_token,
        features=len(tower.feature_layers) * tower.shuffle**2, view_tokens=tower.tokens,
        image_tokens=layout.max_tokens, out=m.hidden, views=layout.max_views, projector_bias=m.projector.bias,
        projector_layers=m.projector.layers,
    )  # fmt: skip
    return ModelSize(m.name, source, decoder, vision, layout)
