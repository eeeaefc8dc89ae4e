"""Gemma 4 E2B and E4B: images within a budget of tokens, inputs to each layer, layers that share keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, check_values, image_token_of, parse_parts, part_of
from vtx.exporter.checkpoint.family import Family, ImageProcessor
from vtx.exporter.checkpoint.fields import check_patches, number, size
from vtx.exporter.checkpoint.text_config import (
    ATTENTION_KINDS,
    MAX_POSITIONS,
    TextConfig,
    head_size,
    windowed_config_of,
)
from vtx.runtime.bundle.spec.model_spec import MAX_LAYERS
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.budget import BUDGETS, TokenBudget
from vtx.tools.model.vision import VisionConfig

TOKENS = 280  # of an image by default
THETA = 100.0  # of the tower's rotation
PROCESSOR = ImageProcessor(
    "Gemma4ImageProcessor",
    {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": False,
        "resample": 3,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
    },
    own_size=True,
)
IMAGE, BEGIN, END = "<|image|>", "<|image>", "<image|>"  # the placeholder, and the tokens around an image
EXPERTS = "Gemma 4's mixture of experts (26B-A4B) is not supported; use Gemma 4 E2B or E4B"


def _read(config: Mapping[str, Any]) -> ModelConfig:
    text_part = part_of(config, "text_config")
    if text_part.get("enable_moe_block"):
        raise UnsupportedModelError(f"enable_moe_block: {EXPERTS}")
    check_values(
        text_part,
        "a Gemma 4",
        {
            "attention_k_eq_v": (None, False),
            "use_bidirectional_attention": (None,),
            "attention_bias": (None, False),
        },
    )
    parsed = parse_parts("Gemma4Config", config)
    text = _text(parsed)
    vision = _tower(parsed.vision_config)
    layout = _budget(vision, TOKENS)
    return ModelConfig(
        text=text,
        vision=replace(vision, image=layout.square),
        feature_layers=(vision.layers,),
        select="full",
        projector_activation="linear",
        projector_bias=False,
        projector_layers=1,
        image_token_id=image_token_of(parsed, text),
        layout=layout,
        projector_norm_eps=vision.eps,
    )


def sliding_layers(config: Any, layers: int) -> tuple[int, ...]:
    """The layers with a window of a parsed configuration, counted from 1. Raises CheckpointError."""
    kinds = list(config.layer_types)
    if len(kinds) != layers or not {*kinds} <= ATTENTION_KINDS:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers of {', '.join(sorted({*map(str, kinds)}))!s:.80}; it "
            f"needs {layers} of {' and '.join(sorted(ATTENTION_KINDS))}; correct config.json"
        )
    return tuple(n for n, kind in enumerate(kinds, 1) if kind == "sliding_attention")


def _widths(config: Any, sliding: tuple[int, ...]) -> dict[bool, int]:
    """The head size of layers that slide, and of those that do not. Raises UnsupportedModelError."""
    widths = dict[bool, int]()
    for layer in range(1, config.num_hidden_layers + 1):
        settings = config.per_layer_config[layer - 1]
        width = settings.head_dim
        heads = settings.num_key_value_heads
        if heads != config.num_key_value_heads or widths.setdefault(layer in sliding, width) != width:
            raise UnsupportedModelError(
                f"layer {layer} has {heads} key/value heads of {width!r:.20}; vtx exports models with one number "
                "of heads, and one size in all layers that slide and in all others"
            )
        head_size(settings)
    if False not in widths:
        raise UnsupportedModelError("all layers slide; vtx exports Gemma 4 models with a layer of full attention")
    return widths


def _first_sharing(config: Any, layers: int) -> int | None:
    """The first layer, from 1, that reads K and V of an earlier one; None if none does. Raises CheckpointError."""
    sharing = config.num_kv_shared_layers
    if isinstance(sharing, bool) or not isinstance(sharing, int) or not 0 <= sharing < layers:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {sharing!r:.40}, not a number from 0 to {layers - 1}; correct it"
        )
    kinds = list(config.layer_types)
    missing = sorted({*kinds} - {*kinds[: layers - sharing]})
    if missing:
        raise CheckpointError(
            f"config.json: the last {sharing} layers share keys and values, and none of the {layers - sharing} before "
            f"is a layer of {missing[0]}; correct num_kv_shared_layers"
        )
    return layers - sharing + 1 if sharing else None


def _text(parsed: Any) -> TextConfig:
    config = parsed.text_config
    layers = size(config, "num_hidden_layers", MAX_LAYERS)
    sliding = sliding_layers(config, layers)
    widths = _widths(config, sliding)
    shared = _first_sharing(config, layers)
    ffn = size(config, "intermediate_size")
    vocab = size(config, "vocab_size")
    per_layer = config.hidden_size_per_layer_input or None
    if per_layer is not None and config.vocab_size_per_layer_input != vocab:
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input is {config.vocab_size_per_layer_input!r:.40}, the vocabulary has {vocab} "
            "tokens; vtx exports models where they agree"
        )
    size(config, "sliding_window", MAX_POSITIONS)  # correct where no layer slides, too
    padding = config.pad_token_id
    if not isinstance(padding, int) or not 0 <= padding < vocab:
        raise CheckpointError(f"config.json: pad_token_id {padding!r:.40} is not a token id below {vocab}; correct it")
    cap = config.final_logit_softcapping
    return windowed_config_of(
        parsed,
        "gemma4",
        (widths[False], widths.get(True, widths[False])),
        sliding,
        vocab=vocab,
        eps=number(vars(config), "rms_norm_eps"),
        activation=str(config.hidden_activation),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        v_norm=True,
        post_norms=True,
        layer_scale=True,
        scaled_embedding=True,
        attention_scale=1.0,
        shared=shared,
        shared_ffn=2 * ffn if shared is not None and config.use_double_wide_mlp else None,
        per_layer=None if per_layer is None else size(config, "hidden_size_per_layer_input"),
        padding_id=padding if per_layer is not None else None,
        softcap=None if cap is None else number({"final_logit_softcapping": cap}, "final_logit_softcapping"),
    )


def _tower(config: Any) -> VisionConfig:
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    rope = dict(config.rope_parameters or {})
    found = {
        "num_key_value_heads": (config.num_key_value_heads, heads),
        "head_dim": (config.head_dim, hidden // heads),
        "attention_bias": (bool(config.attention_bias), False),
        "rope_theta": (rope.get("rope_theta", THETA), THETA),
    }
    for name, (value, built) in found.items():
        if value != built:
            raise UnsupportedModelError(
                f"{name} of the vision tower is {value!r:.40}, vtx exports towers of {hidden} with {heads} heads with "
                f"{built} only"
            )
    if hidden % heads or hidden // heads % 4:
        raise CheckpointError(
            f"config.json: a tower of hidden size {hidden} with {heads} heads has none of a multiple of 4; correct it"
        )
    return VisionConfig(
        family="gemma4",
        layers=size(config, "num_hidden_layers", MAX_LAYERS),
        hidden=hidden,
        ffn=size(config, "intermediate_size"),
        heads=heads,
        image=1 << 10,
        patch=size(config, "patch_size", 1 << 10),
        eps=number(vars(config), "rms_norm_eps"),
        activation=str(config.hidden_activation),
        native=True,
        shuffle=size(config, "pooling_kernel_size", 64),
        axis_positions=size(config, "position_embedding_size"),
        qkv_bias=False,
        clipped=bool(config.use_clipped_linears),
        standardised=bool(config.standardize),
    )


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's budget of tokens; its patches must be the tower's."""
    vision = config.vision
    check_patches(processor, {"patch_size": vision.patch, "pooling_kernel_size": vision.shuffle})
    try:
        layout = _budget(vision, processor.get("max_soft_tokens", TOKENS))
    except BundleError as e:
        raise CheckpointError(f"the image processor's max_soft_tokens: {e}") from e
    longest, positions = layout.tokens * vision.shuffle, vision.axis_positions or 0
    if longest > positions:
        raise CheckpointError(
            f"an image of {layout.tokens} tokens has up to {longest} patches a side, and the tower has {positions} "
            "positions; lower max_soft_tokens"
        )
    return replace(config, layout=layout, vision=replace(vision, image=layout.square))


