"""Write a LLaVA checkpoint of true shape with random weights, in bounded memory.

    python benchmarks/make_checkpoint.py 1b build/llava-1b
    python benchmarks/make_checkpoint.py llava-1.5-7b build/llava-7b
    python benchmarks/make_checkpoint.py llava-next-7b build/llava-next-7b
    python benchmarks/make_checkpoint.py internvl3-8b build/internvl3-8b
    python benchmarks/make_checkpoint.py video-llava-7b build/video-llava-7b
    python benchmarks/make_checkpoint.py video-small build/video-small      # for clips.py: no model's shape
    python benchmarks/make_checkpoint.py kv-of-7b build/kv-of-7b            # for conversations.py: a 7B's K and V

Float16 safetensors shards, with a byte-level tokenizer of the full vocabulary size, image processor settings and a chat
template. Tensors have the public hub's names for LLaVA-1.5, and for other families the names that vtx gives them, which
its exporter takes as they are. The answers are noise; shapes, sizes and speeds are real. LLaVA-1.5's embeddings are
large, and the rows of its head are those 2^22 / hidden tokens before: one next token is clear, as it mostly is in a
trained model, and does not depend on rounding. Where everything is random, the largest logits nearly tie.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from vtx.runtime.bundle.safetensors import layout

SHARD_BYTES = 4 << 30
BLOCK = 1 << 22
EMBEDDING = 4.0  # standard deviation; all layers together add about 2.5
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
IMAGE_TOKENS = {"internvl": "<IMG_CONTEXT>"}
WORDS = "{% for part in message['content'] if part['type'] == 'text' %}"
VIDEOS = "{% for part in message['content'] if part['type'] == 'video' %}<video>\n{% endfor %}"
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder; the tower is CLIP-L/336, for InternVL InternViT-300M, for Video-LLaVA CLIP-L/224 twice."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int = 32064
    family: str = "llava"
    kv_heads: int | None = None
    image_token: int = 32000
    tower: tuple[int, int, int, int] = (24, 1024, 4096, 16)  # layers, hidden, ffn, heads
    head_dim: int | None = None  # None: hidden / heads


SHAPES = {
    "1b": Shape(16, 2048, 5504, 16),
    "llava-1.5-7b": Shape(32, 4096, 11008, 32),
    "llava-1.5-7b-2": Shape(2, 4096, 11008, 32),  # cut to two layers
    "kv-of-7b": Shape(32, 64, 128, 32, head_dim=128, tower=(2, 64, 128, 2)),
    "0.5b": Shape(24, 896, 4864, 14, 151674, kv_heads=2, image_token=151667, tower=(4, 256, 1024, 4)),
    "llava-1.5-13b": Shape(40, 5120, 13824, 40),
    "llava-next-7b": Shape(32, 4096, 11008, 32, family="llava_next"),
    "video-llava-7b": Shape(32, 4096, 11008, 32, family="video_llava"),
    "video-small": Shape(16, 1024, 2816, 16, family="video_llava", tower=(4, 256, 1024, 4)),
    "internvl3-8b": Shape(28, 3584, 18944, 28, 151674, "internvl", 4, 151667),
}


def vision_tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    layers, hidden, ffn, _ = s.tower
    root = "vision_tower.vision_model."
    yield root + "embeddings.class_embedding", (hidden,)
    yield root + "embeddings.patch_embedding.weight", (hidden, 3, 14, 14)
    yield root + "embeddings.position_embedding.weight", (577, hidden)
    norms = [f"{root}{name}" for name in ("pre_layrnorm", "post_layernorm")]
    for layer in range(layers):
        prefix = f"{root}encoder.layers.{layer}."
        norms += [prefix + "layer_norm1", prefix + "layer_norm2"]
        for name, out, into in (
            *((f"self_attn.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out")),
            ("mlp.fc1", ffn, hidden),
            ("mlp.fc2", hidden, ffn),
        ):
            yield f"{prefix}{name}.weight", (out, into)
            yield f"{prefix}{name}.bias", (out,)
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)
    for number, into in ((1, hidden), (2, s.hidden)):
        yield f"multi_modal_projector.linear_{number}.weight", (s.hidden, into)
        yield f"multi_modal_projector.linear_{number}.bias", (s.hidden,)


def text_tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim = s.head_dim or s.hidden // s.heads
    attended = s.heads * head_dim
    yield "language_model.model.embed_tokens.weight", (s.vocab, s.hidden)
    for layer in range(s.layers):
        prefix = f"language_model.model.layers.{layer}."
        for part in "qkv":
            heads = s.heads if part == "q" else s.kv_heads or s.heads
            yield f"{prefix}self_attn.{part}_proj.weight", (heads * head_dim, s.hidden)
        yield f"{prefix}self_attn.o_proj.weight", (s.hidden, attended)
        yield f"{prefix}mlp.gate_proj.weight", (s.ffn, s.hidden)
        yield f"{prefix}mlp.up_proj.weight", (s.ffn, s.hidden)
        yield f"{prefix}mlp.down_proj.weight", (s.hidden, s.ffn)
        yield f"{prefix}input_layernorm.weight", (s.hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (s.hidden,)
    yield "language_model.model.norm.weight", (s.hidden,)
    yield "language_model.lm_head.weight", (s.vocab, s.hidden)


def canonical_tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor that an export of the written configuration needs."""
    from vtx.exporter.checkpoint.families.registry import read_config
    from vtx.exporter.graphs import vision

    config = read_config(json.loads((folder / "config.json").read_text()))
    return [*vision.vision_tensors(config), *vision.video_tensors(config), *config.text.tensors()]


def blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[NDArray[np.float16]]:
    """Random values of a tensor, flat, a bounded number at a time; norms near one, matrices by their fan-in."""
    count = int(np.prod(shape))
    norm = "norm" in name and name.endswith("weight")
    scale = 0.05 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5
    embedding = name.endswith("embed_tokens.weight")
    head = name == "language_model.lm_head.weight"
    for number, start in enumerate(range(0, count, BLOCK)):
        if embedding or head:  # the head's block has the values of the embedding's block before it
            rng = np.random.default_rng((number - head) % -(-count // BLOCK))
        values = rng.standard_normal(min(BLOCK, count - start), np.float32) * (EMBEDDING if embedding else scale)
        yield (values + norm).astype(np.float16)


def shards(tensors: list[tuple[str, tuple[int, ...]]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = SHARD_BYTES
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        if size > room and parts[-1]:
            parts.append([])
            room = SHARD_BYTES
        parts[-1].append((name, shape))
        room -= size
    return parts


def write_weights(folder: Path, s: Shape) -> None:
    parts = shards([*vision_tensors(s), *text_tensors(s)] if s.family == "llava" else canonical_tensors(folder))
    rng = np.random.default_rng(0)
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        header, _ = layout(folder / name, [(n, "F16", shape) for n, shape in part])
        started = time.monotonic()
        with (folder / name).open("wb") as file:
            file.write(header)
            for tensor, shape in part:
                weight_map[tensor] = name
                for block in blocks(tensor, shape, rng):
                    file.write(block.tobytes())
        print(
            f"{name}: {(folder / name).stat().st_size / 1e9:.2f} GB in {time.monotonic() - started:.0f} s", flush=True
        )
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_tokenizer(folder: Path, s: Shape) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {char: 3 + i for i, char in enumerate(alphabet)}
    vocab |= {f"<filler-{i}>": i for i in range(len(vocab), s.image_token)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = "<unk>", "<s>", "</s>", IMAGE_TOKENS.get(s.family, "<image>"), "<pad>", "<img>", "</img>", "<video>"
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    template = TEMPLATE.replace(WORDS, VIDEOS + WORDS) if s.family == "video_llava" else TEMPLATE
    (folder / "chat_template.jinja").write_text(template.replace("<image>", IMAGE_TOKENS.get(s.family, "<image>")))


def write_config(folder: Path, s: Shape) -> None:
    layers, hidden, ffn, heads = s.tower
    vision = {
        "model_type": "clip_vision_model",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    }
    text = {
        "model_type": "llama",
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads or s.heads,
        "vocab_size": s.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        **({} if s.head_dim is None else {"head_dim": s.head_dim}),
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float16",
        "image_token_index": s.image_token,
        "vision_feature_layer": -2,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_config": vision,
        "text_config": text,
    }
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    }
    if s.family == "llava_next":
        config |= {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_grid_pinpoints": PINPOINTS,
        }
        image["image_processor_type"] = "LlavaNextImageProcessor"
    if s.family == "video_llava":
        config |= {
            "architectures": ["VideoLlavaForConditionalGeneration"],
            "model_type": "video_llava",
            "video_token_index": s.image_token + 4,
            "vision_config": vision | {"image_size": 224},
        }
        image = {"image_processor_type": "VideoLlavaImageProcessor"}  # whose defaults are 224 x 224
    if s.family == "internvl":
        config = {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": s.image_token,
            "vision_config": {"model_type": "internvl_vision"},
            "text_config": text | {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        }
        image = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 448, "width": 448},
            "min_patches": 1,
            "max_patches": 12,
        }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(folder / "preprocessor_config.json", image)
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    write_json(folder / "processor_config.json", processor)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    write_config(args.out, SHAPES[args.shape])
    write_tokenizer(args.out, SHAPES[args.shape])
    write_weights(args.out, SHAPES[args.shape])


if __name__ == "__main__":
    main()
