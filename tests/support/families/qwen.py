"""Small random Qwen2-VL and Qwen2.5-VL checkpoints in Hugging Face's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.tiny import Tiny

MOST = 40  # tokens of an image
# With what the published templates need: a counter, texts that are no lists, a system prompt of its own.
TEMPLATE = (
    "{% set seen = namespace(value=0) %}{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' or 'image_url' in part %}"
    "{% set seen.value = seen.value + 1 %}{% if add_vision_id %}Picture {{ seen.value }}: {% endif %}"
    "<|vision_start|>IMAGE<|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 56  # pixels: 2 x 2 tokens, so that small images have several, and some that stick out
QWEN2 = Tiny(family="qwen2_vl", text="qwen2", tokenizer="bytes")
QWEN25 = replace(QWEN2, family="qwen2_5_vl")


def vision_fields(tiny: Tiny) -> dict[str, Any]:
    """The tower, in the words of its configuration."""
    fields = {"depth": tiny.vision_layers, "num_heads": tiny.vision_heads, "patch_size": tiny.patch}
    if tiny.family == "qwen2_vl":
        return fields | {"embed_dim": tiny.vision_hidden, "mlp_ratio": 2, "hidden_size": tiny.hidden}
    return fields | {
        "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn, "out_hidden_size": tiny.hidden,
        "window_size": WINDOW, "fullatt_block_indexes": [1, tiny.vision_layers - 1],
    }  # fmt: skip


def _rope(tiny: Tiny) -> dict[str, Any]:
    half = (tiny.head_dim or tiny.hidden // tiny.heads) // 2
    return {"mrope_section": [half // 4, half - half // 4 - half * 3 // 8, half * 3 // 8]}


def image_settings() -> dict[str, Any]:
    """The image processor's file."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * 784, "max_pixels": MOST * 784,
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip


def settings(tiny: Tiny, text: dict[str, Any], image_token: int) -> dict[str, Any]:
    """The configuration as transformers 5 has it: text model and tower apart."""
    rope = _rope(tiny) | {"rope_type": "default", "rope_theta": tiny.theta}
    return {
        "text_config": text | {"rope_parameters": rope}, "vision_config": vision_fields(tiny),
        "image_token_id": image_token, "video_token_id": image_token - 1, "tie_word_embeddings": tiny.tied,
    }  # fmt: skip


def hub_settings(tiny: Tiny, text: dict[str, Any], image_token: int) -> dict[str, Any]:
    """The configuration as it is published: the text model's settings at the top."""
    rope = {"rope_theta": tiny.theta, "rope_scaling": {"type": "mrope", **_rope(tiny)}}
    nested = settings(tiny, text, image_token)
    del nested["text_config"]
    return {**text, **rope, **nested, "model_type": tiny.family, "torch_dtype": tiny.dtype}


def hub_name(name: str) -> str:
    """A tensor's name as it is published."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def template(tiny: Tiny) -> str:
    """The chat template: the published ones' forms, where names are as they are saved."""
    return TEMPLATE.replace("IMAGE", tiny.image_token) if tiny.names == "saved" else tiny.template
