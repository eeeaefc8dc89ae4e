"""Small random Gemma 4 checkpoints in Hugging Face's layout."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny import ARCHITECTURES, Tiny, random_tensor
from tests.support.tiny_tokenizer import write_tokenizer

GEMMA4 = Tiny(
    family="gemma4", text="gemma4_text", tokenizer="bytes", names="saved", tied=True, heads=4, kv_heads=1, head_dim=16,
    sliding_window=24, layers=9, context=512, patch=16, vision_layers=2, vision_heads=2, vision_hidden=32,
)  # fmt: skip
BUDGET = 70  # tokens of an image


def settings(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration in the words of the published ones."""
    full = {n for n in range(tiny.layers) if n % tiny.full_every == tiny.full_every - 1} | {tiny.layers - 1}
    text = {
        "model_type": "gemma4_text", "vocab_size": tiny.vocab, "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim, "global_head_dim": 2 * (tiny.head_dim or 16), "sliding_window": tiny.sliding_window,
        "layer_types": ["full_attention" if n in full else "sliding_attention" for n in range(tiny.layers)],
        "num_kv_shared_layers": tiny.shared, "use_double_wide_mlp": tiny.shared > 0,
        "hidden_size_per_layer_input": tiny.per_layer, "vocab_size_per_layer_input": tiny.vocab,
        "max_position_embeddings": tiny.context, "rms_norm_eps": 1e-6, "final_logit_softcapping": tiny.softcap,
        "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tiny.tied,
        "attention_k_eq_v": False, "enable_moe_block": False, "use_bidirectional_attention": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": tiny.theta},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100 * tiny.theta,
            },
        },
    }  # fmt: skip
    vision = {
        "model_type": "gemma4_vision", "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads,
        "num_key_value_heads": tiny.vision_heads, "head_dim": tiny.vision_hidden // tiny.vision_heads,
        "patch_size": tiny.patch, "pooling_kernel_size": 3, "position_embedding_size": 256,
        "use_clipped_linears": tiny.clipped, "standardize": tiny.clipped,
    }  # fmt: skip
    begin, end, audio, *_ = range(image_token - len(tiny.around), image_token)
    return {
        "model_type": "gemma4", "text_config": text, "vision_config": vision, "audio_config": None,
        "image_token_id": image_token, "boi_token_id": begin, "eoi_token_id": end, "audio_token_id": audio,
        "video_token_id": image_token - 1, "tie_word_embeddings": tiny.tied, "dtype": tiny.dtype,
        "architectures": [ARCHITECTURES[tiny.family]],
    }  # fmt: skip


def make_gemma4(folder: Path, tiny: Tiny, seed: int) -> Path:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    image_token = write_tokenizer(folder, tiny)
    written = settings(tiny, image_token)
    kind = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": BUDGET, "patch_size": tiny.patch}
    files: dict[str, Any] = {
        "config.json": written, "preprocessor_config.json": kind | {"pooling_kernel_size": 3},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        shapes = {n: tuple(t.shape) for n, t in AutoModelForImageTextToText.from_config(config).state_dict().items()}
    if tiny.tied:
        del shapes["lm_head.weight"]
    tensors = {name: torch.from_numpy(tensor(name, shape, seed)) for name, shape in shapes.items()}
    tensors = {name: x.to(getattr(torch, tiny.dtype)) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """As `random_tensor`, with the sizes that Gemma's own scales need."""
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(("_min", "_max")):
        bound = drawn.uniform(1, 2)
        return np.array(-bound if name.endswith("_min") else bound, np.float32)
    if name.endswith("layer_scalar"):
        return np.array([drawn.uniform(0.5, 1.2)], np.float32)
    noise = drawn.standard_normal(shape, dtype=np.float32)
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # attention has no other scale
        return (1 + noise * 0.2) * np.float32(0.5)
    if name.endswith(("position_embedding_table", "embed_tokens_per_layer.weight", "std_bias")):
        return noise * 0.3
    if name.endswith("std_scale"):
        return np.float32(1) + noise * 0.2
    return random_tensor(name, shape, seed)


def with_layer_inputs(decoder: Any, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Embedded rows [1, n, hidden] with the inputs of all layers behind them, [1, n, hidden + layers * width]."""
    if not decoder.config.hidden_size_per_layer_input:
        return rows
    given = decoder.project_per_layer_inputs(rows, decoder.get_per_layer_inputs(ids, rows))
    return torch.cat([rows, given.flatten(2)], -1)


def gemma4_logits(model: Any, rows: torch.Tensor, vision: torch.Tensor, k: int | None) -> torch.Tensor:
    """Next-token logits [vocab] by transformers' layers, every row through every layer, with columns masked.

    Withdrawal at K: image tokens run in layers 1 to K - 1 alone. A layer sees them if they ran in the layer whose keys
    it reads: in the last one of its kind that shares nothing, for a layer that shares.
    """
    decoder = model.model.language_model
    config, (hidden, given) = decoder.config, rows.tensor_split([decoder.config.hidden_size], -1)
    count, first = rows.shape[1], config.num_hidden_layers - config.num_kv_shared_layers
    positions = torch.arange(count)
    back = positions[:, None] - positions
    ropes = {kind: decoder.rotary_emb(hidden, positions[None], kind) for kind in set(config.layer_types)}
    held: dict[str, Any] = {}
    for number, layer in enumerate(decoder.layers):
        kind = config.layer_types[number]
        source = number if number < first else max(n for n in range(first) if config.layer_types[n] == kind)
        seen = back >= 0
        if kind == "sliding_attention":
            seen &= back < config.sliding_window
        if k is not None and source + 1 >= k:
            seen &= ~vision[None]
        mask = torch.zeros(count, count).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        width = config.hidden_size_per_layer_input
        own = given[..., number * width : (number + 1) * width] if width else None
        hidden = layer(
            hidden,
            own,
            shared_kv_states=held,
            position_embeddings=ropes[kind],
            attention_mask=mask,
            position_ids=positions[None],
        )
    logits: torch.Tensor = model.lm_head(decoder.norm(hidden[:, -1]))[0]
    cap = config.final_logit_softcapping
    return logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)
