"""The newest families at their published sizes: random checkpoints in Hugging Face's layout, for `shapes.py`.

Every tensor that transformers' class of the family has, under its name, in bfloat16, in shards, written block by block.
The head is the embedding or has its values, which are large: the most likely token is the last one by a clear margin,
as a trained model mostly has one, so that arithmetic in bf16 or int8 is not rejected because noise nearly ties.
The tokenizer is of bytes, with fillers up to the vocabulary's size and the special tokens at their published ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vtx.runtime.bundle.safetensors import layout

SHARD_BYTES = 2 << 30
BLOCK = 1 << 22
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_SEED = 2  # with which the tests' narrow shapes have that margin, too
EMBEDDING = 4.0  # standard deviation; all layers together add less
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "<bos>{% for m in messages %}<|turn>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
QWEN_VIDEOS = QWEN_IMAGES | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "fps": 2,
    "size": {"shortest_edge": 131072, "longest_edge": 25165824},
}
del QWEN_VIDEOS["image_processor_type"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint: its sizes and where they are from, its special tokens by id, and the K that is measured.

    `assumed`: sizes that are not from a published configuration. `picture`: the side of a square picture that the
    image processor does not resize. `files`: further configuration files. `torch`: the rival is transformers, and
    not OpenVINO GenAI.
    """

    title: str
    config: Mapping[str, Any]
    specials: Mapping[str, int]
    roles: Mapping[str, str]
    template: str
    image: str
    files: Mapping[str, Any]
    k: int
    picture: int
    source: str
    assumed: str = ""
    torch: bool = False

    @property
    def vocab(self) -> int:
        size: int = self.config["text_config"]["vocab_size"]
        return size


def _qwen3_vl(title: str, text: Mapping[str, Any], k: int, source: str, assumed: str = "") -> Shape:
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "vocab_size": 151936,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "rope_theta": 5000000,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            "dtype": "bfloat16",
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": [5, 11, 17],
        },
    }
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    specials = dict(zip(names, range(151643, 151646), strict=True))
    marks = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    return Shape(
        title,
        config,
        specials | dict(zip(marks, range(151652, 151657), strict=True)),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        "<|image_pad|>",
        {"preprocessor_config.json": QWEN_IMAGES, "video_preprocessor_config.json": QWEN_VIDEOS},
        k,
        768,
        source,
        assumed,
    )


def _qwen3_5() -> Shape:
    base = _qwen3_vl("Qwen3.5-2B", {"hidden_size": 2048}, 9, "0.8B's configuration, widened")
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": True,
        "eos_token_id": 248046,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }
    vision = base.config["vision_config"] | {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
    ids = {"image_token_id": 248056, "video_token_id": 248057}
    ids |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054}
    config = base.config | ids | {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    specials = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053}
    specials |= {"<|vision_end|>": 248054, "<|vision_pad|>": 248055, "<|image_pad|>": 248056, "<|video_pad|>": 248057}
    return Shape(
        base.title,
        config | {"text_config": text, "vision_config": vision},
        specials,
        base.roles,
        base.template,
        base.image,
        base.files,
        base.k,
        base.picture,
        base.source,
        "decoder 24 x 2048, ffn 6144, 8/2 heads, 16 linear value heads; the tower of Qwen3-VL-2B",
    )


def _gemma4() -> Shape:
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "layer_types": kinds,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "dtype": "bfloat16",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
        "use_clipped_linears": True,
        "standardize": False,
    }
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "audio_token_id": 258881,
        "video_token_id": 258884,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    specials = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<|turn>": 105, "<turn|>": 106, "<|image>": 255999}
    specials |= {"<|audio>": 256000, "<|image|>": 258880, "<|audio|>": 258881, "<image|>": 258882, "<audio|>": 258883}
    images = {
        "image_processor_type": "Gemma4ImageProcessor",
        "max_soft_tokens": 280,
        "patch_size": 16,
        "pooling_kernel_size": 3,
    }
    return Shape(
        "Gemma 4 E2B",
        config,
        specials | {"<|video|>": 258884},
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        TURNS,
        "<|image|>",
        {"preprocessor_config.json": images},
        13,
        768,
        "published configuration",
        "that the tower's linear layers clamp their inputs and outputs; no audio tower",
    )


