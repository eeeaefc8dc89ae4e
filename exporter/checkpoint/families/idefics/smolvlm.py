"""SmolVLM and SmolVLM2: tiles marked with their positions in text, a SigLIP tower, several patches a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VisionConfig, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.marked import MAX_SIDE, MarkedTiles

SIDE = 4  # tiles along the longer side by default
_LONGEST = "longest_edge"
# Transformers finds a patch's position by comparing fractions of the side. In these grids each patch gets its own; in
# others rounding gives some patches their neighbour's.
_UNROUNDED = (26, 27, *(1 << power for power in range(11)))


def _read(name: str, config: Mapping[str, Any]) -> ModelConfig:
    parsed = parse_parts(f"{name}Config", config, "llama", (f"{name.lower()}_vision",))
    text_config, side = text_config_of(parsed), size(parsed, "scale_factor", 64)
    tower = replace(tower_of(parsed.vision_config, "siglip", side), shuffle=side, post_norm=True)
    if tower.grid not in _UNROUNDED:
        raise UnsupportedModelError(
            f"a tower of {tower.grid} x {tower.grid} patches is not supported: their positions may be rounded; vtx "
            "exports 26, 27 or a power of two a side"
        )
    return ModelConfig(
        text=text_config, vision=tower, feature_layers=(tower.layers,), select="full", projector_activation="gelu",
        projector_bias=False, image_token_id=image_token_of(parsed, text_config), layout=_layout(tower, SIDE),
        projector_layers=1,
    )  # fmt: skip


def _layout(tower: VisionConfig, side: int) -> MarkedTiles:
    return MarkedTiles(tower.image, (tower.grid // tower.shuffle) ** 2, side, side**2 + (side > 1))


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image size of the image processor."""
    tile = config.vision.image
    edge = processor.get("size", {_LONGEST: SIDE * tile})
    longest = edge.get(_LONGEST) if isinstance(edge, Mapping) else None
    for flag in ("do_resize", "do_image_splitting"):
        if processor.get(flag, True) is not True:
            raise UnsupportedModelError(f"the image processor's {flag} is {processor[flag]!r:.20}; it must be true")
    if type(longest) is not int or longest % tile or not 1 <= longest // tile <= MAX_SIDE:
        raise UnsupportedModelError(
            f"the image processor's size is {edge!r:.60}; vtx supports a longest_edge of 1 to {MAX_SIDE} times the "
            f"tower's {tile} pixels"
        )
    try:
        return replace(config, layout=_layout(config.vision, longest // tile))
    except BundleError as e:
        raise CheckpointError(f"the image processor's size: {e}") from e


def marked_family(name: str) -> Family:
    """The family whose transformers classes begin with `name`."""
    defaults = {
        **SIGLIP_DEFAULTS, "resample": 1, "size": {_LONGEST: 1456}, "max_image_size": {_LONGEST: 364}, "do_pad": True,
    }  # fmt: skip
    return Family(
        model_type=name.lower(), architecture=f"{name}ForConditionalGeneration", read=partial(_read, name),
        processors=(ImageProcessor(f"{name}ImageProcessor", defaults, tiled=True, size="max_image_size"),),
        adjust=_adjust, tensors=(
            (r"^model\.vision_model\.", "vision."),
            (r"^model\.text_model\.", "text."),
            (r"^model\.connector\.modality_projection\.proj\.", "projector.linear_1."),
        ),
    )  # fmt: skip


FAMILY = marked_family("SmolVLM")
