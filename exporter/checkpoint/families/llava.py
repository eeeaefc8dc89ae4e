"""LLaVA-1.5 in Hugging Face's layout: each image in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VisionConfig
from vtx.exporter.checkpoint.family.declaration import Family, read_llava_like
from vtx.exporter.checkpoint.family.processors import ONE_PIECE
from vtx.runtime.vision.layouts.single import Single


def _read(config: Mapping[str, Any]) -> ModelConfig:
    return read_llava_like(config, "LlavaConfig", in_one_piece)


def in_one_piece(parsed: Any, vision: VisionConfig, select: str) -> Single:
    """One view of each image."""
    return Single(vision.rows - (select == "default"))


FAMILY = Family(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    read=_read,
    processors=ONE_PIECE,
)