def _lfm2_vl() -> Shape:
    text = {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1000000.0,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "num_channels": 3,
        "patch_size": 16,
        "num_patches": 256,
        "vision_use_head": False,
    }
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 396,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "projector_bias": True,
        "projector_use_layernorm": True,
        "downsample_factor": 2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    images = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": 10,
        "use_thumbnail": True,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "encoder_patch_size": 16,
        "tile_size": 512,
        "max_pixels_tolerance": 2.0,
        "do_resize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"height": 512, "width": 512},
    }
    specials = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
    tiles = [(row, column) for row in range(1, 11) for column in range(1, 11) if row * column <= 10]
    specials |= {f"<|img_row_{row}_col_{column}|>": 300 + n for n, (row, column) in enumerate(tiles)}
    specials |= {"<image>": 396, "<|img_thumbnail|>": 497, "<|image_start|>": 498, "<|image_end|>": 499}
    return Shape(
        "LFM2-VL-1.6B",
        config,
        specials,
        {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
        "<|startoftext|>" + CHATML.replace("IMAGE", "<image>"),
        "<image>",
        {"preprocessor_config.json": images},
        6,
        512,
        "transformers' classes",
        "layers with attention 3, 6, 9, 11, 13, 15; SigLIP2-So400m with 26 layers",
    )


SHAPES: Mapping[str, Shape] = {
    "qwen3-vl-2b": _qwen3_vl(
        "Qwen3-VL-2B", {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
                        "intermediate_size": 6144}, 10, "transformers' classes, 4B's configuration",
        "decoder 28 x 2048, ffn 6144, 16/8 heads",
    ),
    "qwen3-vl-4b": _qwen3_vl(
        "Qwen3-VL-4B", {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
                        "intermediate_size": 9728}, 13, "published configuration",
    ),
    "gemma4-e2b": _gemma4(),
    "lfm2-vl-1.6b": _lfm2_vl(),
    "qwen3.5-2b": _qwen3_5(),
}  # fmt: skip


def write_checkpoint(folder: Path, shape: Shape, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the checkpoint into `folder`, its index last: a folder without one is unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", shape.config)
    ends = {"eos_token_id": shape.specials[shape.roles["eos_token"]]}
    write_json(folder / "generation_config.json", ends)
    for name, content in shape.files.items():
        write_json(folder / name, content)
    (folder / "chat_template.jinja").write_text(shape.template, encoding="utf-8")
    write_tokenizer(folder, shape)
    parts = shards(tensors(folder), shard_bytes)
    weight_map = dict[str, str]()
    rng = np.random.default_rng(0)
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        header, _ = layout(folder / name, [(n, "BF16", dims) for n, dims in part], {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            for tensor, dims in part:
                weight_map[tensor] = name
                source = np.random.default_rng(VOCABULARY_SEED) if tensor.endswith(VOCABULARY) else rng
                for block in blocks(dims, *_distribution(tensor, dims, shape), source):
                    file.write(block.tobytes())
    size = 2 * sum(int(np.prod(dims)) for part in parts for _, dims in part)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of transformers' model of the configuration in `folder`, a tied head aside."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForImageTextToText.from_config(config).state_dict()
    tied = config.tie_word_embeddings
    return [(name, tuple(t.shape)) for name, t in state.items() if not (tied and name == "lm_head.weight")]


def shards(named: list[tuple[str, tuple[int, ...]]], most: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = most
    for name, dims in named:
        size = 2 * int(np.prod(dims))
        if size > room and parts[-1]:
            parts.append([])
            room = most
        parts[-1].append((name, dims))
        room -= size
    return parts


def blocks(
    dims: tuple[int, ...], mean: float, deviation: float, rng: np.random.Generator
) -> Iterator[NDArray[np.uint16]]:
    """A tensor's values as bfloat16's bits, flat, a block at a time."""
    left = int(np.prod(dims))
    while left:
        values = rng.standard_normal(min(BLOCK, left), np.float32) * np.float32(deviation) + np.float32(mean)
        bits = values.view(np.uint32)
        yield ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        left -= len(values)


def _distribution(name: str, dims: tuple[int, ...], shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a tensor that keep hidden states near one and attention uneven."""
    family = shape.config["model_type"]
    if name.endswith(("_min", "_max")):  # bounds of clamped inputs and outputs, which cut nothing off
        return (-64.0 if name.endswith("_min") else 64.0), 0.0
    if name.endswith("A_log"):
        return -2.5, 1.0
    if name.endswith("layer_scalar"):
        return 1.0, 0.0
    if "norm" in name and name.endswith("weight"):
        if family.startswith("qwen3_5") and "language_model" in name and "linear_attn" not in name:
            return 0.0, 0.05  # its norms multiply by 1 more
        alone = family == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight"))
        return (0.5 if alone else 1.0), 0.05  # alone: its attention has no other scale
    if name.endswith(VOCABULARY):  # Gemma multiplies it by the root of the hidden size
        return 0.0, EMBEDDING * (dims[1] ** -0.5 if family == "gemma4" else 1)
    if len(dims) < 2:
        return 0.0, 0.05
    return 0.0, float(dims[-1] if ".experts." in name else np.prod(dims[1:])) ** -0.5  # experts first, each a matrix


def write_tokenizer(folder: Path, shape: Shape) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    taken = {*shape.specials.values()}
    free = iter(n for n in range(shape.vocab) if n not in taken)
    vocab = dict(shape.specials) | dict(zip(alphabet, free, strict=False))
    vocab |= {f"<filler-{n}>": n for n in free}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in shape.specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, **shape.roles}
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
