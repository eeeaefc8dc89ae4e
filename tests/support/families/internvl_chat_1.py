"""InternVL-Chat 1.0: original LLaVA with an InternViT-6B tower."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.families.original import TOWER
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, random_tensor

INTERNVL_CHAT_1 = Tiny(family="llava_llama", aspect="pad", context=1024, image=336, patch=42)  # 8 x 8 patches
TRAINED = 224 // 42  # positions a side
INTERNVIT = "InternViT-6B-224px"  # by which it is known
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 42}


def write_internvit(folder: Path) -> Any:
    """Write a small InternViT-6B, and return transformers' own of the same weights."""
    from transformers import InternVLVisionConfig, InternVLVisionModel

    config = InternVLVisionConfig(
        **SIZES, image_size=[TRAINED * 42] * 2, norm_type="rms_norm", use_qk_norm=True, attention_bias=False,
        use_mean_pooling=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    model: Any = InternVLVisionModel(config)
    values = {name: torch.from_numpy(random_tensor(name, tuple(t.shape), 0)) for name, t in model.state_dict().items()}
    model.load_state_dict(values)
    model.train(False)
    shutil.rmtree(folder)
    folder.mkdir()
    written = {
        "embeddings.class_embedding": values["embeddings.cls_token"],
        "embeddings.position_embedding": values["embeddings.position_embeddings"],
        "embeddings.patch_embedding.weight": values["embeddings.patch_embeddings.projection.weight"],
        "embeddings.patch_embedding.bias": values["embeddings.patch_embeddings.projection.bias"],
    }
    for layer in range(4):
        theirs, ours = f"encoder.layer.{layer}.", f"encoder.layers.{layer}."
        attention = theirs + "attention."
        thirds = [values[f"{attention}{part}_proj.weight"] for part in "qkv"]
        written[ours + "attn.qkv.weight"] = torch.cat(thirds)
        for old, new in (
            ("layernorm_before.weight", "norm1.weight"), ("layernorm_after.weight", "norm2.weight"),
            ("lambda_1", "ls1"), ("lambda_2", "ls2"), ("attention.q_norm.weight", "attn.q_norm.weight"),
            ("attention.k_norm.weight", "attn.k_norm.weight"),
            *((f"attention.projection_layer.{kind}", f"attn.proj.{kind}") for kind in ("weight", "bias")),
            *((f"mlp.{name}.{kind}",) * 2 for name in ("fc1", "fc2") for kind in ("weight", "bias")),
        ):  # fmt: skip
            written[ours + new] = values[theirs + old]
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    more = {"model_type": "intern_vit_6b", "image_size": 224, "qk_normalization": True, "qkv_bias": False}
    write_json(folder / "config.json", SIZES | more)
    return model


def with_internvit(folder: Path) -> Any:
    """Give a checkpoint in LLaVA's layout InternVL-Chat 1.0's tower; returns transformers' own of its weights."""
    config = read_json(folder / "config.json")
    named = folder / INTERNVIT
    (folder / TOWER).rename(named)
    write_json(folder / "config.json", config | {"mm_vision_tower": f"x/{INTERNVIT}", "mm_vision_select_layer": -2})
    return write_internvit(named)
