"""InternVL in Hugging Face's layout: tiles, a tower with layer scales, and four patches a token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import (
    TEXT_FAMILIES,
    ModelConfig,
    VisionConfig,
    check_known,
    check_layers,
    feature_layers_of,
    image_token_of,
    model_type,
    parse,
    text_config_of,
    tower_of,
)
from vtx.exporter.checkpoint.family.declaration import Family
from vtx.exporter.checkpoint.family.processors import CLIP_DEFAULTS, ImageProcessor
from vtx.exporter.checkpoint.fields.numbers import size
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.tiles import Tiles

SHUFFLE = 2  # patches a side of a token's square, at the published downsample_ratio
NORM_EPS = 1e-5  # of the projector's norm: no setting
FEWEST, MOST = 1, 12  # tiles, where the image processor's file does not say
PLACEHOLDER = "<IMG_CONTEXT>"
PROCESSOR = ImageProcessor(
    "GotOcr2ImageProcessor",
    {**CLIP_DEFAULTS, "size": {"height": 384, "width": 384}, "do_center_crop": False},
    tiled=True,
)
_TOWER = r"^(?:model\.)?vision_tower\."
_LAYER = _TOWER + r"encoder\.layer\.(\d+)\."


def _read(config: Mapping[str, Any]) -> ModelConfig:
    text, vision = (config.get(key) or {} for key in ("text_config", "vision_config"))
    check_known("text model", model_type(text, "qwen2"), TEXT_FAMILIES)
    check_known("vision tower", model_type(vision, "internvl_vision"), ("internvl_vision",))
    for part in (text, vision):
        check_layers(part)
    parsed = parse("InternVLConfig", config)
    text_config, tower = text_config_of(parsed), _tower(parsed)
    return ModelConfig(
        text=text_config,
        vision=tower,
        feature_layers=feature_layers_of(parsed.vision_feature_layer, tower.layers),
        select="default",
        projector_activation=parsed.projector_hidden_act,
        projector_bias=True,
        image_token_id=image_token_of(parsed, text_config),
        layout=Tiles(tower.image, (tower.grid // SHUFFLE) ** 2, FEWEST, MOST),
        projector_norm_eps=NORM_EPS,
    )


def _tower(parsed: Any) -> VisionConfig:
    config = parsed.vision_config
    sides = {*config.image_size}, {*config.patch_size}
    wanted = {
        "downsample_ratio": (parsed.downsample_ratio, 1 / SHUFFLE),
        "vision_feature_select_strategy": (parsed.vision_feature_select_strategy, "default"),
        "norm_type": (config.norm_type, "layer_norm"),
        "use_qk_norm": (config.use_qk_norm, False),
        "use_mean_pooling": (config.use_mean_pooling, True),
        "use_absolute_position_embeddings": (config.use_absolute_position_embeddings, True),
        "num_channels": (config.num_channels, 3),
        "a side of image_size or patch_size": (max(map(len, sides)), 1),
    }
    for name, (value, known) in wanted.items():
        if value != known:
            raise UnsupportedModelError(f"{name} is {value!r:.40}, vtx exports InternVL models with {known!r} only")
    square = _Square(config)
    image, patch = size(square, "image_size", 1 << 14), size(square, "patch_size", 1 << 10)
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    if image < patch or image // patch % SHUFFLE or hidden % heads:
        raise CheckpointError(
            f"config.json: a tower of {image} pixels in patches of {patch}, {hidden} wide with {heads} heads, does not "
            f"give squares of {SHUFFLE} x {SHUFFLE} patches; correct config.json"
        )
    tower = tower_of(config, "internvit", image, patch)
    return replace(tower, qkv_bias=bool(config.attention_bias), layer_scale=True, shuffle=SHUFFLE)


class _Square:
    """The first side of each pair: both are equal."""

    def __init__(self, config: Any) -> None:
        self.image_size, self.patch_size = config.image_size[0], config.patch_size[0]


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """The number of tiles is the image processor's."""
    fewest, most = (processor.get(name, usual) for name, usual in (("min_patches", FEWEST), ("max_patches", MOST)))
    for name, value in (("min_patches", fewest), ("max_patches", most)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"the image processor's {name} is {value!r:.40}, not a whole number; correct it")
    assert isinstance(config.layout, Tiles)
    try:
        return replace(config, layout=replace(config.layout, fewest=fewest, most=most))
    except BundleError as e:
        raise CheckpointError(f"the image processor's min_patches and max_patches: {e}") from e


def _template(source: str) -> str:
    """Transformers' processor puts the tokens that begin and end an image around it; here the template prints them."""
    return re.sub(f"(?<!<img>){re.escape(PLACEHOLDER)}", f"<img>{PLACEHOLDER}</img>", source)


FAMILY = Family(
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    read=_read,
    processors=(PROCESSOR,),
    tensors=(
        (_TOWER + r"embeddings\.cls_token$", "vision.embeddings.class_embedding"),
        (_TOWER + r"embeddings\.position_embeddings$", "vision.embeddings.position_embedding.weight"),
        (_TOWER + r"embeddings\.patch_embeddings\.projection\.", "vision.embeddings.patch_embedding."),
        (_LAYER + r"attention\.projection_layer\.", r"vision.encoder.layers.\1.self_attn.out_proj."),
        (_LAYER + r"attention\.", r"vision.encoder.layers.\1.self_attn."),
        (_LAYER + r"layernorm_before\.", r"vision.encoder.layers.\1.layer_norm1."),
        (_LAYER + r"layernorm_after\.", r"vision.encoder.layers.\1.layer_norm2."),
        (_LAYER, r"vision.encoder.layers.\1."),
        (r"^(?:model\.)?multi_modal_projector\.layer_norm\.", "projector.norm."),
    ),
    adjust=_adjust,
    template=_template,
)
