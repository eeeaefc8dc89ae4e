"""InternVL in Hugging Face's layout: tiles, a tower with layer scales, and four patches a token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, feature_layers_of, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.text_config import TEXT_FAMILIES, text_config_of
from vtx.runtime.bundle.spec.text_settings import BoxForm
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.tiles import Tiles

SHUFFLE = 2  # side of a token's square in patches, at the published downsample_ratio
NORM_EPS = 1e-5  # of the projector's norm: no setting
FEWEST = 1  # tiles by default
MOST = 12
PLACEHOLDER = "<IMG_CONTEXT>"
_DEFAULTS = {**CLIP_DEFAULTS, "size": {"height": 384, "width": 384}, "do_center_crop": False}
_TOWER = r"^(?:model\.)?vision_tower\."
_LAYER = _TOWER + r"encoder\.layer\.(\d+)\."


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts("InternVLConfig", config, TEXT_FAMILIES)
    # Releases before 5 wrote nothing for the whole model, and went by its text model; the default since then ties.
    tied = config.get("tie_word_embeddings", parsed.text_config.tie_word_embeddings)
    text_config = replace(text_config_of(parsed), tied=bool(tied))
    vision = parsed.vision_config
    sides = {*vision.image_size}, {*vision.patch_size}
    wanted = {
        "downsample_ratio": (parsed.downsample_ratio, 1 / SHUFFLE),
        "vision_feature_select_strategy": (parsed.vision_feature_select_strategy, "default"),
        "norm_type": (vision.norm_type, "layer_norm"),
        "use_qk_norm": (vision.use_qk_norm, False),
        "use_mean_pooling": (vision.use_mean_pooling, True),
        "use_absolute_position_embeddings": (vision.use_absolute_position_embeddings, True),
        "num_channels": (vision.num_channels, 3),
        "the number of different sides of image_size or patch_size": (max(map(len, sides)), 1),
    }
    for name, (value, known) in wanted.items():
        if value != known:
            raise UnsupportedModelError(f"{name} is {value!r:.40}, vtx exports InternVL models with {known!r} only")
    first = SimpleNamespace(image_size=vision.image_size[0], patch_size=vision.patch_size[0])
    tower = replace(
        tower_of(vision, "internvit", SHUFFLE, first),
        qkv_bias=bool(vision.attention_bias),
        layer_scale=True,
        shuffle=SHUFFLE,
    )
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


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the number of tiles of the image processor."""
    fewest, most = (processor.get(name, usual) for name, usual in (("min_patches", FEWEST), ("max_patches", MOST)))
    for name, value in (("min_patches", fewest), ("max_patches", most)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"the image processor's {name} is {value!r:.40}, not a whole number; correct it")
    assert isinstance(config.layout, Tiles)
    try:
        return replace(config, layout=replace(config.layout, fewest=fewest, most=most))
    except BundleError as e:
        raise CheckpointError(f"the image processor's min_patches and max_patches: {e}") from e


def _template(source: str, _: ModelConfig) -> str:
    """The template with the tokens that begin and end an image, which transformers' processor adds by itself."""
    return re.sub(f"(?<!<img>){re.escape(PLACEHOLDER)}", f"<img>{PLACEHOLDER}</img>", source)


FAMILY = Family(
    model_type="internvl",
    architecture="InternVLForConditionalGeneration",
    read=_read,
    processors=(ImageProcessor("GotOcr2ImageProcessor", _DEFAULTS, tiled=True),),
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
    boxes=BoxForm("[ # , # , # , # ]", "before", 1000, rows_first=False),
)
