"""LISA: original LLaVA whose answers name segments; the mask decoder that reads their states is not exported."""

from __future__ import annotations

from vtx.exporter.checkpoint.families.llava_llama import original_family

FAMILY = original_family("lisa", "LISAForCausalLM", "llama", "llava_v1", seg_token="[SEG]")
