"""Small random PaddleOCR-VL checkpoints: with the names that were published, and those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import ARCHITECTURES, TEMPLATE, Tiny, _text_fields, _weights, write_json, write_weights

PADDLE = Tiny(family="paddleocr_vl", text="paddleocr_vl_text", tokenizer="bytes", head_dim=16, context=512)
PIXELS = {"min_pixels": 4 * 28**2, "max_pixels": 40 * 28**2}
PUBLISHED = (
    ("model.visual.", "visual."), ("model.projector.", "mlp_AR."), ("model.language_model.", "model."),
)  # fmt: skip


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration, with the text model's settings at the top where names are as published."""
    half = (tiny.head_dim or 0) // 2
    rope = {"rope_type": "default", "mrope_section": [half // 4, half - half // 4 - half * 3 // 8, half * 3 // 8]}
    text = _text_fields(tiny) | {"use_bias": tiny.attention_bias, "bos_token_id": 1, "eos_token_id": 2}
    vision = {
        "model_type": "paddleocr_vl_vision", "hidden_size": tiny.vision_hidden, "image_size": tiny.image,
        "intermediate_size": tiny.vision_ffn, "num_hidden_layers": tiny.vision_layers,
        "num_attention_heads": tiny.vision_heads, "patch_size": tiny.patch,
    }  # fmt: skip
    common = {
        "architectures": [ARCHITECTURES[tiny.family]], "model_type": tiny.family, "image_token_id": image_token,
        "video_token_id": image_token - 1, "tie_word_embeddings": tiny.tied, "torch_dtype": tiny.dtype,
    }  # fmt: skip
    if tiny.names == "hub":
        vision["model_type"] = "paddleocr_vl"
        return {**text, "rope_theta": tiny.theta, "rope_scaling": rope, "vision_config": vision, **common}
    text |= {"model_type": "paddleocr_vl_text", "rope_parameters": rope | {"rope_theta": tiny.theta}}
    return {"text_config": text, "vision_config": vision, **common}


def make_paddle(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    from transformers import AutoConfig

    fields = settings(tiny, image_token)
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    write_json(folder / "preprocessor_config.json", {
        "image_processor_type": "PaddleOCRVLImageProcessor", **PIXELS, "patch_size": tiny.patch, "merge_size": 2,
        "temporal_patch_size": 1, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    })  # fmt: skip
    marked = f"<|IMAGE_START|>{tiny.image_token}<|IMAGE_END|>"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", marked), encoding="utf-8")
    weights = _weights(AutoConfig.for_model(**fields), tiny, seed)
    for new, old in PUBLISHED if tiny.names == "hub" else ():
        weights = {old + name.removeprefix(new) if name.startswith(new) else name: w for name, w in weights.items()}
    write_weights(folder, tiny, weights)
    return folder
