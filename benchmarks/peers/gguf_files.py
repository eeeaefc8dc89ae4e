"""A LLaVA checkpoint as llama.cpp reads it: a text model and an `mmproj` file, written with the gguf package.

A vocabulary is written only for a server: the harness feeds ids. Names and layouts are those that llama.cpp's loaders
ask for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers import tensors
from benchmarks.peers.picture import MEAN, STD

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
}
ELSEWHERE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
TOWER = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "pre_layrnorm.weight": "v.pre_ln.weight",
    "pre_layrnorm.bias": "v.pre_ln.bias",
}


def write_text(checkpoint: Path, target: Path, *, full: bool, template: str | None = None) -> None:
    """The decoder; matrices in float32 where `full`, else float16, vectors in float32.

    With a chat `template` the tokenizer is written, too: bytes without merges, as `make_checkpoint.py` makes it.
    """
    import gguf

    c = tensors.config(checkpoint)["text_config"]
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    out = gguf.GGUFWriter(target, "llama", use_temp_file=False)
    out.add_vocab_size(c["vocab_size"])
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    out.add_block_count(c["num_hidden_layers"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(c.get("rms_norm_eps", 1e-6))
    out.add_rope_dimension_count(c["hidden_size"] // heads)
    out.add_rope_freq_base(float(c.get("rope_theta", 10_000.0)))
    out.add_file_type(gguf.LlamaFileType.ALL_F32 if full else gguf.LlamaFileType.MOSTLY_F16)
    if template is None:
        out.add_tokenizer_model("none")
    else:
        add_tokenizer(out, checkpoint, template)
    for name, values in tensors.read(checkpoint):
        if name.startswith(tensors.TEXT):
            add_text_tensor(out, name.removeprefix(tensors.TEXT), values, (heads, kv_heads), full)
    finish(out)


def add_tokenizer(out: Any, checkpoint: Path, template: str) -> None:
    import gguf

    written = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    if written["model"]["merges"]:
        raise ValueError("only a tokenizer without merges is written")
    size = tensors.config(checkpoint)["text_config"]["vocab_size"]
    special = {token["id"]: token["content"] for token in written["added_tokens"]}
    names = {id: name for name, id in written["model"]["vocab"].items()} | special
    kinds = [gguf.TokenType.CONTROL if id in special else gguf.TokenType.NORMAL for id in range(size)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([names.get(id, f"<unused-{id}>") for id in range(size)])
    out.add_token_types(kinds)
    out.add_token_merges(["\u0100 \u0101"])  # llama.cpp wants one; bytes 0 and 1 are in no text
    ids = {name: id for id, name in special.items()}
    out.add_bos_token_id(ids["<s>"])
    out.add_eos_token_id(ids["</s>"])
    out.add_add_bos_token(True)
    out.add_chat_template(template)


def add_text_tensor(out: Any, name: str, values: Any, heads: tuple[int, int], full: bool) -> None:
    if name in ELSEWHERE:
        new = ELSEWHERE[name]
    else:
        _, _, layer, rest = name.split(".", 3)
        kind, end = rest.rsplit(".", 1)
        new = f"blk.{layer}.{LAYER[kind]}.{end}"
        if kind.endswith(("q_proj", "k_proj")):
            values = pairs_together(values, heads[kind.endswith("k_proj")])
    add(out, new, values, full)


def pairs_together(values: Any, heads: int) -> Any:
    """Rows of q or k reordered: the two of one rotation lie half a head apart in the checkpoint, side by side here."""
    rows, *rest = values.shape
    return values.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def write_mmproj(checkpoint: Path, target: Path, *, full: bool) -> None:
    """CLIP's tower up to the layer that LLaVA reads, and the projector."""
    import gguf

    whole = tensors.config(checkpoint)
    c = whole["vision_config"]
    feature = whole["vision_feature_layer"]
    layers = feature if feature >= 0 else c["num_hidden_layers"] + 1 + feature
    out = gguf.GGUFWriter(target, "clip", use_temp_file=False)
    out.add_bool("clip.has_vision_encoder", True)
    out.add_string("clip.projector_type", "mlp")
    out.add_bool("clip.use_gelu", c.get("hidden_act", "quick_gelu") == "gelu")
    for key, value in (
        ("image_size", c["image_size"]),
        ("patch_size", c["patch_size"]),
        ("embedding_length", c["hidden_size"]),
        ("feed_forward_length", c["intermediate_size"]),
        ("projection_dim", c["projection_dim"]),
        ("block_count", layers),
        ("attention.head_count", c["num_attention_heads"]),
    ):
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", c.get("layer_norm_eps", 1e-5))
    out.add_array("clip.vision.image_mean", list(MEAN))
    out.add_array("clip.vision.image_std", list(STD))
    out.add_array("clip.vision.feature_layer", [layers])
    out.add_file_type(gguf.LlamaFileType.ALL_F32 if full else gguf.LlamaFileType.MOSTLY_F16)
    for name, values in tensors.read(checkpoint):
        new = mmproj_name(name, layers)
        if new:
            add(out, new, values, full)
    finish(out)


def mmproj_name(name: str, layers: int) -> str | None:
    """llama.cpp's name of a tensor of tower or projector; None for what it does not read."""
    if name.startswith(tensors.PROJECTOR):
        number, end = name.removeprefix(tensors.PROJECTOR + "linear_").split(".")
        return f"mm.{2 * int(number) - 2}.{end}"
    if not name.startswith(tensors.TOWER):
        return None
    name = name.removeprefix(tensors.TOWER)
    if not name.startswith("encoder.layers."):
        return TOWER.get(name)
    _, _, layer, rest = name.split(".", 3)
    kind, end = rest.rsplit(".", 1)
    return f"v.blk.{layer}.{BLOCK[kind]}.{end}" if int(layer) < layers else None


def add(out: Any, name: str, values: Any, full: bool) -> None:
    import numpy as np

    half = values.ndim >= 2 and not full and "position_embd" not in name
    out.add_tensor(name, np.ascontiguousarray(values, np.float16 if half else np.float32))


def finish(out: Any) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
