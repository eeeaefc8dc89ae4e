"""LLaVA-1.5 in Hugging Face's layout: each image in one piece; and Pixtral in it, which has LLaVA's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.pixtral import PROCESSOR, adjust_pixtral, read_pixtral
from vtx.exporter.checkpoint.family import ONE_PIECE, Family, read_llava_like
from vtx.runtime.vision.layouts.single import Single
from vtx.tools.model.vision import VisionConfig


def in_one_piece(parsed: Any, vision: VisionConfig, select: str) -> Single:
    return Single(vision.states - (select == "default"))


def _read(config: Mapping[str, Any]) -> ModelConfig:
    tower = config.get("vision_config")
    if isinstance(tower, Mapping) and tower.get("model_type") == "pixtral":
        return read_pixtral(config, "LlavaConfig")
    return read_llava_like(config, "LlavaConfig", in_one_piece)


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    return adjust_pixtral(config, processor) if config.vision.projected else config


FAMILY = Family(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    read=_read,
    processors=(PROCESSOR, *ONE_PIECE),
    adjust=_adjust,
)
