"""LLaVA-OneVision in Hugging Face's layout: LLaVA-NeXT's tiles with large grids made smaller, and a SigLIP tower."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, image_token_of
from vtx.exporter.checkpoint.families.llava_next import FAMILY as LLAVA_NEXT
from vtx.exporter.checkpoint.families.llava_next import anyres
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor, read_llava_like
from vtx.runtime.errors import BundleError, CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.frames import Frames
from vtx.tools.model.vision import VisionConfig

FRAMES = 8  # of a video: 32, which the model was trained with, take 6,273 tokens

PROCESSOR = ImageProcessor(
    "LlavaOnevisionImageProcessor",
    {**CLIP_DEFAULTS, "size": {"height": 384, "width": 384}, "do_center_crop": False, "do_pad": True},
    tiled=True,
)
VIDEO_PROCESSOR = ImageProcessor(
    "LlavaOnevisionVideoProcessor",
    {**CLIP_DEFAULTS, "size": {"height": 384, "width": 384}, "do_center_crop": False},
)


def _video(parsed: Any, model: ModelConfig) -> VideoConfig:
    frames = Frames(FRAMES, model.view_tokens, halved=True, newline=True)
    return VideoConfig(image_token_of(parsed, model.text, "video"), frames, select=model.select)


def _layout(parsed: Any, vision: VisionConfig, select: str) -> Anyres:
    if vision.family != "siglip" or select != "full":
        raise UnsupportedModelError(
            f"a {vision.family} tower with vision_feature_select_strategy {select!r} is not supported in a "
            "llava_onevision model; vtx exports siglip with 'full'"
        )
    most = re.fullmatch(r"anyres_max_([1-9]\d?)", str(parsed.vision_aspect_ratio))
    if most is None:
        raise UnsupportedModelError(
            f"vision_aspect_ratio {parsed.vision_aspect_ratio!r:.40} is not supported; vtx supports anyres_max_N"
        )
    try:
        return replace(anyres(parsed, vision, select), shrink=int(most[1]))
    except BundleError as e:
        raise CheckpointError(f"config.json: vision_aspect_ratio: {e}") from e


FAMILY = Family(
    model_type="llava_onevision",
    architecture="LlavaOnevisionForConditionalGeneration",
    read=lambda config: read_llava_like(config, "LlavaOnevisionConfig", _layout, _video),
    processors=(PROCESSOR,),
    video_processor=VIDEO_PROCESSOR,
    tensors=LLAVA_NEXT.tensors,
)
