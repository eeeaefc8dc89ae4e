"""Idefics3, and the first SmolVLM models, which have its classes: SmolVLM under another name."""

from __future__ import annotations

from vtx.exporter.checkpoint.families.idefics.smolvlm import marked_family

FAMILY = marked_family("Idefics3")
