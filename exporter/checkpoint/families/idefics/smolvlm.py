"""SmolVLM and SmolVLM2: tiles with text that says where each stands, a SigLIP tower, several patches a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vtx.exporter.checkpoint.config import (
    TEXT_FAMILIES,
    ModelConfig,
    VisionConfig,
    check_known,
    check_layers,
    image_token_of,
    model_type,
    parse,
    text_config_of,
    tower_of,
)
from vtx.exporter.checkpoint.family.declaration import Family
from vtx.exporter.checkpoint.family.processors import SIGLIP_DEFAULTS, ImageProcessor
from vtx.exporter.checkpoint.fields.numbers import size
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.marked import MAX_SIDE, MarkedTiles

SIDE = 4  # tiles along the longer side, where the image processor's file does not say
_LONGEST = "longest_edge"
# Transformers finds a patch's position by comparing fractions of the side. In powers of two and the published grids of
# 26 and 27 that gives the patch its own, in others rounding gives some patches their neighbour's.
_UNROUNDED = (26, 27, *(1 << power for power in range(11)))


def _read(name: str, config: Mapping[str, Any]) -> ModelConfig:
    text, vision = (config.get(key) or {} for key in ("text_config", "vision_config"))
    tower_name = f"{name.lower()}_vision"
    check_known("text model", model_type(text, "llama"), TEXT_FAMILIES)
    check_known("vision tower", model_type(vision, tower_name), (tower_name,))
    for part in (text, vision):
        check_layers(part)
    parsed = parse(f"{name}Config", config)
    text_config, tower = text_config_of(parsed), _tower(parsed)
    return ModelConfig(
        text=text_config,
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation="gelu",
        projector_bias=False,
        image_token_id=image_token_of(parsed, text_config),
        layout=_layout(tower, SIDE),
        projector_layers=1,
    )


def _tower(parsed: Any) -> VisionConfig:
    config, side = parsed.vision_config, size(parsed, "scale_factor", 64)
    image, patch = size(config, "image_size", 1 << 14), size(config, "patch_size", 1 << 10)
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    grid = image // patch
    if not grid or grid % side or hidden % heads:
        raise CheckpointError(
            f"config.json: a tower of {image} pixels in patches of {patch}, {hidden} wide with {heads} heads, does not "
            f"give squares of {side} x {side} patches; correct config.json"
        )
    if grid not in _UNROUNDED:
        raise UnsupportedModelError(
            f"a tower of {grid} x {grid} patches is not supported: their positions may be rounded; vtx exports 26, 27 "
            "or a power of two a side"
        )
    if config.num_channels != 3:
        raise UnsupportedModelError(f"a tower of {config.num_channels} channels is not supported; vtx feeds RGB")
    return replace(tower_of(config, "siglip", image, patch), shuffle=side, post_norm=True)


def _layout(tower: VisionConfig, side: int) -> MarkedTiles:
    return MarkedTiles(tower.image, (tower.grid // tower.shuffle) ** 2, side, side**2 + (side > 1))


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """How large images become is the image processor's."""
    tile = config.vision.image
    edge = processor.get("size", {_LONGEST: SIDE * tile})
    longest = edge.get(_LONGEST) if isinstance(edge, Mapping) else None
    for flag in ("do_resize", "do_image_splitting"):
        if processor.get(flag, True) is not True:
            raise UnsupportedModelError(
                f"the image processor's {flag} is {processor[flag]!r:.20}; vtx exports those that resize and split"
            )
    if type(longest) is not int or longest % tile or not 1 <= longest // tile <= MAX_SIDE:
        raise UnsupportedModelError(
            f"the image processor's size is {edge!r:.60}; vtx takes a longest_edge of 1 to {MAX_SIDE} times the "
            f"tower's {tile} pixels"
        )
    try:
        return replace(config, layout=_layout(config.vision, longest // tile))
    except BundleError as e:
        raise CheckpointError(f"the image processor's size: {e}") from e


def marked_family(name: str) -> Family:
    """The family whose classes in transformers begin with `name`."""
    defaults = {
        **SIGLIP_DEFAULTS, "resample": 1, "size": {_LONGEST: 1456}, "max_image_size": {_LONGEST: 364}, "do_pad": True,
    }  # fmt: skip
    return Family(
        model_type=name.lower(),
        architecture=f"{name}ForConditionalGeneration",
        read=partial(_read, name),
        processors=(ImageProcessor(f"{name}ImageProcessor", defaults, tiled=True, size="max_image_size"),),
        tensors=(
            (r"^model\.vision_model\.", "vision."),
            (r"^model\.text_model\.", "text."),
            (r"^model\.connector\.modality_projection\.proj\.", "projector.linear_1."),
        ),
        adjust=_adjust,
    )


FAMILY = marked_family("SmolVLM")
