"""Qwen2.5-VL in Hugging Face's layout: Qwen2-VL with window attention in most blocks of its tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.families.qwen.qwen2_vl import (
    JSON_BOXES,
    PROCESSOR,
    TENSORS,
    VIDEO_PROCESSOR,
    adjust,
    adjust_video,
    native_tower,
    read_qwen,
)
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.fields import size
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.errors import CheckpointError
from vtx.runtime.vision.layouts.pairs import Pairs
from vtx.tools.model.vision import VisionConfig


def _tower(config: Any, text: TextConfig) -> VisionConfig:
    hidden, ffn, out = (size(config, name) for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    tower = native_tower(config, "qwen2_5_vl", hidden, ffn, out, text)
    window = size(config, "window_size", 1 << 14)
    whole = config.fullatt_block_indexes
    numbers = isinstance(whole, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in whole)
    if window % (tower.patch * tower.shuffle) or not numbers or not all(0 <= n < tower.layers for n in whole):
        raise CheckpointError(
            f"config.json: window_size {window} must be a multiple of {tower.patch * tower.shuffle} pixels, and "
            f"fullatt_block_indexes {whole!r:.60} a list of numbers below {tower.layers}; correct config.json"
        )
    full_blocks = tuple(sorted({*whole}))
    return replace(tower, rms_norm=True, gated=True, window=window // tower.patch, full_blocks=full_blocks)


def _in_time(frames: Pairs, config: Any) -> Pairs:
    return replace(frames, ticks=float(size(config, "tokens_per_second", 1000)))


FAMILY = Family(
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen2_5_VLConfig", _tower, _in_time),
    processors=(replace(PROCESSOR, name="Qwen2_5_VLImageProcessor"), PROCESSOR),  # the first is in its first files
    tensors=TENSORS,
    adjust=adjust,
    video_processor=VIDEO_PROCESSOR,
    adjust_video=adjust_video,
    boxes=JSON_BOXES,
)
