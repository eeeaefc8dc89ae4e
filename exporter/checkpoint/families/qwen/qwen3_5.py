"""Qwen3.5, dense: Qwen3-VL's images without deepstack, and a decoder most of whose layers have the gated delta rule."""

from __future__ import annotations

from typing import Any

from vtx.exporter.checkpoint.families.qwen.qwen2_vl import PROCESSOR, TENSORS, adjust, adjust_video, read_qwen
from vtx.exporter.checkpoint.families.qwen.qwen3_vl import (
    BOXES,
    VIDEO_PROCESSOR,
    frames_in_time,
    template_without_marks,
    tower_with_table,
)
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.errors import UnsupportedModelError
from vtx.tools.model.vision import VisionConfig


def tower_without_maps(config: Any, text: TextConfig) -> VisionConfig:
    if maps := getattr(config, "deepstack_visual_indexes", None):
        raise UnsupportedModelError(
            f"deepstack_visual_indexes {maps!r:.40} is not supported in a qwen3_5 model; vtx exports those without"
        )
    return tower_with_table(config, text, "qwen3_5")


FAMILY = Family(
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen3_5Config", tower_without_maps, frames_in_time),
    processors=(PROCESSOR,),
    tensors=TENSORS,
    adjust=adjust,
    template=template_without_marks,
    adjust_video=adjust_video,
    video_processor=VIDEO_PROCESSOR,
    boxes=BOXES,
)
