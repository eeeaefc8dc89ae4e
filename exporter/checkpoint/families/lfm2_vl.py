"""LFM2-VL: a decoder most of whose layers are short convolutions, and SigLIP 2's tower at native resolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import check_patches, number, size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.native_tiles import NativeTiles
from vtx.tools.model.vision import VisionConfig

TILE = 512
NORM_EPS = 1e-5  # of the projector's norm: no setting
KEYS = ("min_image_tokens", "max_image_tokens", "tile_size", "min_tiles", "max_tiles")
DEFAULTS = (64, 256, TILE, 2, 10)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts("Lfm2VlConfig", config, ("lfm2",), ("siglip2_vision_model",))
    text = text_config_of(parsed)
    part = parsed.vision_config
    side = size(parsed, "downsample_factor", 64)
    positions = size(part, "num_patches")
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"config.json: num_patches {positions} is not a square; correct config.json")
    sides = SimpleNamespace(image_size=TILE, patch_size=part.patch_size)
    tower = replace(
        tower_of(part, "siglip", sides=sides),
        shuffle=side,
        position_grid=math.isqrt(positions),
        post_norm=True,
        naflex=True,
    )
    return ModelConfig(
        text=text,
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation=parsed.projector_hidden_act,
        projector_bias=bool(parsed.projector_bias),
        image_token_id=image_token_of(parsed, text),
        layout=_layout(tower, DEFAULTS, 2.0, True),
        projector_norm_eps=NORM_EPS if parsed.projector_use_layernorm else None,
        projector_hidden=size(parsed, "projector_hidden_size"),
    )


def _layout(tower: VisionConfig, sizes: Sequence[int], tolerance: float, thumbnail: object) -> NativeTiles:
    """The layout of images; `sizes` are those of `KEYS`."""
    fewest, most, tile, *tiles = sizes
    area = (tower.patch * tower.shuffle) ** 2
    return NativeTiles(
        tower.patch, tower.shuffle, fewest * area, most * area, tile, tiles[0], tiles[1], tolerance, bool(thumbnail)
    )


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's tiles and limits of tokens; its patches must be the tower's."""
    vision = config.vision
    check_patches(processor, {"encoder_patch_size": vision.patch, "downsample_factor": vision.shuffle})
    numbers = dict(zip(KEYS, DEFAULTS, strict=True))
    numbers |= {name: processor[name] for name in KEYS if name in processor}
    sizes = [size(SimpleNamespace(**numbers), name, 1 << 14, "the image processor") for name in KEYS]
    flags = [processor.get(name, True) for name in ("do_image_splitting", "use_thumbnail")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise CheckpointError("the image processor's do_image_splitting and use_thumbnail must be true or false")
    if not flags[0]:
        sizes[3:] = 1, 1
    elif sizes[3] < 2:
        raise UnsupportedModelError("the image processor's min_tiles is 1; vtx cuts images in 2 tiles or more, or none")
    tolerance = number(processor, "max_pixels_tolerance", 2.0, "the image processor")
    try:
        layout = _layout(vision, sizes, tolerance, flags[1])
    except BundleError as e:
        raise CheckpointError(f"the image processor's tiles and tokens: {e}") from e
    return replace(config, layout=layout, vision=replace(vision, image=layout.tile))


FAMILY = Family(
    model_type="lfm2_vl",
    architecture="Lfm2VlForConditionalGeneration",
    read=_read,
    processors=(
        ImageProcessor("Lfm2VlImageProcessor", {**SIGLIP_DEFAULTS, "resample": 2, "do_pad": True}, own_size=True),
    ),
    tensors=(
        (r"^model\.language_model\.embedding_norm\.", "text.norm."),
        (r"^model\.language_model\.(layers\.\d+)\.operator_norm\.", r"text.\1.input_layernorm."),
        (r"^model\.language_model\.(layers\.\d+)\.ffn_norm\.", r"text.\1.post_attention_layernorm."),
        (r"^model\.language_model\.(layers\.\d+)\.feed_forward\.w1\.", r"text.\1.mlp.gate_proj."),
        (r"^model\.language_model\.(layers\.\d+)\.feed_forward\.w2\.", r"text.\1.mlp.down_proj."),
        (r"^model\.language_model\.(layers\.\d+)\.feed_forward\.w3\.", r"text.\1.mlp.up_proj."),
        (r"^model\.language_model\.(layers\.\d+\.self_attn)\.out_proj\.", r"text.\1.o_proj."),
        (r"^model\.language_model\.(layers\.\d+\.self_attn)\.([qk])_layernorm\.", r"text.\1.\2_norm."),
        (r"^model\.multi_modal_projector\.layer_norm\.", "projector.norm."),
    ),
    adjust=_adjust,
)
