"""Video-LLaVA in Hugging Face's layout: a tower for images and one for videos, whose frames keep the class token."""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, image_token_of
from vtx.exporter.checkpoint.families.llava import in_one_piece
from vtx.exporter.checkpoint.family import CLIP_DEFAULTS, Family, ImageProcessor, read_llava_like
from vtx.runtime.vision.layouts.frames import Frames

FRAMES = 8  # of a video, as the model was trained


def _video(parsed: Any, model: ModelConfig) -> VideoConfig:
    token = image_token_of(parsed, model.text, "video")
    frames = Frames(FRAMES, model.vision.states)
    return VideoConfig(token, frames, select="full", own_tower=True)


FAMILY = Family(
    model_type="video_llava",
    architecture="VideoLlavaForConditionalGeneration",
    read=lambda config: read_llava_like(config, "VideoLlavaConfig", in_one_piece, _video),
    processors=(ImageProcessor("VideoLlavaImageProcessor", CLIP_DEFAULTS),),
    video_processor=ImageProcessor("VideoLlavaVideoProcessor", CLIP_DEFAULTS),
    tensors=(
        (r"^(model\.)?image_tower\.(vision_model\.)?", "vision."),
        (r"^(model\.)?video_tower\.(vision_model\.)?", "video."),
    ),
)
