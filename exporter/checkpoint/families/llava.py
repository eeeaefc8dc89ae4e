"""LLaVA-1.5 in Hugging Face's layout: each image in one piece."""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.family import ONE_PIECE, Family, read_llava_like
from vtx.runtime.vision.layouts.single import Single
from vtx.tools.model.vision import VisionConfig


def in_one_piece(parsed: Any, vision: VisionConfig, select: str) -> Single:
    return Single(vision.states - (select == "default"))


FAMILY = Family(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    read=lambda config: read_llava_like(config, "LlavaConfig", in_one_piece),
    processors=ONE_PIECE,
)
