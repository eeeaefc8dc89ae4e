"""Small random Qwen2-VL, Qwen2.5-VL and Qwen3-VL checkpoints in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Mapping
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
    "<|vision_start|>IMAGE<|vision_end|>{% elif part['type'] == 'video' or 'video' in part %}"
    "<|vision_start|><video><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 56  # pixels: 2 x 2 tokens, so that small images have several, and some that stick out
# Published configurations: the text model's settings stand beside the tower's.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen2-vl-2b": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768,
        "max_window_layers": 28, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "hidden_act": "silu",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                          "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
                          "temporal_patch_size": 2},
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32768,
        "max_window_layers": 28, "max_position_embeddings": 128000, "rope_theta": 1000000.0, "hidden_act": "silu",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655,
        "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                          "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
                          "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                          "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2},
    },
    "qwen3-vl-4b": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
        "text_config": {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
                        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
                        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
                        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "vocab_size": 151936,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"}},
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
                          "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
                          "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
                          "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}  # fmt: skip
QWEN2 = Tiny(family="qwen2_vl", text="qwen2", tokenizer="bytes")
QWEN25 = replace(QWEN2, family="qwen2_5_vl")
QWEN3 = replace(QWEN2, family="qwen3_vl", text="qwen3", patch=16)
QWEN3_EXPERTS = replace(QWEN3, family="qwen3_vl_moe")
QWEN35 = replace(QWEN3, family="qwen3_5", text="qwen3_5", head_dim=16, attending=(1, 4, 6), taps=4, context=512)
QWEN35_EXPERTS = replace(QWEN35, family="qwen3_5_moe", experts=(5, 2, 32))
GRID = 6  # side of the table of positions; images have 4 to 28 patches a side


def vision_fields(tiny: Tiny) -> dict[str, Any]:
    """The tower, in the words of its configuration."""
    fields = {"depth": tiny.vision_layers, "num_heads": tiny.vision_heads, "patch_size": tiny.patch}
    if tiny.family == "qwen2_vl":
        return fields | {"embed_dim": tiny.vision_hidden, "mlp_ratio": 2, "hidden_size": tiny.hidden}
    fields |= {
        "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn, "out_hidden_size": tiny.hidden,
    }  # fmt: skip
    if tiny.family.startswith("qwen3"):
        maps = {"deepstack_visual_indexes": [*tiny.maps]} if tiny.family.startswith("qwen3_vl") else {}
        return fields | {"num_position_embeddings": GRID**2, **maps}
    return fields | {"window_size": WINDOW, "fullatt_block_indexes": [1, tiny.vision_layers - 1]}


def _rope(tiny: Tiny) -> dict[str, Any]:
    half = (tiny.head_dim or tiny.hidden // tiny.heads) // 2
    if tiny.family.startswith("qwen3"):
        more = {"partial_rotary_factor": tiny.partial} if tiny.text == "qwen3_5" else {}
        half = int(half * more.get("partial_rotary_factor", 1))
        return {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4], "mrope_interleaved": True, **more}
    return {"mrope_section": [half // 4, half - half // 4 - half * 3 // 8, half * 3 // 8]}


def image_settings(tiny: Tiny = QWEN2) -> dict[str, Any]:
    """The image processor's file."""
    fields = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "temporal_patch_size": 2}
    if tiny.family.startswith("qwen3"):
        sizes = {"shortest_edge": 4 * 1024, "longest_edge": MOST * 1024}
        return fields | {"patch_size": 16, "size": sizes, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return fields | {
        "min_pixels": 4 * 784, "max_pixels": MOST * 784, "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip


def video_settings(tiny: Tiny) -> dict[str, Any]:
    """The video processor's file: limits of each frame, of all frames together for Qwen3-VL."""
    fields = image_settings(tiny) | {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2}
    del fields["image_processor_type"]
    if tiny.family.startswith("qwen3"):
        sizes = {"shortest_edge": 8 * 1024, "longest_edge": 96 * 1024}
        return fields | {"video_processor_type": "Qwen3VLVideoProcessor", "size": sizes}
    return fields | {"min_pixels": 4 * 784, "max_pixels": 12 * 784}


def of_delta(tiny: Tiny) -> dict[str, Any]:
    """What the configuration of Qwen3.5's decoder has beyond others."""
    if tiny.text != "qwen3_5":
        return {}
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{name}": size for name, size in zip(names, tiny.delta, strict=True)}
    kinds = ["full_attention" if n in tiny.attending else "linear_attention" for n in range(tiny.layers)]
    return {**sizes, "layer_types": kinds, "linear_conv_kernel_dim": tiny.taps, "attention_bias": tiny.attention_bias}


def of_mixture(tiny: Tiny) -> dict[str, Any]:
    """What the configuration of a decoder with experts has beyond others."""
    if not tiny.family.endswith("_moe"):
        return {}
    sizes = dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), tiny.experts, strict=True))
    if tiny.family == "qwen3_5_moe":
        return {**sizes, "shared_expert_intermediate_size": tiny.ffn}
    return {**sizes, "mlp_only_layers": [*tiny.dense]}


