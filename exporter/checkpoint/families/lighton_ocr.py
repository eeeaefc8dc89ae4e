"""LightOnOCR: pages of text, seen by Pixtral's tower with merged patches and read by a qwen3 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.families.pixtral import PROCESSOR, adjust_pixtral, read_pixtral
from vtx.exporter.checkpoint.family import Family
from vtx.runtime.errors import UnsupportedModelError

PATCH = 16  # of the image processor by default
# Settings of Mistral 3 in published files, which transformers' class does not read.
UNREAD = ("multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy")


def _read(config: Mapping[str, Any]) -> ModelConfig:
    settings = {name: value for name, value in config.items() if name not in UNREAD}
    if "image_token_index" in settings:
        settings.setdefault("image_token_id", settings["image_token_index"])
    return read_pixtral(settings, "LightOnOcrConfig", marks=False)


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the longest edge, and the patch of the image processor, of which an image's sides are multiples."""
    patch = processor.get("patch_size", PATCH)
    step = patch.get("height") if isinstance(patch, Mapping) else patch
    vision = config.vision
    if step not in (vision.patch, vision.patch * vision.shuffle):
        raise UnsupportedModelError(
            f"the image processor's patch_size is {patch!r:.60}; vtx supports the tower's, {vision.patch}, and that of "
            f"a token, {vision.patch * vision.shuffle}"
        )
    return adjust_pixtral(config, processor, step)


FAMILY = Family(
    model_type="lighton_ocr",
    architecture="LightOnOcrForConditionalGeneration",
    spellings=(("mistral3", "LightOnOCRForConditionalGeneration"), ("mistral3", "LightOnOcrForConditionalGeneration")),
    read=_read,
    processors=(PROCESSOR,),
    tensors=(
        (r"^(?:model\.)?vision_encoder\.", "vision."),
        (r"^(?:model\.)?vision_projection\.", "projector."),
    ),
    adjust=_adjust,
    reader=True,
)
