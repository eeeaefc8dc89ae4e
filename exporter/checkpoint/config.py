"""The configuration that graphs are built from, and the parts that families' configurations share, read strictly.

The decoder's part is in `text_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionSpec
from vtx.runtime.bundle.spec.manifest import TokenInput
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layout import Layout
from vtx.tools.model.vision import VisionConfig, VisionModel

if TYPE_CHECKING:
    from vtx.runtime.vision.layout import VideoLayout

VISION_FAMILIES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Videos as tokens: `token_id` is a video's placeholder in a prompt.

    `own_tower`: frames have a separate tower, with weights named `video.`; `select` and `pool` are as for images. All
    else is shared with images.
    """

    token_id: int
    layout: VideoLayout
    select: str
    pool: int = 1
    own_tower: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(VisionModel):
    """One model: decoder, tower, projector, and the layout of an image's views and tokens.

    `action`: the expert of a model that outputs actions; `bins`: its tokens are actions.
    """

    text: TextConfig
    image_token_id: int
    layout: Layout
    video: VideoConfig | None = None
    action: ActionSpec | None = None
    bins: ActionBins | None = None

    @property
    def token_inputs(self) -> dict[int, TokenInput]:
        """The inputs of decoder layers, by their number from 1, for each token in addition to its hidden state.

        Of a model with inputs to each layer these; else the tower's maps, which are added to image tokens after layers.
        """
        if self.text.per_layer is not None:
            every = range(1, self.text.layers + 1)
            width = self.text.per_layer
            return {layer: TokenInput(f"layer{layer}", width, of_text=True, of_images=True) for layer in every}
        layers = range(1, len(self.vision.maps) + 1)
        width = self.text.hidden
        return {layer: TokenInput(f"map{layer}", width, of_text=False, of_images=True) for layer in layers}

    @property
    def frames(self) -> ModelConfig | None:
        """The configuration of the vision graph of a video's frames; None if it is the graph of images."""
        video = self.video
        if video is None or (video.select, video.pool, video.own_tower) == (self.select, self.vision.pool, False):
            return None
        return replace(self, select=video.select, vision=replace(self.vision, pool=video.pool), video=None)


def check_known(part: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UnsupportedModelError(f"the {part} {name!r} is not supported; vtx exports {', '.join(known)}")


def check_values(config: Mapping[str, Any], model: str, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError if a setting of a `model` has a value that is not `known`."""
    for name, values in known.items():
        if config.get(name) not in values:
            listed = ", ".join(str(value) for value in values if value is not None)
            raise UnsupportedModelError(
                f"{name} {config.get(name)!r:.40} is not supported in {model} model; vtx supports {listed}"
            )


def check_layers(part: Mapping[str, Any], file: str = "config.json") -> None:
    """Refuse absurd counts before transformers makes lists of that length."""
    for name in ("num_hidden_layers", "depth"):  # the second of Qwen's towers
        layers = part.get(name)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise CheckpointError(
                f"{file}: {name} is {layers!r:.60}, not a number from 1 to {MAX_LAYERS}; correct config.json"
            )


def part_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json: {name} is {part!r:.40}, not the settings of a part; download it again")
    return part


def parse(kind: str, config: Mapping[str, Any], name: str = "config.json") -> Any:
    """The contents of the file `name` as transformers' configuration class `kind`, with its defaults."""
    import transformers

    def without_labels(part: Any) -> Any:  # unused here, and transformers makes a table of `num_labels` entries
        return {k: v for k, v in part.items() if k != "num_labels"} if isinstance(part, Mapping) else part

    try:
        settings = without_labels({key: without_labels(part) for key, part in config.items()})
        return getattr(transformers, kind).from_dict(settings)
    except Exception as e:
        reason = " ".join(str(e).split())[:300]
        raise CheckpointError(f"{name} is not a {kind} ({reason}); download it again") from e


def parse_parts(kind: str, config: Mapping[str, Any], texts: tuple[str, ...] = (), towers: tuple[str, ...] = ()) -> Any:
    """`parse`, once the model_type of both parts is known to be supported: one of `texts` and of `towers`.

    Without those transformers' class ignores the part's model_type, of which releases wrote several, and so does vtx.
    Raises UnsupportedModelError for another text model or tower; CheckpointError if it is not valid for that class.
    """
    for key, part, kinds in (("text_config", "text model", texts), ("vision_config", "vision tower", towers)):
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"config.json: {key} is a {type(settings).__name__}, not an object; download it again"
            )
        if kinds and "model_type" in settings:
            check_known(part, str(settings["model_type"]), kinds)
        check_layers(settings)
    return parse(kind, config)


def image_token_of(parsed: Any, text: TextConfig, kind: str = "image") -> int:
    """The id of the placeholder token of an image, or of another `kind`, which must be in the decoder's vocabulary."""
    token = getattr(parsed, f"{kind}_token_id")
    if not isinstance(token, int) or not 0 <= token < text.vocab:
        raise CheckpointError(
            f"{kind}_token_index {token!r:.60} is not a token id below the vocabulary's {text.vocab}; "
            "correct config.json"
        )
    return token


def tower_of(config: Any, family: str, square: int = 1, sides: Any = None) -> VisionConfig:
    """The sizes that all towers name alike; `square` divides the grid's side, `sides` has image_size and patch_size."""
    image, patch = (
        size(sides or config, f"{part}_size", most) for part, most in (("image", 1 << 14), ("patch", 1 << 10))
    )
    heads = size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    if image < patch:
        raise CheckpointError(f"config.json: image_size {image} is smaller than patch_size {patch}")
    if hidden % heads:
        raise CheckpointError(f"config.json: the tower's hidden_size {hidden} is not a multiple of its {heads} heads")
    if image // patch % square:
        raise CheckpointError(
            f"config.json: a grid of {image // patch} x {image // patch} patches does not divide into squares of "
            f"{square} x {square}; correct config.json"
        )
    if getattr(config, "num_channels", 3) != 3:
        raise UnsupportedModelError(f"a tower of {config.num_channels} channels is not supported; vtx feeds RGB")
    return VisionConfig(
        family=family,
        layers=size(config, "num_hidden_layers", MAX_LAYERS),
        hidden=hidden,
        ffn=size(config, "intermediate_size"),
        heads=heads,
        image=image,
        patch=patch,
        eps=number(vars(config), "layer_norm_eps"),
        activation=str(config.hidden_act),
    )


def feature_layers_of(value: Any, layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, a number or a list, as indices from 0 (the embeddings) to `layers`."""
    numbers = value if isinstance(value, list | tuple) else [value]
    states = layers + 1
    for layer in numbers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -states <= layer < states:
            raise CheckpointError(
                f"config.json: vision_feature_layer {layer!r:.60} is outside the tower's {states} hidden states, "
                f"{-states} to {states - 1}; correct config.json"
            )
    if not numbers:
        raise CheckpointError("config.json: vision_feature_layer is an empty list; name a layer of the tower")
    return tuple(layer % states for layer in numbers)