def of_experts(weights: Mapping[str, Any], tiny: Tiny) -> dict[str, Any]:
    """Weights in the layout of a file: of Qwen3-VL's hub experts are [in, out], others may be one tensor each."""
    laid = dict[str, Any]()
    for name, tensor in weights.items():
        if ".experts." not in name:
            laid[name] = tensor
        elif tiny.apart:
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for number, matrices in enumerate(tensor):
                for part, matrix in zip(names, matrices.chunk(len(names)), strict=True):
                    laid[f"{name.rpartition('.')[0]}.{number}.{part}.weight"] = matrix.contiguous()
        elif tiny.names == "hub" and tiny.family == "qwen3_vl_moe":
            laid[name] = tensor.transpose(1, 2).contiguous()
        else:
            laid[name] = tensor
    return laid


def settings(tiny: Tiny, text: dict[str, Any], image_token: int) -> dict[str, Any]:
    """The configuration as transformers 5 has it: text model and tower apart."""
    text = text | of_delta(tiny) | of_mixture(tiny)
    rope = _rope(tiny) | {"rope_type": "default", "rope_theta": tiny.theta}
    return {
        "text_config": text | {"rope_parameters": rope}, "vision_config": vision_fields(tiny),
        "image_token_id": image_token, "video_token_id": image_token - 1, "tie_word_embeddings": tiny.tied,
    }  # fmt: skip


def hub_settings(tiny: Tiny, text: dict[str, Any], image_token: int) -> dict[str, Any]:
    """The configuration as it is published: until Qwen3-VL the text model's settings at the top."""
    if tiny.family.startswith("qwen3"):
        nested = settings(tiny, text, image_token)
        if tiny.text == "qwen3_5":  # which is published with rope_parameters
            nested["text_config"] |= {"model_type": f"{tiny.family}_text", "attn_output_gate": True}
            nested["vision_config"] |= {"model_type": tiny.family, "in_channels": 3, "deepstack_visual_indexes": []}
            return nested | {"model_type": tiny.family, "torch_dtype": tiny.dtype}
        nested["text_config"] |= {"model_type": f"{tiny.family}_text", "rope_theta": tiny.theta}
        nested["text_config"]["rope_scaling"] = {"rope_type": "default", **_rope(tiny)}
        del nested["text_config"]["rope_parameters"]
        nested["vision_config"] |= {"model_type": tiny.family, "in_channels": 3}
        return nested | {"model_type": tiny.family, "torch_dtype": tiny.dtype}
    rope = {"rope_theta": tiny.theta, "rope_scaling": {"type": "mrope", **_rope(tiny)}}
    nested = settings(tiny, text, image_token)
    del nested["text_config"]
    return {**text, **rope, **nested, "model_type": tiny.family, "torch_dtype": tiny.dtype}


def hub_name(name: str) -> str:
    """A tensor's name as it is published; Qwen3-VL's are as they are now."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def template(tiny: Tiny) -> str:
    """The chat template: the published ones' forms, where names are as they are saved."""
    return TEMPLATE.replace("IMAGE", tiny.image_token) if tiny.names == "saved" else tiny.template
