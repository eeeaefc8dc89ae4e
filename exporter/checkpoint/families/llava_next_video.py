"""LLaVA-NeXT-Video in Hugging Face's layout: LLaVA-NeXT for images, and frames of videos whose patches are averaged."""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, image_token_of
from vtx.exporter.checkpoint.families.llava_next import FAMILY as LLAVA_NEXT
from vtx.exporter.checkpoint.families.llava_next import anyres
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor, read_llava_like
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.vision.layouts.frames import Frames

FRAMES = 8  # of a video: 32, which the model was trained with, take 4,608 tokens


def _video(parsed: Any, model: ModelConfig) -> VideoConfig:
    mode = parsed.spatial_pool_mode
    side = parsed.spatial_pool_stride
    grid = model.vision.grid
    if mode != "average" or type(side) is not int or not 1 <= side <= grid or grid % side:
        raise UnsupportedModelError(
            f"spatial_pool_mode {mode!r:.40} with spatial_pool_stride {side!r:.40} is not supported; vtx exports "
            f"'average' with a stride that divides the tower's {grid} patches"
        )
    token = image_token_of(parsed, model.text, "video")
    frames = Frames(FRAMES, (grid // side) ** 2)
    return VideoConfig(token, frames, select=model.select, pool=side)


FAMILY = Family(
    model_type="llava_next_video",
    architecture="LlavaNextVideoForConditionalGeneration",
    read=lambda config: read_llava_like(config, "LlavaNextVideoConfig", anyres, _video),
    processors=(
        *LLAVA_NEXT.processors,
        ImageProcessor("LlavaNextVideoImageProcessor", {**CLIP_DEFAULTS, "do_pad": True}, tiled=True),
    ),
    video_processor=ImageProcessor("LlavaNextVideoVideoProcessor", CLIP_DEFAULTS),
    tensors=LLAVA_NEXT.tensors,
)
