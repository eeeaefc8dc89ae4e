"""The decoder's graphs: token embedding, stages of consecutive layers, and the head.

One builder for the llama family, whose members differ in the flags of `TextConfig`.
Hidden states are [tokens, hidden], batch 1. Rotation is outside of attention, because a token's position is not its KV
slot after image tokens have been withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, Builder, StageAttention
from vtx.runtime.bundle.spec import names

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def layer_tensors(c: TextConfig, layer: int) -> Shapes:
    """Canonical names and shapes of the weights of `layer`, counted from 1."""
    p = f"text.layers.{layer - 1}"
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield f"{p}.input_layernorm.weight", (c.hidden,)
    yield f"{p}.post_attention_layernorm.weight", (c.hidden,)
    for name, out, into, bias in (
        ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
        ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
        ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
        ("self_attn.o_proj", c.hidden, q, c.o_bias),
        ("mlp.gate_proj", c.ffn, c.hidden, c.mlp_bias),
        ("mlp.up_proj", c.ffn, c.hidden, c.mlp_bias),
        ("mlp.down_proj", c.hidden, c.ffn, c.mlp_bias),
    ):
        yield f"{p}.{name}.weight", (out, into)
        if bias:
            yield f"{p}.{name}.bias", (out,)
    for name in ("q_norm", "k_norm") if c.qk_norm else ():
        yield f"{p}.self_attn.{name}.weight", (c.head_dim,)


def decoder_tensors(c: TextConfig) -> Shapes:
    """Canonical names and shapes of all weights of the decoder, in the order the graphs use them."""
    yield "text.embed_tokens.weight", (c.vocab, c.hidden)
    for layer in range(1, c.layers + 1):
        yield from layer_tensors(c, layer)
    yield "text.norm.weight", (c.hidden,)
    if not c.tied:
        yield "head.weight", (c.vocab, c.hidden)


def build_embed(b: Builder, c: TextConfig) -> None:
    ids = b.input(names.IDS, ir.DataType.INT64, ["tokens"])
    hidden = b.op("Gather", b.stored("text.embed_tokens.weight"), ids)
    b.output(b.op("Cast", hidden, to=FLOAT.value), names.HIDDEN, FLOAT, ["tokens", c.hidden])


def build_head(b: Builder, c: TextConfig) -> None:
    hidden = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    x = b.dialect.norm(b, hidden, "text.norm.weight", c.eps)
    logits = b.to_float32(b.project(x, "text.embed_tokens.weight" if c.tied else "head.weight"))
    b.output(logits, names.LOGITS, FLOAT, ["tokens", c.vocab])


def build_stage(b: Builder, c: TextConfig, first: int, last: int, kv_type: ir.DataType, *, query: bool = False) -> None:
    """Layers `first` to `last`, with the KV cache of each as input and output; with `query` also the last one's q."""
    total = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    attention = b.dialect.stage_attention(b, c, kv_type)
    delta: ir.Value | None = None
    for layer in range(first, last + 1):
        prefix = f"text.layers.{layer - 1}"
        norm, mlp = f"{prefix}.input_layernorm.weight", f"{prefix}.mlp"
        if delta is None:
            x = b.dialect.norm(b, total, norm, c.eps)
        else:
            x, total = b.dialect.add_norm(b, delta, total, norm, c.eps)
        delta, q = _attention(b, c, x, f"{prefix}.self_attn", attention, layer)
        x, total = b.dialect.add_norm(b, delta, total, f"{prefix}.post_attention_layernorm.weight", c.eps)
        gate = activate(b, b.linear(x, f"{mlp}.gate_proj", bias=c.mlp_bias), c.activation)
        up = b.linear(x, f"{mlp}.up_proj", bias=c.mlp_bias)
        delta = b.linear(b.op("Mul", gate, up), f"{mlp}.down_proj", bias=c.mlp_bias)
    assert delta is not None
    b.output(b.to_float32(b.op("Add", total, delta)), names.HIDDEN_OUT, FLOAT, ["tokens", c.hidden])
    if query:
        b.output(b.to_float32(attention.join(q)), names.QUERY, FLOAT, ["tokens", c.heads * c.head_dim])
    attention.finish()


def _attention(
    b: Builder, c: TextConfig, x: ir.Value, name: str, attention: StageAttention, layer: int
) -> tuple[ir.Value, ir.Value]:
    """The layer's addition to the residual sum, and its rotated queries."""
    parts = []
    for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        y = b.linear(x, f"{name}.{part}_proj", bias=c.qkv_bias)
        if c.qk_norm and part != "v":  # of each head
            normed = b.dialect.norm(b, b.reshape(y, -1, heads, c.head_dim), f"{name}.{part}_norm.weight", c.eps)
            y = b.reshape(normed, -1, heads * c.head_dim)
        y = attention.split(y, heads)
        parts.append(y if part == "v" else attention.rotate(y, heads))
    q, k, v = parts
    attended = attention.join(attention.attend(q, k, v, layer))
    return b.linear(attended, f"{name}.o_proj", bias=c.o_bias), q
