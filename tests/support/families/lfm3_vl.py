"""Small random LFM3-VL checkpoints in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

LFM3 = Tiny(
    family="lfm3_vl", text="lfm3", tokenizer="bytes", head_dim=16, context=512, tied=True, patch=16, taps=5,
    sliding_window=24, attending=(1, 3, 4, 6), vision_heads=4,
)  # fmt: skip
PIXELS = {"shortest_edge": 4 * 32**2, "longest_edge": 40 * 32**2}
KERNEL = 3


def kinds(tiny: Tiny) -> list[str]:
    """The kind of each layer of the decoder: every second one with attention slides, from the first on."""
    named = dict(zip(tiny.attending, ["sliding_attention", "full_attention"] * tiny.layers, strict=False))
    return [named.get(layer, "conv") for layer in range(tiny.layers)]


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration."""
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": tiny.theta},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 100 * tiny.theta, "partial_rotary_factor": tiny.partial,
        },
    }  # fmt: skip
    text = {name: value for name, value in _text_fields(tiny).items() if name not in ("rms_norm_eps", "mlp_bias")}
    text |= {
        "model_type": "lfm3", "norm_eps": 1e-5, "rope_parameters": ropes, "layer_types": kinds(tiny),
        "conv_L_cache": tiny.taps, "conv_bias": tiny.mlp_bias, "attention_bias": tiny.attention_bias,
        "use_sandwich_norm": tiny.post_norms, "use_attention_gate": tiny.gates, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 3,
    }  # fmt: skip
    tower = ["full_attention" if layer % 2 else "conv" for layer in range(tiny.vision_layers)]
    vision = {
        "model_type": "lfm3_vl_vision", "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads,
        "num_key_value_heads": tiny.vision_heads // 2, "patch_size": tiny.patch, "layer_types": tower,
        "conv_kernel_size": KERNEL,
    }  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[tiny.family]], "model_type": tiny.family, "text_config": text,
        "vision_config": vision, "image_token_id": image_token, "video_token_id": image_token - 1,
        "projector_hidden_size": 80, "projector_bias": tiny.projector_bias, "tie_word_embeddings": tiny.tied,
        "torch_dtype": tiny.dtype,
    }  # fmt: skip


def image_settings(tiny: Tiny) -> dict[str, Any]:
    """The image processor's file."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS, "patch_size": tiny.patch, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip


def published_name(name: str) -> str:
    """A tensor's name as transformers renames it while loading."""
    named = name.replace(".patch_embed.", ".patchifier.").replace(".self_attn.g_proj.", ".self_attn.gate_proj.")
    if ".vision_tower." in name:
        named = named.replace(".q_norm.", ".q_layernorm.").replace(".k_norm.", ".k_layernorm.")
    return named


def make_lfm3(folder: Path, tiny: Tiny, seed: int, image_token: int) -> Path:
    config = write_configuration(folder, tiny, settings(tiny, image_token))
    write_json(folder / "preprocessor_config.json", image_settings(tiny))
    videos = {"size": {"shortest_edge": 8 * 1024, "longest_edge": 96 * 1024}, "fps": 2}
    of_videos = {"video_processor_type": "Qwen3VLVideoProcessor", **videos}
    of_images = image_settings(tiny)
    del of_images["image_processor_type"]
    write_json(folder / "video_preprocessor_config.json", {**of_images, **of_videos})
    marked = f"<|vision_start|>{tiny.image_token}<|vision_end|>"
    text = "{% for part in m['content'] if part['type'] == 'text' %}"
    video = text.replace("'text'", "'video'") + "<|vision_start|><|video_pad|><|vision_end|>\n{% endfor %}"
    template = TEMPLATE.replace("<image>", marked).replace(text, video + text)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    weights = _weights(config, tiny, seed)
    if tiny.names == "hub":
        weights = {published_name(name): tensor for name, tensor in weights.items()}
    write_weights(folder, tiny, weights)
    return folder


def lfm3_mask(mask: Any, positions: Any, window: int) -> Any:
    """A causal mask [1, 1, n, n] without what is `window` positions or more behind."""
    far = positions[0][:, None] - positions[0] >= window
    return mask.masked_fill(far, mask.min())
