"""Sizes of a model: what its cost depends on. Of a model known by name, of a bundle, or of a checkpoint's spec.

`models.json` holds the known models as their published configurations state them, each in the form of
`vtx-plan --model CHECKPOINT --json` (`model`), with the layout of its images; a model is added there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.strict import Strict, json_value, optional
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts import layouts, read_layout
from vtx.tools.estimate.vision import VisionSize
from vtx.tools.model.decoder import Decoder
from vtx.tools.model.tensors import Shapes, linear_tensors
from vtx.tools.model.vision import VisionModel

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle

KEYS_AND_VALUES = ("k_proj.weight", "v_proj.weight")
_TEXT_TOKEN = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\n+| ?\w+| ")
_SPAN = "\0"  # in place of image tokens
CAMERAS = 3  # of a robot, where a model does not name them: pi0 was trained with up to three


@dataclass(frozen=True, slots=True)
class ActionSize:
    """An expert beside the decoder, of as many layers: `rows` tokens, a state and actions, in each of `steps` passes.

    Its matrices before and after the layers are some thousandths of it and do not count. A prompt is planned with the
    pictures of `cameras` cameras. `adaptive` and `self_every` as in ActionSpec.
    """

    hidden: int
    ffn: int
    heads: int
    rows: int
    steps: int
    cameras: int
    adaptive: bool = optional(False)
    self_every: int = optional(1)

    def tensors(self, decoder: Decoder) -> Shapes:
        """Canonical names and shapes of the weights of all layers, and of the last norm."""
        expert = self.beside(decoder)
        read = (decoder.kv_heads * decoder.head_dim,) * 2  # a projection of the decoder's K or V
        for layer in expert.every:
            for name, shape in expert.layer_tensors(layer):
                crosses = name.endswith(KEYS_AND_VALUES) and (layer - 1) % self.self_every > 0
                yield from self._own(name.replace("text.", "head.", 1), read if crosses else shape)
        yield from self._own("head.norm.weight", (self.hidden,))

    def _own(self, name: str, shape: tuple[int, ...]) -> Shapes:
        """A weight, or what takes the place of a norm's if time enters by it."""
        if self.adaptive and name.endswith("norm.weight"):
            yield from linear_tensors(f"{name.removesuffix('.weight')}.dense", 3 * self.hidden, self.hidden)
        else:
            yield name, shape

    def beside(self, decoder: Decoder) -> Decoder:
        """Its layers as those of a decoder without a vocabulary."""
        shape = replace(decoder, hidden=self.hidden, ffn=self.ffn, heads=self.heads, vocab=1, tied=True)
        return replace(shape, qkv_bias=False, o_bias=False, mlp_bias=False)

    @classmethod
    def of(cls, spec: ActionSpec) -> ActionSize:
        """The expert of a bundle; `CAMERAS` cameras if it names none."""
        cameras = len(spec.cameras) or CAMERAS
        return cls(
            spec.hidden,
            spec.intermediate,
            spec.heads,
            spec.rows,
            spec.steps,
            cameras,
            spec.adaptive,
            spec.self_every,
        )


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
        tokens = 0 if bins is None else max(len(action_range.low) for action_range in bins.ranges.values())
        return replace(self, action=expert, action_tokens=tokens)

    def with_towers(self, count: int) -> ModelSize:
        """The model with `count` towers of one kind, each with weights of its own."""
        return self if self.vision is None else replace(self, vision=replace(self.vision, towers=count))

    @property
    def parameters(self) -> int:
        shapes = [shape for _, shape in self.action.tensors(self.decoder)] if self.action else []
        return self.decoder.parameters + sum(map(prod, shapes)) + (0 if self.vision is None else self.vision.parameters)

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

    def marks(self, width: int, height: int) -> int:
        """Text tokens among those of an image of this size: each mark or word is one, and so are line breaks."""
        if self.layout is None or self.action is not None:
            return 0
        return len(_TEXT_TOKEN.findall(self.layout.prompt_image(width, height).text(_SPAN)))

    def seeing(self, vision_tokens: int) -> ModelSize:
        return replace(self, vision=self.vision and self.vision.seeing(vision_tokens))

    def to_dict(self) -> dict[str, Any]:
        left_out = {"layout", "vision", *(name for name in ("action", "action_tokens") if not getattr(self, name))}
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}
        if self.action is not None:
            values["action"] = json_value(self.action)
        return values | {"vision": json_value(self.vision)}


def _known(
    name: str, decoder: Any, vision: Any, layout: Any, action: Any = None, action_tokens: int = 0, **_: Any
) -> ModelSize:
    reader = Strict().read
    layout_of = layout and reader(layouts()[layout["name"]], layout["parameters"], name)
    expert = action and reader(ActionSize, action, name)
    tower = reader(VisionSize, vision, name)
    return ModelSize(name, "known", reader(Decoder, decoder, name), tower, layout_of, expert, action_tokens)


_MODELS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
KNOWN: Mapping[str, ModelSize] = {name: _known(name, **data) for name, data in _MODELS.items()}


def bundle_size(bundle: Bundle) -> ModelSize:
    manifest = bundle.manifest
    layout = read_layout(manifest.layout, manifest.model.tower)
    decoder = decoder_of(text_values(manifest.model))
    vision = vision_size(vision_of(manifest.model), layout, decoder.hidden)
    if manifest.dialects["ort"].vision_last_attention:
        vision = replace(vision, last_attention=True)
    size = ModelSize(manifest.model.name, "bundle", decoder, vision, layout).acting(manifest.action, manifest.bins)
    if manifest.video is not None and manifest.video.own_graph and _has_tower_of_videos(bundle):
        return size.with_towers(2)
    return size


def _has_tower_of_videos(bundle: Bundle) -> bool:
    """True if frames have a tower with weights of its own, which the manifest does not tell."""
    stored = (name for name in bundle.manifest.files if name.startswith("weights/"))
    return any(tensor.startswith("video.") for name in stored for tensor in bundle.header(name).tensors)


def text_values(model: ModelSpec) -> dict[str, Any]:
    """A bundle's configuration of its decoder: the facts, and the rest."""
    return {k: v for k, v in json_value(model).items() if k not in ("name", "tower", "parts")} | model.parts.text


def vision_of(model: ModelSpec) -> VisionModel:
    """A bundle's tower and projector. Raises BundleError."""
    return Strict().read(VisionModel, model.parts.vision, "vtx.json: model.parts.vision")


def decoder_of(values: Mapping[str, Any]) -> Decoder:
    """The decoder of a configuration in the form of JSON, without what its size does not depend on."""
    names = {field.name for field in fields(Decoder)}
    sizes = {name: value for name, value in values.items() if name in names}
    if sizes.get("sliding") is not None:
        sizes["sliding"] = {name: value for name, value in sizes["sliding"].items() if name != "rope"}
    return Strict().read(Decoder, sizes, "vtx.json: model.parts.text")


def vision_size(model: VisionModel, layout: Layout, out: int) -> VisionSize:
    """The sizes of a tower before a decoder of `out` channels; an image counts with its most tokens and views."""
    tower = model.vision
    most = layout.max_tokens
    if tower.native:
        return VisionSize(model, out, tower.square**2 * most, view_tokens=most, image_tokens=most)
    return VisionSize(model, out, tower.grid**2, model.view_tokens, most, layout.max_views)
