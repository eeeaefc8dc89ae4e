"""LLaVA 1.6 in its authors' layout with a Mistral decoder."""

from __future__ import annotations

from vtx.exporter.checkpoint.families.llava_llama import original_family

FAMILY = original_family("llava_mistral", "LlavaMistralForCausalLM", "mistral", "mistral_instruct")
