"""Qwen3.5 and 3.6 with experts, 35B-A3B: of each token a few of many, and one that is shared."""

from __future__ import annotations

from dataclasses import replace

from vtx.exporter.checkpoint.families.qwen.qwen2_vl import read_qwen
from vtx.exporter.checkpoint.families.qwen.qwen3_5 import FAMILY as DENSE
from vtx.exporter.checkpoint.families.qwen.qwen3_5 import tower_without_maps
from vtx.exporter.checkpoint.families.qwen.qwen3_vl import frames_in_time

FAMILY = replace(
    DENSE,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    read=lambda config: read_qwen(config, "Qwen3_5MoeConfig", tower_without_maps, frames_in_time),
)
