"""Towers of original LLaVA: the CLIP whose configuration needs no file, and InternViT-6B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vtx.runtime.bundle.safetensors import TensorInfo

CLIP_L_336 = "openai/clip-vit-large-patch14-336"
# The published configuration of the tower that nearly all of them name; only its weights are read.
CLIP_L_336_CONFIG: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
CLIP_L_336_PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}


INTERNVIT = "intern_vit_6b"  # InternViT-6B's model_type
# Patterns of its tensors and their canonical names; q, k and v are thirds of one matrix.
INTERNVIT_TENSORS = (
    (r"^(?:vision_model\.)?embeddings\.position_embedding$", "vision.embeddings.position_embedding.weight"),
    (r"^(?:vision_model\.)?embeddings\.", "vision.embeddings."),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.ls([12])$", r"vision.encoder.layers.\1.lambda_\2"),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.out_proj."),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.attn\.", r"vision.encoder.layers.\1.self_attn."),
    (r"^(?:vision_model\.)?encoder\.", "vision.encoder."),
)
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")


def internvit_side(name: str) -> int:
    """The image side in pixels that a model uses with the InternViT-6B called `name`."""
    return 448 if "448" in name else 336


def internvit_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`config.json` of an InternViT-6B as a `vision_config`; `position_side` is the image side of its positions."""
    sizes = {key: config[key] for key in _SIZES if key in config}
    sizes |= {"model_type": INTERNVIT, "image_size": internvit_side(name), "position_side": config.get("image_size")}
    expected = {"qk_normalization": True, "qkv_bias": False}
    return {
        **sizes,
        "hidden_act": "gelu",
        "layer_norm_eps": config.get("layer_norm_eps", 1e-6),
        "unlike": [key for key, value in expected.items() if config.get(key, value) is not value],
    }


def internvit_processor(name: str) -> Mapping[str, Any]:
    side = internvit_side(name)
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


def thirds(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of an InternViT with q, k and v separated: they are thirds of one tensor's rows."""
    for name, info in tensors.items():
        stem, separator, kind = name.partition(".qkv.")
        if not separator or not info.shape or info.shape[0] % 3:
            yield name, info
            continue
        nbytes = info.nbytes // 3
        shape = (info.shape[0] // 3, *info.shape[1:])
        for number, part in enumerate("qkv"):
            third = replace(info, shape=shape, offset=info.offset + number * nbytes, nbytes=nbytes)
            yield f"{stem}.{part}_proj.{kind}", third
