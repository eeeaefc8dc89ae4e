"""Sizes of a model: what its cost depends on. Of a model known by name, of a bundle, or of a checkpoint's spec.

`models.json` holds the known models as their published configurations state them, each in the form of
`vtx-plan --model CHECKPOINT --json` (`model`), with the layout of its images; a model is added there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.model_spec import ByLayer, DeltaSpec, ModelSpec, SlidingLayers, TowerSpec
from vtx.runtime.strict import Strict, optional
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts import layouts, read_layout
from vtx.tools.estimate.towers import (
    AxialSize,
    ConvolutionalSize,
    JoinedSize,
    NaflexSize,
    NativeSize,
    PairedSize,
    PooledSize,
    TowerPart,
    VisionSize,
)

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle

CAMERAS = 3  # of a robot, where a model does not name them: pi0 was trained with up to three


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

    `action`: the expert of a model that outputs actions; `action_tokens`: the tokens of an action where each is a
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

    def with_towers(self, count: int) -> ModelSize:
        """The model with `count` towers of one kind, each with weights of its own."""
        return self if self.vision is None else replace(self, vision=replace(self.vision, towers=count))

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
        "pool": PooledSize, "axis_positions": AxialSize, "parts": JoinedSize,
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
    if manifest.video is not None and manifest.video.own_graph and _has_tower_of_videos(bundle):
        size = size.with_towers(2)
    if size.vision is None or not manifest.dialects["ort"].vision_last_attention:
        return size
    return replace(size, vision=replace(size.vision, used=size.vision.layers))


def _has_tower_of_videos(bundle: Bundle) -> bool:
    """True if frames have a tower with weights of its own, which the manifest does not tell."""
    stored = (name for name in bundle.manifest.files if name.startswith("weights/"))
    return any(tensor.startswith("video.") for name in stored for tensor in bundle.header(name).tensors)


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
            projector_norm=m.projector.norm_eps is not None, merged_after=tower.merged_after,
        )  # fmt: skip
    if tower.pool > 1:
        kind = partial(PooledSize, pool=tower.pool)
    if (second := tower.beside) is not None:
        beside = VisionSize(
            second.layers, second.used_layers, second.hidden, second.intermediate, second.grid**2, second.patch,
            second.class_token, 1, second.tokens, layout.max_tokens, m.hidden,
        )  # fmt: skip
        kind = partial(PairedSize, beside=beside, registers=tower.registers or 0, projected=m.projector.widths)
    if tower.towers:
        kind = partial(JoinedSize, parts=tuple(map(_part, tower.towers)))
    vision = kind(
        layers=tower.layers, used=tower.used_layers, hidden=tower.hidden, ffn=tower.intermediate,
        patches=tower.grid**2, patch=tower.patch, class_token=tower.class_token,
        features=len(tower.feature_layers) * tower.shuffle**2, view_tokens=tower.tokens,
        image_tokens=layout.max_tokens, out=m.hidden, views=layout.max_views, projector_bias=m.projector.bias,
        projector_layers=m.projector.layers,
    )  # fmt: skip
    return ModelSize(m.name, source, decoder, vision, layout)


def _part(tower: TowerSpec) -> TowerPart:
    """A tower whose features are joined to others'; positions are those of its tables, with a class token's."""
    positions = (tower.position_grid or tower.grid) ** 2 + (tower.family in ("clip", "eva02"))
    if tower.axis_positions is not None:
        positions = 2 * tower.axis_positions
    if tower.stage_blocks:
        positions = 0
    whole = tower.layers if tower.window is None else len(tower.full_blocks)
    return TowerPart(
        tower.family, tower.layers, tower.hidden, tower.intermediate, tower.heads, tower.grid**2, tower.patch, whole,
        window=None if tower.window is None else tower.window**2, blocks=tower.stage_blocks, widths=tower.stage_widths,
        positions=positions, neck=tower.neck,
    )  # fmt: skip
