"""Qwen3-VL with experts, 30B-A3B: the images of Qwen3-VL, and a router in each layer of the decoder."""

from __future__ import annotations

from dataclasses import replace

from vtx.exporter.checkpoint.families.qwen.qwen2_vl import read_qwen
from vtx.exporter.checkpoint.families.qwen.qwen3_vl import FAMILY as DENSE
from vtx.exporter.checkpoint.families.qwen.qwen3_vl import deepstack_tower, frames_in_time

FAMILY = replace(
    DENSE,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen3VLMoeConfig", deepstack_tower, frames_in_time),
)
