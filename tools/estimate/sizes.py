"""Sizes of a model: what its cost depends on. Of a model known by name, of a bundle, or of a checkpoint's spec.

`models.json` holds the known models as their published configurations state them, each in the form of
`vtx-plan --model CHECKPOINT --json` (`model`), with the layout of its images; a model is added there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec, SlidingLayers, TowerSpec
from vtx.runtime.strict import Strict
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
from vtx.tools.model.decoder import Decoder

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle

CAMERAS = 3  # of a robot, where a model does not name them: pi0 was trained with up to three


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

    def beside(self, decoder: Decoder) -> Decoder:
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
    decoder: Decoder
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
    return ModelSize(name, "known", read(Decoder, decoder, name), tower, kept, expert, action_tokens)


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
    names = [field.name for field in fields(Decoder)]
    values: dict[str, Any] = {name: getattr(m, name, True) for name in names if hasattr(m, name) or name in m.flags}
    sliding = m.sliding and SlidingLayers(m.sliding.layers, m.sliding.window, m.sliding.head_dim)
    decoder = Decoder(**values | {"ffn": m.intermediate, "sliding": sliding})
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
