"""LLaVA-NeXT (1.6) in Hugging Face's layout: the whole image in one tile, and the image in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VisionConfig
from vtx.exporter.checkpoint.family.declaration import Family, read_llava_like
from vtx.exporter.checkpoint.family.processors import CLIP_DEFAULTS, ImageProcessor
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.anyres import Anyres


def _read(config: Mapping[str, Any]) -> ModelConfig:
    return read_llava_like(config, "LlavaNextConfig", anyres)


def anyres(parsed: Any, vision: VisionConfig, select: str) -> Anyres:
    """The layout by `image_grid_pinpoints`."""
    if vision.rows - (select == "default") != vision.grid**2:
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {select!r} with a {vision.family} tower does not give one token a "
            "patch, so the tokens of tiles form no grid; vtx does not export that"
        )
    points = parsed.image_grid_pinpoints
    if not all(isinstance(point, list | tuple) and len(point) == 2 and all(map(_is_size, point)) for point in points):
        raise CheckpointError(
            f"config.json: image_grid_pinpoints is {str(points)[:60]!r}, not pairs of numbers; correct config.json"
        )
    try:  # the file has (height, width)
        layout = Anyres(vision.image, vision.grid, tuple((width, height) for height, width in points), rounded=True)
    except BundleError as e:
        raise CheckpointError(f"config.json: image_grid_pinpoints: {e}") from e
    if not layout.resolutions:
        raise CheckpointError("config.json: image_grid_pinpoints is empty; correct config.json")
    return layout


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


FAMILY = Family(
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    read=_read,
    processors=(ImageProcessor("LlavaNextImageProcessor", {**CLIP_DEFAULTS, "do_pad": True}, tiled=True),),
    tensors=((r"^(model\.)?image_newline$", "image_newline"),),
)
