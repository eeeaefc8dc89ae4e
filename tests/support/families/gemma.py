"""Small random Gemma 3 and 4 checkpoints in Hugging Face's layout."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.json_files import write_json
from tests.support.tiny import ARCHITECTURES, Tiny, random_tensor, write_weights
from tests.support.tiny_tokenizer import write_tokenizer

GEMMA3 = Tiny(
    family="gemma3", text="gemma3_text", vision="siglip", tokenizer="bytes", tied=True, head_dim=24, sliding_window=24,
    image=112, vision_layers=2, vision_head=False,
)  # fmt: skip
GEMMA4 = Tiny(
    family="gemma4", text="gemma4_text", tokenizer="bytes", names="saved", tied=True, heads=4, kv_heads=1, head_dim=16,
    sliding_window=24, layers=9, context=512, patch=16, vision_layers=2, vision_heads=2, vision_hidden=32,
)  # fmt: skip


def settings3(tiny: Tiny, image_token: int) -> dict[str, Any]:
    """The configuration in the words of the published ones, or of transformers 5."""
    hub, theta = tiny.names == "hub", tiny.theta
    scaling = {"factor": 8.0, "rope_type": "linear"} if tiny.rope == "linear" else None
    ropes: dict[str, Any] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        "full_attention": {"rope_theta": 100 * theta, **(scaling or {"rope_type": "default"})},
    }
    if hub:
        ropes = {"rope_theta": 100 * theta, "rope_local_base_freq": theta, "sliding_window_pattern": tiny.full_every}
        ropes |= {} if scaling is None else {"rope_scaling": scaling}
    else:
        kinds = ["sliding_attention"] * (tiny.full_every - 1) + ["full_attention"]
        ropes = {"rope_parameters": ropes, "layer_types": (kinds * tiny.layers)[: tiny.layers]}
    text = {
        "model_type": "gemma3_text", "vocab_size": tiny.vocab, "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn, "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads, "head_dim": tiny.head_dim, "query_pre_attn_scalar": tiny.query_scale,
        "sliding_window": tiny.sliding_window, "max_position_embeddings": tiny.context, "pad_token_id": 3,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tiny.tied, **ropes,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": tiny.vision_hidden, "intermediate_size": tiny.vision_ffn,
        "num_hidden_layers": tiny.vision_layers, "num_attention_heads": tiny.vision_heads, "image_size": tiny.image,
        "patch_size": tiny.patch, "vision_use_head": tiny.vision_head,
    }  # fmt: skip
    return {
        "model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": tiny.vision_tokens,
        "boi_token_index": image_token - 2, "eoi_token_index": image_token - 1, "image_token_index": image_token,
        "tie_word_embeddings": tiny.tied, "dtype": tiny.dtype, "architectures": [ARCHITECTURES[tiny.family]],
    }  # fmt: skip


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
        "patch_size": tiny.patch, "pooling_kernel_size": 3, "position_embedding_size": max(256, 3 * tiny.budget),
        "use_clipped_linears": tiny.clipped, "standardize": tiny.clipped,
    }  # fmt: skip
    begin, end, audio, *_ = range(image_token - len(tiny.around), image_token)
    return {
        "model_type": "gemma4", "text_config": text, "vision_config": vision, "audio_config": None,
        "image_token_id": image_token, "boi_token_id": begin, "eoi_token_id": end, "audio_token_id": audio,
        "video_token_id": image_token - 1, "tie_word_embeddings": tiny.tied, "dtype": tiny.dtype,
        "architectures": [ARCHITECTURES[tiny.family]],
    }  # fmt: skip


def make_gemma(folder: Path, tiny: Tiny, seed: int) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText

    image_token = write_tokenizer(folder, tiny)
    written = (settings if tiny.family == "gemma4" else settings3)(tiny, image_token)
    kind: dict[str, Any] = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": tiny.budget}
    kind |= {"patch_size": tiny.patch, "pooling_kernel_size": 3}
    if tiny.family == "gemma3":
        kind = {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None, "resample": 2}
        kind |= {"size": {"height": tiny.image, "width": tiny.image}, "image_seq_length": tiny.vision_tokens}
        kind |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        if tiny.crops is not None:
            kind |= {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
            kind |= {"pan_and_scan_max_num_crops": tiny.crops, "pan_and_scan_min_ratio_to_activate": 1.2}
        own = {"processor_class": "Gemma3Processor", "image_seq_length": tiny.vision_tokens}
        write_json(folder / "processor_config.json", own)
    files: dict[str, Any] = {
        "config.json": written, "preprocessor_config.json": kind,
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
    drawn = tensor if tiny.family == "gemma4" else tensor3
    tensors = {name: torch.from_numpy(drawn(name, shape, seed)) for name, shape in shapes.items()}
    write_weights(folder, tiny, {name: x.to(getattr(torch, tiny.dtype)) for name, x in tensors.items()})
    return folder


def tensor3(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """As `random_tensor`, with norms that multiply by 1 more, and a matrix that is stored as [in, out]."""
    if name.endswith("mm_input_projection_weight"):
        return np.ascontiguousarray(random_tensor(name, shape[::-1], seed).T)
    norm = "vision_tower" not in name and name.endswith("norm.weight")
    return random_tensor(name, shape, seed) - np.float32(norm)


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


def gemma3_logits(
    model: Any, rows: torch.Tensor, vision: torch.Tensor, leaves: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Next-token logits [vocab] by transformers' layers without a cache; image rows that follow each other are one.

    `leaves` are masks [n] of the rows that go on, by the layer before which the others leave.
    """
    decoder, hidden = model.model.language_model, rows
    config, positions = decoder.config, torch.arange(rows.shape[1])
    first = vision & ~torch.cat([torch.tensor([False]), vision[:-1]])
    image = torch.where(vision, first.cumsum(0), 0)
    for number, layer in enumerate(decoder.layers):
        if number + 1 in leaves:
            stays = leaves[number + 1][positions]
            hidden, positions, image = hidden[:, stays], positions[stays], image[stays]
        back = positions[:, None] - positions
        seen = (back >= 0) | ((image[:, None] == image) & (image > 0))
        kind = config.layer_types[number]
        if kind == "sliding_attention":
            seen &= back < config.sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        rope = decoder.rotary_emb(hidden, positions[None], kind)
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rope, position_ids=positions[None])
    logits: torch.Tensor = model.lm_head(decoder.norm(hidden[:, -1]))[0]
    return logits.float()


def gemma4_logits(model: Any, rows: torch.Tensor, vision: torch.Tensor, k: int | None) -> torch.Tensor:
    """Next-token logits [vocab] by transformers' layers, every row through every layer, with columns masked.

    Withdrawal at K: layer K and later ones see no image token, whichever layer's keys they read.
    """
    decoder = model.model.language_model
    config, (hidden, given) = decoder.config, rows.tensor_split([decoder.config.hidden_size], -1)
    count = rows.shape[1]
    positions = torch.arange(count)
    back = positions[:, None] - positions
    ropes = {kind: decoder.rotary_emb(hidden, positions[None], kind) for kind in set(config.layer_types)}
    held: dict[str, Any] = {}
    for number, layer in enumerate(decoder.layers):
        kind = config.layer_types[number]
        seen = back >= 0
        if kind == "sliding_attention":
            seen &= back < config.sliding_window
        if k is not None and number + 1 >= k:
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
