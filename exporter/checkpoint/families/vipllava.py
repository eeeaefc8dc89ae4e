"""ViP-LLaVA: several layers of the tower side by side, and a norm before the projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.llava import in_one_piece
from vtx.exporter.checkpoint.family import ONE_PIECE, Family, read_llava_like

LAYERS = "vision_feature_layer", "vision_feature_layers"  # newer releases of transformers write the first


def _read(config: Mapping[str, Any]) -> ModelConfig:
    """Give both names: each release of transformers reads one of them, and silently uses its default without it."""
    named = next((config[name] for name in LAYERS if config.get(name) is not None), None)
    both = {} if named is None else dict.fromkeys(LAYERS, named)
    return read_llava_like({**config, **both}, "VipLlavaConfig", in_one_piece)


FAMILY = Family(
    model_type="vipllava",
    architecture="VipLlavaForConditionalGeneration",
    read=_read,
    processors=ONE_PIECE,
    tensors=((r"^(model\.)?multi_modal_projector\.projector_layernorm\.", "projector.norm."),),
)
