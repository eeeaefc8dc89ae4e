"""Small random GLM-OCR checkpoints, with a tensor of the layer that predicts several tokens at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import (
    ARCHITECTURES,
    TEMPLATE,
    Tiny,
    _text_fields,
    _weights,
    write_configuration,
    write_json,
    write_weights,
)

GLM_OCR = Tiny(
    family="glm_ocr", text="glm_ocr_text", tokenizer="bytes", vision_hidden=32, vision_heads=2, head_dim=24, context=512
)
PIXELS = {"shortest_edge": 8 * 28**2, "longest_edge": 80 * 28**2}  # twice those of an image


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration; the sections divide the frequencies of the part of a head that rotates."""
    turned = int((tiny.head_dim or 0) * tiny.partial) // 2
    rope = {
        "rope_type": "default", "rope_theta": tiny.theta, "partial_rotary_factor": tiny.partial,
        "mrope_section": [turned - 2 * (turned // 3), turned // 3, turned // 3],
    }  # fmt: skip
    text = _text_fields(tiny) | {"model_type": "glm_ocr_text", "rope_parameters": rope, "head_dim": tiny.head_dim}
    vision = {
        "model_type": "glm_ocr_vision", "depth": tiny.vision_layers, "num_heads": tiny.vision_heads,
        "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn, "out_hidden_size": tiny.hidden,
        "patch_size": tiny.patch, "attention_bias": tiny.attention_bias,
    }  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[tiny.family]], "model_type": tiny.family, "text_config": text,
        "vision_config": vision, "image_token_id": image_token, "video_token_id": image_token - 1,
        "tie_word_embeddings": tiny.tied, "torch_dtype": tiny.dtype,
    }  # fmt: skip


def image_settings(tiny: Tiny) -> dict[str, Any]:
    """The image processor's file."""
    return {
        "image_processor_type": "Glm46VImageProcessor", "size": PIXELS, "patch_size": tiny.patch, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip


def make_glm(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    config = write_configuration(folder, tiny, settings(tiny, image_token))
    write_json(folder / "preprocessor_config.json", image_settings(tiny))
    marked = f"<|begin_of_image|>{tiny.image_token}<|end_of_image|>"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", marked), encoding="utf-8")
    weights = _weights(config, tiny, seed)
    further = "model.language_model.layers.16.eh_proj.weight"  # of the layer that predicts several tokens
    write_weights(folder, tiny, weights | {further: torch.ones(tiny.hidden, 2 * tiny.hidden)})
    return folder
