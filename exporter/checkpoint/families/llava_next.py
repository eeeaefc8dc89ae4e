"""LLaVA-NeXT (1.6) in Hugging Face's layout: the whole image in one tile, and the image in tiles."""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor, read_llava_like
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.tools.model.vision import VisionConfig


def anyres(parsed: Any, vision: VisionConfig, select: str) -> Anyres:
    if vision.states - (select == "default") != vision.grid**2:
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {select!r} with a {vision.family} tower does not give one token a "
            "patch, so the tokens of tiles form no grid; vtx does not export that"
        )
    return tiles_of(vision, parsed.image_grid_pinpoints, rounded=True)


def tiles_of(vision: VisionConfig, points: Any, *, rounded: bool) -> Anyres:
    """The layout of tiles for image sizes: (height, width) if `rounded`, else (width, height) as in the original."""
    pairs = isinstance(points, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in points
    )
    if not pairs or not all(type(side) is int for pair in points for side in pair):
        raise CheckpointError(
            f"config.json: image_grid_pinpoints is {str(points)[:60]!r}, not pairs of numbers; correct config.json"
        )
    try:
        sizes = tuple((pair[1], pair[0]) if rounded else (pair[0], pair[1]) for pair in points)
        layout = Anyres(vision.image, vision.grid, sizes, rounded=rounded)
    except BundleError as e:
        raise CheckpointError(f"config.json: image_grid_pinpoints: {e}") from e
    if not layout.resolutions:
        raise CheckpointError("config.json: image_grid_pinpoints is empty; correct config.json")
    return layout


FAMILY = Family(
    model_type="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    read=lambda config: read_llava_like(config, "LlavaNextConfig", anyres),
    processors=(ImageProcessor("LlavaNextImageProcessor", {**CLIP_DEFAULTS, "do_pad": True}, tiled=True),),
    tensors=((r"^(model\.)?image_newline$", "image_newline"),),
)
