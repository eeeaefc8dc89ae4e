"""The decoder's graphs: token embedding, stages of consecutive layers, and the head.

One builder for the llama family; where llama, mistral and qwen2 differ, the flags of `TextConfig` say so.
Rows are [rows, hidden], batch 1. Rotation stands outside of attention, because a row's position is not
its KV slot once vision rows have left.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, MICROSOFT, Builder
from vtx.exporter.hf.config import TextConfig
from vtx.runtime import names

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


def decoder_tensors(c: TextConfig) -> Shapes:
    """Canonical names and shapes of all weights of the decoder, in the order the graphs use them."""
    yield "text.embed_tokens.weight", (c.vocab, c.hidden)
    for layer in range(1, c.layers + 1):
        yield from layer_tensors(c, layer)
    yield "text.norm.weight", (c.hidden,)
    if not c.tied:
        yield "head.weight", (c.vocab, c.hidden)


def build_embed(b: Builder, c: TextConfig) -> None:
    ids = b.input(names.IDS, ir.DataType.INT64, ["rows"])
    rows = b.op("Gather", b.stored("text.embed_tokens.weight"), ids)
    b.output(b.op("Cast", rows, to=FLOAT.value), names.HIDDEN, FLOAT, ["rows", c.hidden])


def build_head(b: Builder, c: TextConfig) -> None:
    hidden = b.input(names.HIDDEN, FLOAT, ["rows", c.hidden])
    x = _norm(b, c, hidden, "text.norm.weight")
    matrix = b.weight("text.embed_tokens.weight" if c.tied else "head.weight")
    b.output(b.op("Gemm", x, matrix, transB=1), names.LOGITS, FLOAT, ["rows", c.vocab])


def build_stage(b: Builder, c: TextConfig, first: int, last: int, kv_type: ir.DataType) -> None:
    """Layers `first` to `last`, with the KV cache of each as input and output in the same buffer."""
    half = c.head_dim // 2
    hidden = b.input(names.HIDDEN, FLOAT, ["rows", c.hidden])
    rope = (
        b.input(names.POSITIONS, ir.DataType.INT64, [1, "rows"]),
        b.input(names.COS, FLOAT, ["max_context", half]),
        b.input(names.SIN, FLOAT, ["max_context", half]),
    )
    slots = (
        b.input(names.LAST_SLOT, ir.DataType.INT32, [1]),
        b.input(names.TOTAL_SLOTS, ir.DataType.INT32, [1]),
    )
    total: ir.Value = hidden
    delta: ir.Value | None = None
    presents = []
    for layer in range(first, last + 1):
        prefix, shape = f"text.layers.{layer - 1}", (1, c.kv_heads, "capacity", c.head_dim)
        past = (b.input(names.past_key(layer), kv_type, shape), b.input(names.past_value(layer), kv_type, shape))
        x, total = _add_norm(b, c, delta, total, f"{prefix}.input_layernorm.weight")
        delta, key, value = _attention(b, c, x, f"{prefix}.self_attn", rope, slots, past, kv_type)
        presents += [(key, names.present_key(layer)), (value, names.present_value(layer))]
        x, total = _add_norm(b, c, delta, total, f"{prefix}.post_attention_layernorm.weight")
        delta = _mlp(b, c, x, f"{prefix}.mlp")
    assert delta is not None
    b.output(b.op("Add", total, delta), names.HIDDEN_OUT, FLOAT, ["rows", c.hidden])
    for present, name in presents:
        b.output(present, name, kv_type, [1, c.kv_heads, "capacity", c.head_dim])


def _norm(b: Builder, c: TextConfig, x: ir.Value, weight: str) -> ir.Value:
    return b.op("SimplifiedLayerNormalization", x, b.weight(weight), axis=-1, epsilon=c.eps, stash_type=1)


def _add_norm(
    b: Builder, c: TextConfig, delta: ir.Value | None, total: ir.Value, weight: str
) -> tuple[ir.Value, ir.Value]:
    """The residual sum and its norm, in one kernel: (norm(total + delta), total + delta)."""
    if delta is None:
        return _norm(b, c, total, weight), total
    outs = b.ops(
        "SkipSimplifiedLayerNormalization", delta, total, b.weight(weight), outputs=4, domain=MICROSOFT, epsilon=c.eps
    )
    return outs[0], outs[3]


def _rotate(b: Builder, x: ir.Value, rope: tuple[ir.Value, ir.Value, ir.Value], heads: int) -> ir.Value:
    return b.op("RotaryEmbedding", x, *rope, domain=MICROSOFT, num_heads=heads)


def _attention(
    b: Builder,
    c: TextConfig,
    x: ir.Value,
    name: str,
    rope: tuple[ir.Value, ir.Value, ir.Value],
    slots: tuple[ir.Value, ir.Value],
    past: tuple[ir.Value, ir.Value],
    kv_type: ir.DataType,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Causal attention by KV slot. Returns the projected output and the layer's K and V buffers."""
    q, k, v = (
        b.op("Unsqueeze", b.linear(x, f"{name}.{part}_proj", bias=c.qkv_bias), b.constant([0])) for part in "qkv"
    )
    q, k = _rotate(b, q, rope, c.heads), _rotate(b, k, rope, c.kv_heads)
    if kv_type != FLOAT:
        q, k, v = (b.op("Cast", part, to=kv_type.value) for part in (q, k, v))
    y, key, value = b.ops(
        "GroupQueryAttention", q, k, v, *past, *slots,
        outputs=3, domain=MICROSOFT, num_heads=c.heads, kv_num_heads=c.kv_heads, scale=c.head_dim**-0.5,
    )  # fmt: skip
    if kv_type != FLOAT:
        y = b.op("Cast", y, to=FLOAT.value)
    rows = b.op("Squeeze", y, b.constant([0]))
    return b.linear(rows, f"{name}.o_proj", bias=c.o_bias), key, value


def _mlp(b: Builder, c: TextConfig, x: ir.Value, name: str) -> ir.Value:
    gate = activate(b, b.linear(x, f"{name}.gate_proj", bias=c.mlp_bias), c.activation)
    up = b.linear(x, f"{name}.up_proj", bias=c.mlp_bias)
    return b.linear(b.op("Mul", gate, up), f"{name}.down_proj", bias=c.mlp_bias)
