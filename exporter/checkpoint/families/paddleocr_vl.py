"""PaddleOCR-VL: SigLIP's tower at native resolution with rotary positions beside its table, and Ernie 4.5's decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.exporter.checkpoint.config import ModelConfig, check_layers, image_token_of, parse_parts, tower_of
from vtx.exporter.checkpoint.families.qwen.qwen2_vl import FEWEST, MOST, PROCESSOR, adjust
from vtx.exporter.checkpoint.family import Family
from vtx.exporter.checkpoint.fields import number, size
from vtx.exporter.checkpoint.text_config import text_config_of
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.errors import CheckpointError
from vtx.runtime.vision.layouts.native import NEAREST, Native
from vtx.tools.model.towers.native import LAST_NORM, MERGER, PATCHES, POSITIONS
from vtx.tools.model.vision import VisionConfig

NORM_EPS = 1e-5  # of the projector's norm: no setting
PIXELS = {"shortest_edge": 384**2, "longest_edge": 1536**2}  # of an image by default
_TOWER = r"^vision\.vision_model\."
_BLOCK = _TOWER + r"encoder\.layers\.(\d+)\."
_PROJECTOR = r"^(?:mlp_AR|model\.projector)\."
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (_TOWER + r"embeddings\.patch_embedding\.", PATCHES.removesuffix("weight")),
        (_TOWER + r"embeddings\.position_embedding\.weight$", POSITIONS),
        (_TOWER + r"post_layernorm\.", f"{LAST_NORM}."),
        (_BLOCK + r"layer_norm([12])\.", r"vision.blocks.\1.norm\2."),
        (_BLOCK + r"self_attn\.out_proj\.", r"vision.blocks.\1.attn.proj."),
        (_BLOCK + r"self_attn\.", r"vision.blocks.\1.attn."),
        (_BLOCK + r"mlp\.", r"vision.blocks.\1.mlp."),
        (_PROJECTOR + r"pre_norm\.", f"{MERGER}.ln_q."),
        (_PROJECTOR + r"linear_1\.", f"{MERGER}.mlp.0."),
        (_PROJECTOR + r"linear_2\.", f"{MERGER}.mlp.2."),
    )
)


def _read(config: Mapping[str, Any]) -> ModelConfig:
    check_layers(config)
    parsed = parse_parts("PaddleOCRVLConfig", config)
    # transformers' class ties by the text model's default where the file states the opposite for the whole model alone.
    part = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", True) or part.get("tie_word_embeddings", False)
    text = replace(text_config_of(parsed), tied=bool(tied))
    tower = _tower(parsed.vision_config)
    model = ModelConfig(
        text=text,
        vision=tower,
        feature_layers=(tower.layers,),
        select="full",
        projector_activation="gelu",
        projector_bias=True,
        image_token_id=image_token_of(parsed, text),
        layout=Native(tower.patch, tower.shuffle, FEWEST, MOST, small=NEAREST),
        projector_norm_eps=NORM_EPS,
    )
    return _adjust(model, {})


def _tower(config: Any) -> VisionConfig:
    tower = tower_of(config, "paddleocr_vl")
    if tower.hidden // tower.heads % 4:
        raise CheckpointError(
            f"config.json: a tower of hidden size {tower.hidden} with {tower.heads} heads does not rotate by rows and "
            "columns; correct config.json"
        )
    return replace(
        tower,
        native=True,
        shuffle=size(config, "spatial_merge_size", 64),
        patch_bias=True,
        one_frame=True,
        position_grid=tower.grid,
        half_pixel=True,
        kv_heads=tower.heads,
        theta=number(config.rope_parameters, "rope_theta"),
        post_norm=True,
    )


def _adjust(config: ModelConfig, processor: Mapping[str, Any]) -> ModelConfig:
    """Set the image processor's limits of pixels, whose defaults are its own."""
    return adjust(config, {"size": PIXELS, **processor})


def _arrange(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tower's and projector's weights by the names of Qwen-VL's, whose kernels have an axis for frames."""
    for source, info in tensors.items():
        renamed = (pattern.sub(name, source) for pattern, name in _NAMES if pattern.search(source))
        name = next(renamed, source)
        if name == PATCHES and len(info.shape) == 4:
            info = replace(info, shape=(*info.shape[:2], 1, *info.shape[2:]))
        yield name, info


FAMILY = Family(
    model_type="paddleocr_vl",
    architecture="PaddleOCRVLForConditionalGeneration",
    read=_read,
    processors=tuple(replace(PROCESSOR, name=f"{name}ImageProcessor") for name in ("PaddleOCRVL", "Siglip")),
    adjust=_adjust,
    arrange=_arrange,
    reader=True,
)
