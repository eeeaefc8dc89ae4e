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
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS, MERGED, NECK_SQUARE
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layout import Layout

if TYPE_CHECKING:
    from vtx.runtime.vision.layout import VideoLayout

STEM, ATTENDING, HEAD = 4, 2, 32  # of FastViTHD: the stride of its stem, its stages with attention, a head's width
VISION_FAMILIES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A tower.

    `shuffle`: side, in patches, of a square whose states become one token; zeros pad the right and bottom borders.
    `shuffle_by_columns`: its patches in column order. `pool`: side, in patches, of a square that is averaged before the
    projector. `rms_norm`: norms without a mean and a bias; `qk_norm`: an RMS norm over all heads of the queries
    together, and of the keys. `position_grid`: side of the table of positions if it is resized to the patches.
    `post_norm`: a norm follows the last block.

    `native`: images keep native resolution, positions are rotary, and the projector is the tower's merger; `image`
    is then the side of the largest square image. `gated`: a block's MLP has three matrices instead of two. `window`:
    side, in patches, of the windows that blocks attend within, except `full_blocks`, counted from 0. `maps`: blocks,
    counted from 0, of whose output a merger of its own makes a map; the first is added to the image's tokens after
    decoder layer 1, the second after layer 2, and so on (deepstack). `patch_bias`: patches have a bias.

    `naflex`: images keep native resolution, and the table of positions is stretched to each image's patches,
    bilinear, or with `nearest` each patch has the entry at its place; `image` is then the side of a tile.
    `merged_after`: after that many blocks squares of `MERGED` x `MERGED` patches attend within themselves and become
    one.

    `stage_blocks` and `stage_widths`: the numbers of blocks and of channels of the stages of a convolutional tower,
    which counts as one layer.

    `axis_positions`: a native tower without mergers, with a table of that many positions for rows and one for columns,
    whose tokens are means of squares of `shuffle` x `shuffle` patches. `clipped`: the inputs and outputs of its
    matrices are clipped to bounds among the weights; `standardised`: means have a bias and a scale.

    `registers`: tokens between the class token and the patches, without positions; the class token then has none
    either. `beside`: a second tower over the same patches, whose features follow those of this one; it has the pixel
    values of this one times its `pixel_scale` plus its `pixel_shift`, by channel.

    `towers`: those whose features, stretched to one grid, are joined to this tower's states; it counts as one layer and
    has no weights of its own. `neck`: channels after a tower's blocks, of which squares of 2 x 2 become one state.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    image: int
    patch: int
    eps: float
    activation: str
    qkv_bias: bool = True
    layer_scale: bool = False
    shuffle: int = 1
    pool: int = 1
    shuffle_by_columns: bool = False
    rms_norm: bool = False
    qk_norm: bool = False
    position_grid: int | None = None
    native: bool = False
    gated: bool = False
    window: int | None = None
    full_blocks: tuple[int, ...] = ()
    maps: tuple[int, ...] = ()
    patch_bias: bool = False
    post_norm: bool = False
    stage_blocks: tuple[int, ...] = ()
    stage_widths: tuple[int, ...] = ()
    naflex: bool = False
    nearest: bool = False
    merged_after: int | None = None
    axis_positions: int | None = None
    clipped: bool = False
    standardised: bool = False
    registers: int | None = None
    beside: VisionConfig | None = None
    pixel_scale: tuple[float, ...] = ()
    pixel_shift: tuple[float, ...] = ()
    towers: tuple[VisionConfig, ...] = ()
    neck: int | None = None

    @property
    def width(self) -> int:
        """Channels of its features as they leave it."""
        return self.hidden if self.neck is None else NECK_SQUARE**2 * self.neck

    @property
    def grid(self) -> int:
        return self.image // self.patch

    @property
    def square(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        return self.shuffle * (1 if self.merged_after is None else MERGED)

    @property
    def states(self) -> int:
        """Hidden states of the tower's output: its patches, and before them class token and registers."""
        return self.grid**2 + self.class_token + (self.registers or 0)

    @property
    def class_token(self) -> bool:
        """True if a class token comes before the patches."""
        return self.family in ("clip", "internvit", "dinov2")

    @property
    def pre_norm(self) -> bool:
        """True if a norm comes before the first block; the patches then have no bias."""
        return self.family == "clip"

    @property
    def batch_axis(self) -> bool:
        """True if the tables of positions and of the class token have an axis for images."""
        return self.family == "internvit"


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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: decoder, tower, projector, and the layout of an image's views and tokens.

    `feature_layers` are indices into the tower's hidden states, 0 the embeddings. `projector_norm_eps` is the epsilon
    of a norm on the features, None without a norm, `projector_rms`: it has no mean and no bias; `projector_layers` is
    the number of the projector's matrices, and
    `projector_hidden` their width in between, if it is not the decoder's; `projector_widths` the widths between each
    two of them, if they differ. `action`: the expert of a model that outputs actions; `bins`: its tokens are
    actions.
    """

    text: TextConfig
    vision: VisionConfig
    feature_layers: tuple[int, ...]
    select: str
    projector_activation: str
    projector_bias: bool
    image_token_id: int
    layout: Layout
    projector_norm_eps: float | None = None
    projector_layers: int = 2
    projector_hidden: int | None = None
    video: VideoConfig | None = None
    action: ActionSpec | None = None
    projector_widths: tuple[int, ...] = ()
    projector_rms: bool = False
    bins: ActionBins | None = None

    @property
    def projector_width(self) -> int:
        """Numbers between the projector's matrices, the first two if the widths differ."""
        if self.projector_widths:
            return self.projector_widths[0]
        if self.projector_hidden is not None:
            return self.projector_hidden
        return self.vision.hidden * self.vision.shuffle**2 if self.vision.native else self.text.hidden

    @property
    def view_tokens(self) -> int:
        """Tokens of one pass of the tower: one a square, or one a hidden state that is not left out."""
        vision = self.vision
        if vision.square > 1:
            return (-(-vision.grid // vision.square)) ** 2
        return (vision.states - self.left_out) // vision.pool**2

    @property
    def left_out(self) -> int:
        """Hidden states of the tower that no token is made of: with `default` the first one, and registers."""
        return 1 + (self.vision.registers or 0) if self.select == "default" else 0

    @property
    def token_inputs(self) -> dict[int, TokenInput]:
        """The inputs of decoder layers, by their number from 1, for each token in addition to its hidden state.

        Of a model with inputs to each layer these; else the tower's maps, which are added to image tokens after layers.
        """
        if self.text.per_layer is not None:
            every, width = range(1, self.text.layers + 1), self.text.per_layer
            return {layer: TokenInput(f"layer{layer}", width, of_text=True, of_images=True) for layer in every}
        layers, width = range(1, len(self.vision.maps) + 1), self.text.hidden
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
        given = without_labels({key: without_labels(part) for key, part in config.items()})
        return getattr(transformers, kind).from_dict(given)
    except Exception as e:
        reason = " ".join(str(e).split())[:300]
        raise CheckpointError(f"{name} is not a {kind} ({reason}); download it again") from e


def parse_parts(kind: str, config: Mapping[str, Any], texts: tuple[str, ...] = (), towers: tuple[str, ...] = ()) -> Any:
    """`parse`, once the model_type of both parts is known to be supported: one of `texts` and of `towers`.

    Without those transformers' class ignores the part's model_type, of which releases wrote several, and so does vtx.
    Raises UnsupportedModelError for another text model or tower; CheckpointError if it is not valid for that class.
    """
    for key, part, known in (("text_config", "text model", texts), ("vision_config", "vision tower", towers)):
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"config.json: {key} is a {type(settings).__name__}, not an object; download it again"
            )
        if known and "model_type" in settings:
            check_known(part, str(settings["model_type"]), known)
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
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
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
        family=family, layers=size(config, "num_hidden_layers", MAX_LAYERS), hidden=hidden,
        ffn=size(config, "intermediate_size"), heads=heads, image=image, patch=patch,
        eps=number(vars(config), "layer_norm_eps"), activation=str(config.hidden_act),
    )  # fmt: skip


def feature_layers_of(value: Any, layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, a number or a list, as indices from 0 (the embeddings) to `layers`."""
    chosen = value if isinstance(value, list | tuple) else [value]
    states = layers + 1
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -states <= layer < states:
            raise CheckpointError(
                f"config.json: vision_feature_layer {layer!r:.60} is outside the tower's {states} hidden states, "
                f"{-states} to {states - 1}; correct config.json"
            )
    if not chosen:
        raise CheckpointError("config.json: vision_feature_layer is an empty list; name a layer of the tower")
    return tuple(layer % states for layer in chosen)
