"""LISA: original LLaVA whose answers name segments; a mask decoder, which is not exported, reads their states."""

from __future__ import annotations

from vtx.exporter.checkpoint.families.llava_llama import original_family

FAMILY = original_family("lisa", "LISAForCausalLM", "llama", "llava_v1", seg_token="[SEG]")
