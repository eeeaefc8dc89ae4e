"""Qwen3-VL in Hugging Face's layout, and Cosmos-Reason2: Qwen2-VL's images, learned positions, and deepstack's maps."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.qwen.qwen2_vl import (
    JSON_BOXES,
    PROCESSOR,
    TENSORS,
    adjust,
    adjust_video,
    native_tower,
    read_qwen,
)
from vtx.exporter.checkpoint.family import SIGLIP_DEFAULTS, Family, ImageProcessor
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.errors import CheckpointError
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.tools.model.vision import VisionConfig

_DEFAULTS = {**SIGLIP_DEFAULTS, "resample": 3, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
VIDEO_PROCESSOR = ImageProcessor("Qwen3VLVideoProcessor", _DEFAULTS, own_size=True)


def tower_with_table(config: Any, text: TextConfig, family: str) -> VisionConfig:
    """A native tower with a learned table of positions, without maps."""
    hidden, ffn, out = (size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    tower = native_tower(config, family, hidden, ffn, out, text)
    positions = size(config, "num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"config.json: num_position_embeddings {positions} is not a square; correct config.json")
    return replace(tower, patch_bias=True, position_grid=math.isqrt(positions))


def deepstack_tower(config: Any, text: TextConfig) -> VisionConfig:
    tower = tower_with_table(config, text, "qwen3_vl")
    maps = config.deepstack_visual_indexes
    numbers = isinstance(maps, list | tuple) and all(type(n) is int and 0 <= n < tower.layers for n in maps)
    if not numbers or list(maps) != sorted({*maps}) or len(maps) > text.layers:
        raise CheckpointError(
            f"config.json: deepstack_visual_indexes {maps!r:.60} must be rising numbers below the tower's "
            f"{tower.layers}, at most {text.layers} of them, one for each layer of the text model; correct config.json"
        )
    return replace(tower, maps=tuple(maps))


def frames_in_time(frames: Pairs, _: Any) -> Pairs:
    return replace(frames, times=True, of_clip=True)  # of all frames the limits that are usual for one


def template_without_marks(template: str, _: ModelConfig) -> str:
    """The chat template without the marks around a video: each pair of its frames has its own, behind its time."""
    return re.sub(r"<\|vision_start\|>(<[^<>]*video[^<>]*>)<\|vision_end\|>", r"\1", template)


BOXES = replace(JSON_BOXES, scale=1000)
FAMILY = Family(
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen3VLConfig", deepstack_tower, frames_in_time),
    processors=(PROCESSOR,),
    tensors=TENSORS,
    adjust=adjust,
    template=template_without_marks,
    adjust_video=adjust_video,
    video_processor=VIDEO_PROCESSOR,
    boxes=BOXES,
)