def _budget(vision: VisionConfig, tokens: int) -> TokenBudget:
    """The layout with images of `tokens` tokens, or by request up to the largest budget with positions in the tower.

    Raises BundleError for a budget that the model was not trained for.
    """
    layout, positions = TokenBudget(vision.patch, vision.shuffle, tokens), vision.axis_positions or 0
    fitting = [budget for budget in BUDGETS if budget * vision.shuffle <= positions]
    return replace(layout, most=max([tokens, *fitting]))


def _template(template: str, _: ModelConfig) -> str:
    """The template with the tokens that transformers' processor puts around an image."""
    return template.replace(IMAGE, BEGIN + IMAGE + END)


FAMILY = Family(
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    read=_read,
    processors=(PROCESSOR,),
    tensors=(
        (r"^(?:model\.)?vision_tower\.patch_embedder\.input_proj\.", "vision.patch_embed."),
        (r"^(?:model\.)?vision_tower\.patch_embedder\.", "vision."),
        (r"^(?:model\.)?embed_vision\.embedding_projection\.", "projector.linear_1."),
        (r"^(?:model\.)?language_model\.per_layer_model_projection\.", "text.embed_projection."),
    ),
    adjust=_adjust,
    template=_template,
    boxes=BoxForm('"box_2d" : [ # , # , # , # ]', "inside", 1000, rows_first=True),
)
