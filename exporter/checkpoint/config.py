"""The configuration that graphs are built from, and the parts that families' configurations share, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vtx.exporter.checkpoint.fields import MAX_WIDTH, number, read_rope, size
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.runtime.bundle.spec.manifest import TokenInput
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS, MAX_TAPS, ByLayer, RopeSpec, SlidingSpec
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts.frames import Frames

MAX_POSITIONS = (1 << 24) - 1
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "lfm2")
# text models whose positions have three parts, qwen3 rotates by interleaved ones
THREE_PART = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
ATTENTION_KINDS = {"full_attention", "sliding_attention"}  # of a decoder's layers
STEM, ATTENDING, HEAD = 4, 2, 32  # of FastViTHD: the stride of its stem, its stages with attention, a head's width
GEMMA_NORMS = r"^text\.(.*norm)\.weight$"  # whose weights are differences from 1
VISION_FAMILIES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


@dataclass(frozen=True, slots=True)
class TextConfig(ByLayer):
    """A decoder of the llama family; `qk_norm`: an RMS norm over each head of queries and keys, unrotated.

    `v_norm`: one without weights over each head of values. `post_norms`: a norm follows attention and the MLP too,
    before their sum with the hidden states. `layer_scale`: a number by which a layer's hidden states are multiplied.
    `sliding` and `shared` as in `ByLayer`, and the numbers after them as in `ModelSpec`.
    `conv_layers`, counted from 1, have in place of attention a gated convolution of each channel over the last
    `conv_taps` tokens, with biases if `conv_bias`.

    `factors` are pairs of a pattern of weights' canonical names, and what these weights of a checkpoint are multiplied
    by wherever they are read, `shifts` the same of what is added to them then; a bundle holds the results.
    `scaled_embedding`: a text token's embedding is multiplied by sqrt(hidden) on its way into the decoder. `two_way`
    as in `ModelSpec`.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    rope: RopeSpec
    max_positions: int
    qk_norm: bool = False
    factors: tuple[tuple[str, float], ...] = ()
    shifts: tuple[tuple[str, float], ...] = ()
    scaled_embedding: bool = False
    two_way: str | None = None
    conv_layers: tuple[int, ...] = ()
    conv_taps: int = 1
    conv_bias: bool = False
    v_norm: bool = False
    post_norms: bool = False
    layer_scale: bool = False
    sliding: SlidingSpec | None = None
    shared: int | None = None
    shared_ffn: int | None = None
    per_layer: int | None = None
    padding_id: int | None = None
    attention_scale: float | None = None
    softcap: float | None = None

    @property
    def attending(self) -> int:
        """The number of layers with attention."""
        return self.layers - len(self.conv_layers)

    def scale(self, layer: int) -> float:
        """The factor of the products of a layer's attention."""
        return self.heads_of(layer) ** -0.5 if self.attention_scale is None else self.attention_scale

    def ffn_of(self, layer: int) -> int:
        """The width of a layer's MLP."""
        return self.ffn if self.shared_ffn is None or self.source(layer) == layer else self.shared_ffn


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A tower.

    `shuffle`: side, in patches, of a square whose states become one token; zeros pad the right and bottom borders.
    `shuffle_by_columns`: its patches in column order. `pool`: side, in patches, of a square that is averaged before the
    projector. `rms_norm`: norms without a mean and a bias; `qk_norm`: an RMS norm over all heads of the queries
    together, and of the keys. `position_grid`: side of the table of positions if it is resized to the patches.
    `post_norm`: a norm follows the last block.

    `native`: images keep their own resolution, positions are rotary, and the projector is the tower's merger; `image`
    is then the side of the largest square image. `gated`: a block's MLP has three matrices instead of two. `window`:
    side, in patches, of the windows that blocks attend within, except `full_blocks`, counted from 0. `maps`: blocks,
    counted from 0, of whose output a merger of its own makes a map; the first is added to the image's tokens after
    decoder layer 1, the second after layer 2, and so on (deepstack). `patch_bias`: patches have a bias.

    `naflex`: images keep their own resolution, and the table of positions is stretched to each image's patches,
    bilinear; `image` is then the side of a tile.

    `stage_blocks` and `stage_widths`: the numbers of blocks and of channels of the stages of a convolutional tower,
    which counts as one layer.

    `axis_positions`: a native tower without mergers, with a table of that many positions for rows and one for columns,
    whose tokens are means of squares of `shuffle` x `shuffle` patches. `clipped`: the inputs and outputs of its
    matrices are clipped to bounds among the weights; `standardised`: means have a bias and a scale.
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
    axis_positions: int | None = None
    clipped: bool = False
    standardised: bool = False

    @property
    def grid(self) -> int:
        return self.image // self.patch

    @property
    def states(self) -> int:
        """Hidden states of the tower's output: its patches, and for CLIP the class token before them."""
        return self.grid**2 + self.class_token

    @property
    def class_token(self) -> bool:
        """True if a class token comes before the patches."""
        return self.family in ("clip", "internvit")

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
    layout: Frames
    select: str
    pool: int = 1
    own_tower: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: decoder, tower, projector, and the layout of an image's views and tokens.

    `feature_layers` are indices into the tower's hidden states, 0 the embeddings. `projector_norm_eps` is the epsilon
    of a norm on the features, None without a norm; `projector_layers` is the number of the projector's matrices, and
    `projector_hidden` their width in between, if it is not the decoder's. `action`: the expert of a model that
    answers with actions.
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

    @property
    def projector_width(self) -> int:
        """Numbers between the projector's matrices."""
        if self.projector_hidden is not None:
            return self.projector_hidden
        return self.vision.hidden * self.vision.shuffle**2 if self.vision.native else self.text.hidden

    @property
    def view_tokens(self) -> int:
        """Tokens of one pass of the tower: one a square, or one a hidden state (`default` omits the first)."""
        vision = self.vision
        if vision.shuffle > 1:
            return (-(-vision.grid // vision.shuffle)) ** 2
        return (vision.states - (self.select == "default")) // vision.pool**2

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
    layers = part.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise CheckpointError(
            f"{file}: num_hidden_layers is {layers!r:.60}, not a number from 1 to {MAX_LAYERS}; correct config.json"
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


def parse_parts(kind: str, config: Mapping[str, Any], text: str, towers: tuple[str, ...]) -> Any:
    """`parse`, once the model_type of both parts is known to be supported: `text` and the first of `towers` by default.

    Raises UnsupportedModelError for another text model or tower; CheckpointError if it is not valid for that class.
    """
    for key, part, default, known in (
        ("text_config", "text model", text, TEXT_FAMILIES),
        ("vision_config", "vision tower", towers[0], towers),
    ):
        settings = config.get(key) or {}
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"config.json: a model part is a {type(settings).__name__}, not an object; download it again"
            )
        check_known(part, str(settings.get("model_type", default)), known)
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


def text_config_of(parsed: Any) -> TextConfig:
    config = parsed.text_config
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} heads are not a multiple of {kv_heads} key/value heads")
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or not 8 <= head_dim <= MAX_WIDTH or head_dim % 8:
        raise UnsupportedModelError(
            f"head_dim {head_dim!r:.60} is not supported: onnxruntime's GroupQueryAttention needs a multiple of 8"
        )
    family = THREE_PART.get(config.model_type, config.model_type)
    positions = size(config, "max_position_embeddings", MAX_POSITIONS)
    window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kinds = {"conv", "full_attention"} if family == "lfm2" else ATTENTION_KINDS
    if unknown := sorted({*map(str, layer_types or ())} - kinds):
        raise UnsupportedModelError(
            f"layers of the kind {unknown[0]!r:.40} are not supported; vtx exports {', '.join(sorted(kinds))}"
        )
    if isinstance(window, int) and window > 0 and (not layer_types or "sliding_attention" in layer_types):
        positions = min(positions, window)  # attention is full up to here
    layers, ffn = size(config, "num_hidden_layers", MAX_LAYERS), size(config, "intermediate_size")
    eps = number(vars(config), "norm_eps" if family == "lfm2" else "rms_norm_eps")
    factors, more = tuple[tuple[str, float], ...](), dict[str, Any]()
    if family == "granite":
        eps, factors = _granite(config, eps, head_dim)
    if family == "lfm2":
        ffn, more = _lfm2(config, layers, ffn)
    biases, gemma = family in ("llama", "granite", "gemma"), family == "gemma"
    return TextConfig(
        family=family, layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=size(config, "vocab_size", 1 << 22), eps=eps,
        activation="silu" if family == "lfm2" else str(config.hidden_act),
        qkv_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        o_bias=(biases or family == "qwen3") and bool(getattr(config, "attention_bias", False)),
        mlp_bias=biases and bool(getattr(config, "mlp_bias", False)), tied=bool(parsed.tie_word_embeddings),
        rope=read_rope(
            config, head_dim, three_part=config.model_type in THREE_PART, interleaved=family == "qwen3"
        ),
        max_positions=positions,
        qk_norm=family in ("qwen3", "lfm2"), factors=factors, shifts=((GEMMA_NORMS, 1.0),) if gemma else (),
        scaled_embedding=gemma, **more,
    )  # fmt: skip


def _lfm2(config: Any, layers: int, ffn: int) -> tuple[int, dict[str, Any]]:
    """The width of LFM2's MLP, and its convolutions."""
    if config.block_auto_adjust_ff_dim:
        ffn, multiple = int(2 * ffn / 3), size(config, "block_multiple_of")
        if config.block_ffn_dim_multiplier is not None:
            ffn = int(number(vars(config), "block_ffn_dim_multiplier") * ffn)
        ffn = -(-ffn // multiple) * multiple
        if not 1 <= ffn <= MAX_WIDTH:
            raise CheckpointError(
                f"config.json: block_ffn_dim_multiplier makes an MLP of width {ffn}, outside 1..{MAX_WIDTH}; correct "
                "config.json"
            )
    kinds, taps = config.layer_types, config.conv_L_cache
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers {layers}; correct config.json"
        )
    convolved = tuple(number for number, kind in enumerate(kinds, 1) if kind == "conv")
    if len(convolved) == layers:
        raise UnsupportedModelError("none of this model's layers has attention; vtx exports models with one at least")
    if convolved and (isinstance(taps, bool) or not isinstance(taps, int) or not 2 <= taps <= MAX_TAPS):
        raise UnsupportedModelError(
            f"conv_L_cache {taps!r:.40} is not supported; vtx exports convolutions over 2 to {MAX_TAPS} tokens"
        )
    return ffn, {"conv_layers": convolved, "conv_taps": taps if convolved else 1, "conv_bias": bool(config.conv_bias)}


def _granite(config: Any, eps: float, head_dim: int) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Granite's four multipliers as a norm's epsilon and factors of weights: what is left is a llama.

    Hidden states are those of Granite divided by the embedding's multiplier, which the norms take out again. Each
    addition to them is the product of two matrices, and each of the two takes half of its factor.
    """
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, residual, logits = (number(vars(config), name) for name in names)
    added = residual / embedding
    least, most = 1e-3, 1e3  # weights times these are still well within half precision
    scale, out = attention * head_dim**0.5, 1 / logits
    for name, factor in (("attention_multiplier", scale), ("residual_multiplier", added), ("logits_scaling", out)):
        if not least <= factor <= most:
            raise UnsupportedModelError(
                f"{name} {getattr(config, name):g} with embedding_multiplier {embedding:g} and heads of {head_dim} "
                f"multiplies weights by {factor:g}, and vtx by {least:g} to {most:g}; correct config.json"
            )
    return eps / embedding**2, (
        (r"^text\..*\.q_proj\.", scale), (r"^text\..*\.((v|up)_proj\.|(o|down)_proj\.weight$)", added**0.5),
        (r"^text\..*\.(o|down)_proj\.bias$", added), (r"^text\.norm\.", out),
    )  # fmt: skip


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
