"""Readers of pages, LFM3-VL, Ministral 3 and a few layers of mixtures at their published sizes, beside transformers.

What a configuration leaves out is the default of transformers' classes, as in the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.shape_files import CHATML, QWEN_VIDEOS, SHAPES, Shape

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24]}
SOURCE = "transformers' classes"
BRACKETS = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% endif %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '[/INST]' if m['role'] == 'user' else '</s>' }}{% endfor %}"
)


def _shape(
    title: str, config: Mapping[str, Any], turns: int, marks: Mapping[str, int], images: Mapping[str, Any], **sizes: int
) -> Shape:
    """A shape with ChatML's turns, ids from `turns` on; `marks` are those of an image in a prompt, and the video's."""
    names = {number: text for text, number in marks.items()}
    image = "".join(text for text, number in marks.items() if number != config.get("video_token_id"))
    return Shape(
        title,
        {"dtype": "bfloat16", **config},
        {**{text: turns + n for n, text in enumerate(TURNS)}, **marks},
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        CHATML.replace("IMAGE", image),
        names[config["image_token_id"]],
        {"preprocessor_config.json": images},
        source=SOURCE,
        torch=True,
        **sizes,
    )


def _lighton_ocr() -> Shape:
    config = {
        "architectures": ["LightOnOcrForConditionalGeneration"],
        "model_type": "lighton_ocr",
        "image_token_id": 151655,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
                        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                        "intermediate_size": 3072, "max_position_embeddings": 16384, "rope_theta": 1000000.0},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "image_size": 1540,
                          "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 14},
    }  # fmt: skip
    images = CLIP | {
        "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 28, "width": 28},
        "size": {"longest_edge": 1540}, "rescale_factor": 1 / 255, "resample": 3,
    }  # fmt: skip
    shape = _shape("LightOnOCR 1B", config, 151643, {"<|image_pad|>": 151655}, images, k=10, picture=784)
    processor = {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2}
    return replace(shape, files={**shape.files, "processor_config.json": processor})


def _paddleocr_vl() -> Shape:
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "image_token_id": 100295,
        "video_token_id": 100296,
        "vision_start_token_id": 101305,
        "vision_end_token_id": 101306,
        "tie_word_embeddings": False,
        "text_config": {"model_type": "paddleocr_vl_text", "vocab_size": 103424, "hidden_size": 1024,
                        "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
                        "intermediate_size": 3072, "max_position_embeddings": 131072, "use_bias": False,
                        "tie_word_embeddings": False, "rope_parameters": ROPE | {"rope_theta": 500000.0}},
        "vision_config": {"model_type": "paddleocr_vl_vision", "hidden_size": 1152, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "intermediate_size": 4304, "patch_size": 14, "image_size": 384},
    }  # fmt: skip
    images = HALF | {
        "image_processor_type": "PaddleOCRVLImageProcessor", "min_pixels": 147384, "max_pixels": 2822400,
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1,
    }  # fmt: skip
    marks = {"<|IMAGE_START|>": 101305, "<|IMAGE_PLACEHOLDER|>": 100295, "<|IMAGE_END|>": 101306}
    marks["<|video_pad|>"] = 100296
    return _shape("PaddleOCR-VL 0.9B", config, 100272, marks, images, k=7, picture=784)


def _glm_ocr() -> Shape:
    rope = ROPE | {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "image_token_id": 59280,
        "video_token_id": 59281,
        "image_start_token_id": 59256,
        "image_end_token_id": 59257,
        "tie_word_embeddings": False,
        "text_config": {"model_type": "glm_ocr_text", "vocab_size": 59392, "hidden_size": 1536,
                        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                        "intermediate_size": 4608, "max_position_embeddings": 131072, "rope_parameters": rope},
        "vision_config": {"model_type": "glm_ocr_vision", "depth": 24, "hidden_size": 1024, "num_heads": 16,
                          "intermediate_size": 4096, "out_hidden_size": 1536, "patch_size": 14},
    }  # fmt: skip
    images = CLIP | {
        "image_processor_type": "Glm46VImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    }  # fmt: skip
    marks = {"<|begin_of_image|>": 59256, "<|image|>": 59280, "<|end_of_image|>": 59257, "<|video|>": 59281}
    return _shape("GLM-OCR 0.9B", config, 59246, marks, images, k=6, picture=784)


def _lfm3_vl() -> Shape:
    config = {
        "architectures": ["Lfm3VlForConditionalGeneration"],
        "model_type": "lfm3_vl",
        "image_token_id": 125030,
        "video_token_id": 125029,
        "vision_start_token_id": 125009,
        "vision_end_token_id": 125010,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "num_hidden_layers": 24},
        "vision_config": {"model_type": "lfm3_vl_vision"},
    }
    images = HALF | {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 1003520},
    }  # fmt: skip
    marks = {"<|vision_start|>": 125009, "<|image_pad|>": 125030, "<|vision_end|>": 125010, "<|video_pad|>": 125029}
    shape = _shape("LFM3-VL-2B", config, 124900, marks, images, k=8, picture=768)
    return replace(shape, files={**shape.files, "video_preprocessor_config.json": QWEN_VIDEOS})


def _qwen3_vl_moe() -> Shape:
    dense = SHAPES["qwen3-vl-4b"]
    text = {
        **dense.config["text_config"], "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        **dense.config["vision_config"], "model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152,
        "intermediate_size": 4304, "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16],
    }  # fmt: skip
    config = {
        **dense.config, "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
    }  # fmt: skip
    assumed = "2 of 48 layers, 2 of 3 maps"
    return replace(
        dense, title="Qwen3-VL-30B-A3B, 2 layers", config=config, k=2, assumed=assumed, source=SOURCE, torch=True
    )


def _qwen3_5_moe() -> Shape:
    dense = SHAPES["qwen3.5-2b"]
    text = {
        **dense.config["text_config"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "layer_types": dense.config["text_config"]["layer_types"][:4],
        "tie_word_embeddings": False,
    }
    del text["intermediate_size"]
    vision = {
        **dense.config["vision_config"],
        "model_type": "qwen3_5_moe_vision",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
    }
    config = {
        **dense.config,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }
    assumed = "4 of 40 layers: 3 linear, 1 full"
    return replace(
        dense, title="Qwen3.5-35B-A3B, 4 layers", config=config, k=3, assumed=assumed, source=SOURCE, torch=True
    )


def _ministral3() -> Shape:
    rope = {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384,
    }
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": "bfloat16",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "ministral3",
            "vocab_size": 131072,
            "hidden_size": 3072,
            "num_hidden_layers": 26,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9216,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_parameters": rope,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "image_size": 1540,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "patch_size": 14,
            "head_dim": 64,
        },
    }
    images = CLIP | {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 14, "width": 14},
        "size": {"longest_edge": 1540},
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    marks = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    processor = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2, **marks}
    return Shape(
        "Ministral 3 3B",
        config,
        {
            "<unk>": 0,
            "<s>": 1,
            "</s>": 2,
            "[INST]": 3,
            "[/INST]": 4,
            "[IMG]": 10,
            "<pad>": 11,
            "[IMG_BREAK]": 12,
            "[IMG_END]": 13,
        },
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
        BRACKETS,
        "[IMG]",
        {"preprocessor_config.json": images, "processor_config.json": processor},
        k=9,
        picture=784,
        source="published configuration",
        torch=True,
    )


PAGE_SHAPES: Mapping[str, Shape] = {
    "lightonocr-1b": _lighton_ocr(),
    "paddleocr-vl": _paddleocr_vl(),
    "glm-ocr": _glm_ocr(),
    "lfm3-vl-2b": _lfm3_vl(),
    "qwen3-vl-30b-a3b": _qwen3_vl_moe(),
    "qwen3.5-35b-a3b": _qwen3_5_moe(),
    "ministral3-3b": _ministral3(),
}
