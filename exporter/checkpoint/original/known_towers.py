"""Towers whose published configuration is known: where a model holds their weights, no file of theirs is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIP_L_336 = "openai/clip-vit-large-patch14-336"
# The published configuration of the tower that nearly all of them name; only its weights have to be found.
CLIP_L_336_CONFIG: Mapping[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
CLIP_L_336_PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}  # fmt: skip


def known_tower(name: str) -> Mapping[str, Any] | None:
    """The configuration of a tower that needs no file to be known."""
    return CLIP_L_336_CONFIG if name == CLIP_L_336 else None
