"""VILA 1.5 in its authors' layout: parts in folders, images in one piece, a line break after each frame of a video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, VideoConfig, check_values, part_of
from vtx.exporter.checkpoint.families.llava_llama import IMAGE_TOKEN_ID, padding, trained_length
from vtx.exporter.checkpoint.family import ONE_PIECE, Config, Family, OriginalLayout, read_llava_like
from vtx.exporter.checkpoint.original.templates import TEMPLATES
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.vision.layouts.frames import Frames
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.limits import MAX_SAMPLED_FRAMES
from vtx.tools.model.vision import VisionConfig

FRAMES = 8  # of a video by default
SHUFFLE = 2  # side of a token's square, in patches
NORM_EPS = 1e-5  # of the projector's norm: no setting
LLM = "llm"
TOWER = "vision_tower"
PROJECTOR = "mm_projector"
# Settings whose other values are not supported.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "s2": (None, False),
    "image_aspect_ratio": (None, "resize", "pad"),
    "mm_vision_select_feature": ("cls_patch",),
}


def _read(config: Config) -> ModelConfig:
    check_values(config, "a VILA", _SUPPORTED)
    projector = part_of(config, "mm_projector_cfg").get("mm_projector_type")
    if projector != "mlp_downsample":
        raise UnsupportedModelError(
            f"mm_projector_type {projector!r:.40} is not supported; vtx supports mlp_downsample"
        )
    text = part_of(config, "llm_cfg")
    tower = part_of(config, "vision_tower_cfg")
    shaped = {
        "text_config": text,
        "vision_config": tower,
        "vision_feature_layer": config.get("mm_vision_select_layer", -2),
        "vision_feature_select_strategy": "full",
        "image_token_index": IMAGE_TOKEN_ID,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    }
    frames = config.get("num_video_frames", FRAMES)
    if type(frames) is not int or not 1 <= frames <= MAX_SAMPLED_FRAMES:
        raise CheckpointError(
            f"config.json: num_video_frames is {frames!r:.40}; it must be a whole number from 1 to {MAX_SAMPLED_FRAMES}"
        )
    model = read_llava_like(shaped, "LlavaConfig", lambda _parsed, vision, _select: Single(_tokens(vision)))
    video = Frames(frames, _tokens(model.vision), between="\n", padded=True)
    if model.vision.class_token:
        raise UnsupportedModelError("a VILA model with a CLIP tower is not supported; vtx exports those with SigLIP")
    return replace(
        model,
        video=VideoConfig(IMAGE_TOKEN_ID, video, model.select),
        text=replace(model.text, max_positions=min(model.text.max_positions, trained_length(text))),
        vision=replace(model.vision, shuffle=SHUFFLE, shuffle_by_columns=True),
        projector_norm_eps=NORM_EPS,
    )


def _tokens(vision: VisionConfig) -> int:
    return (-(-vision.grid // SHUFFLE)) ** 2


FAMILY = Family(
    model_type="vila",
    architecture="LlavaLlamaModel",
    read=_read,
    processors=ONE_PIECE,
    tensors=(
        (rf"^{LLM}\.model\.", "text."),
        (rf"^{LLM}\.lm_head\.", "head."),
        (rf"^{PROJECTOR}\.layers\.1\.", "projector.norm."),
        (rf"^{PROJECTOR}\.layers\.2\.", "projector.linear_1."),
        (rf"^{PROJECTOR}\.layers\.4\.", "projector.linear_2."),
    ),
    original=OriginalLayout(
        processor=lambda config, tower: padding(tower) if config.get("image_aspect_ratio") == "pad" else tower,
        template=lambda _: TEMPLATES["vicuna_v1"],
        folders={"llm_cfg": LLM, "vision_tower_cfg": TOWER, "mm_projector_cfg": PROJECTOR},
    ),
)
