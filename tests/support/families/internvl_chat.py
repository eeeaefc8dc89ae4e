"""Small random InternVL-Chat checkpoints in their authors' layout: a tiny InternVL's weights, put together anew."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.support.families.original import write_tokenizer_model
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, make
from tests.support.tiny_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

ADDED = ("<|im_start|>", "<img>", "</img>", "<|im_end|>", "<IMG_CONTEXT>")
DECODERS = {"llama": "InternLM2ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_VISION = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection.": "embeddings.patch_embedding.",
    "encoder.layer.": "encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_": ".ls",
}
_TEXT = {
    "embed_tokens.": "tok_embeddings.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}
_PROJECTOR = {"layer_norm.": "mlp1.0.", "linear_1.": "mlp1.1.", "linear_2.": "mlp1.3."}
INTERNLM = Tiny(family="internvl_chat", vision="internvl", feature_layer=-1, image=112, context=1024)


def counterpart(tiny: Tiny) -> Tiny:
    """The checkpoint in Hugging Face's layout that has the same weights."""
    return replace(tiny, family="internvl", names="new", tokenizer="bytes", shards=1)


def make_internvl_chat(folder: Path, tiny: Tiny, seed: int) -> Path:
    """Write the checkpoint into `folder`: with an InternLM2 for a llama, pixel shuffle v2; with a Qwen2 v1."""
    from safetensors.torch import load_file, save_file

    with TemporaryDirectory() as other:
        theirs = make(Path(other) / "hf", counterpart(tiny), seed)
        weights = load_file(theirs / "model.safetensors")
        config = read_json(theirs / "config.json")
    internlm = tiny.text == "llama"
    if internlm:
        pieces = write_tokenizer_model(folder / "tokenizer.model", tiny.vocab - len(ADDED))
        assert pieces + len(ADDED) == tiny.vocab
        write_json(folder / "added_tokens.json", {token: pieces + n for n, token in enumerate(ADDED)})
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "InternLM2Tokenizer"})
    else:
        last = write_tokenizer(folder, tiny)
        write_json(folder / "added_tokens.json", {"<IMG_CONTEXT>": last, "<|im_end|>": last - 1})
        shutil.rmtree(folder / "additional", ignore_errors=True)
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    text = {key: value for key, value in config["text_config"].items() if value is not None}
    text |= {"rope_theta": text.pop("rope_parameters")["rope_theta"], "architectures": [DECODERS[tiny.text]]}
    text |= (
        {"model_type": "internlm2", "bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
        if internlm
        else {}
    )
    vision = {key: config["vision_config"][key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vision |= {"num_attention_heads": tiny.vision_heads, "image_size": tiny.image, "patch_size": tiny.patch}
    vision |= {"norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": tiny.attention_bias}
    top = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "code.Model"},
    }
    top |= {"llm_config": text, "vision_config": vision, "force_image_size": tiny.image, "downsample_ratio": 0.5}
    top |= {"dynamic_image_size": True, "use_thumbnail": True, "max_dynamic_patch": 6, "select_layer": -1}
    top |= {"template": "internlm2-chat", "ps_version": "v2"} if internlm else {"template": "internvl2_5"}
    write_json(folder / "config.json", top)
    save_file(dict(renamed(weights, tiny.text, tiny.kv_heads)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def renamed(weights: dict[str, torch.Tensor], text: str, kv_heads: int) -> Any:
    """The tensors by their authors' names, q, k and v together."""
    import torch

    for name, tensor in weights.items():
        part, _, rest = name.removeprefix("model.").partition(".")
        if ".k_proj." in name or ".v_proj." in name:
            continue
        others = [weights[name.replace(".q_proj.", f".{other}_proj.")] for other in "kv" if ".q_proj." in name]
        if part == "vision_tower":
            yield (
                "vision_model." + _by(_VISION, rest).replace(".attention.q_proj.", ".attn.qkv."),
                torch.cat([tensor, *others]),
            )
        elif part == "multi_modal_projector":
            yield _by(_PROJECTOR, rest), tensor
        elif text != "llama":
            yield (f"language_model.{name}" if part == "lm_head" else f"language_model.model.{rest}"), tensor
            for other, its in zip("kv", others, strict=False):
                yield f"language_model.model.{rest}".replace(".q_proj.", f".{other}_proj."), its
        elif part == "lm_head":
            yield "language_model.output.weight", tensor
        elif others:
            parts = [matrix.view(kv_heads, -1, matrix.shape[-1]) for matrix in (tensor, *others)]
            fused = torch.cat(parts, 1).reshape(-1, tensor.shape[-1])
            yield "language_model.model." + rest.replace(".self_attn.q_proj.", ".attention.wqkv."), fused
        else:
            yield "language_model.model." + _by(_TEXT, rest), tensor


def _by(names: dict[str, str], name: str) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name
