"""The decoder's graphs: token embedding, stages of consecutive layers, the head, and the score of attention.

One builder for the llama family, whose members differ in the flags of `TextConfig`.
Hidden states are [tokens, hidden], batch 1. Rotation is outside of attention, because a token's position is not its KV
slot after image tokens have been withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.graphs.activations import activate
from vtx.exporter.graphs.builder import FLOAT, Builder, Shapes, StageAttention, linear_tensors
from vtx.exporter.graphs.short_convolution import Convolutions, convolution_tensors
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import TokenInput
from vtx.runtime.precision import KV_DTYPES


def layer_tensors(c: TextConfig, layer: int) -> Shapes:
    """Canonical names and shapes of the weights of `layer`, counted from 1."""
    p = f"text.layers.{layer - 1}"
    q, kv, convolved = c.heads * c.head_dim, c.kv_heads * c.head_dim, layer in c.conv_layers
    yield f"{p}.input_layernorm.weight", (c.hidden,)
    yield f"{p}.post_attention_layernorm.weight", (c.hidden,)
    mixers = (
        ("self_attn.q_proj", q, c.hidden, c.qkv_bias), ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
        ("self_attn.v_proj", kv, c.hidden, c.qkv_bias), ("self_attn.o_proj", c.hidden, q, c.o_bias),
    )  # fmt: skip
    for name, out, into, bias in (
        *(() if convolved else mixers),
        ("mlp.gate_proj", c.ffn, c.hidden, c.mlp_bias), ("mlp.up_proj", c.ffn, c.hidden, c.mlp_bias),
        ("mlp.down_proj", c.hidden, c.ffn, c.mlp_bias),
    ):  # fmt: skip
        yield from linear_tensors(f"{p}.{name}", out, into, bias=bias)
    if convolved:
        yield from convolution_tensors(c, f"{p}.conv")
    for name in ("q_norm", "k_norm") if c.qk_norm and not convolved else ():
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
    hidden = b.op("Cast", b.op("Gather", b.stored("text.embed_tokens.weight"), ids), to=FLOAT.value)
    if c.scaled_embedding:
        hidden = b.op("Mul", hidden, b.constant(np.array(c.hidden**0.5, np.float32)))
    b.output(hidden, names.HIDDEN, FLOAT, ["tokens", c.hidden])


def build_head(b: Builder, c: TextConfig) -> None:
    hidden = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    x = b.dialect.norm(b, hidden, "text.norm.weight", c.eps)
    logits = b.to_float32(b.project(x, "text.embed_tokens.weight" if c.tied else "head.weight"))
    b.output(logits, names.LOGITS, FLOAT, ["tokens", c.vocab])


def build_stage(
    b: Builder, c: TextConfig, first: int, last: int, kv_type: ir.DataType, *, query: bool = False,
    inputs: Mapping[int, TokenInput] | None = None,
) -> None:  # fmt: skip
    """Layers `first` to `last`, with the KV cache of each as input and output; with `query` also the last one's q.

    `inputs` are added to the hidden states after layers, by their number.
    """
    total = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    attention = b.dialect.stage_attention(b, c, kv_type)
    convolved = [layer for layer in range(first, last + 1) if layer in c.conv_layers]
    convolutions = Convolutions(b, c, convolved) if convolved else None
    delta: ir.Value | None = None
    for layer in range(first, last + 1):
        prefix = f"text.layers.{layer - 1}"
        norm, mlp = f"{prefix}.input_layernorm.weight", f"{prefix}.mlp"
        if delta is None:
            x = b.dialect.norm(b, total, norm, c.eps)
        else:
            x, total = b.dialect.add_norm(b, delta, total, norm, c.eps)
        if convolutions is not None and layer in convolved:
            delta = convolutions.mix(x, f"{prefix}.conv", layer)
        else:
            delta, q = _attention(b, c, x, f"{prefix}.self_attn", attention, layer)
        x, total = b.dialect.add_norm(b, delta, total, f"{prefix}.post_attention_layernorm.weight", c.eps)
        gate = activate(b, b.linear(x, f"{mlp}.gate_proj", bias=c.mlp_bias), c.activation)
        up = b.linear(x, f"{mlp}.up_proj", bias=c.mlp_bias)
        delta = b.linear(b.op("Mul", gate, up), f"{mlp}.down_proj", bias=c.mlp_bias)
        if inputs and layer in inputs:
            given = b.input(names.token_input(inputs[layer].name), FLOAT, ["tokens", c.hidden])
            total = b.op("Add", total, b.from_float32(given))
    assert delta is not None
    b.output(b.to_float32(b.op("Add", total, delta)), names.HIDDEN_OUT, FLOAT, ["tokens", c.hidden])
    if query:
        b.output(b.to_float32(attention.join(q)), names.QUERY, FLOAT, ["tokens", c.heads * c.head_dim])
    attention.finish()
    if convolutions is not None:
        convolutions.finish()


def _attention(
    b: Builder, c: TextConfig, x: ir.Value, name: str, attention: StageAttention, layer: int
) -> tuple[ir.Value, ir.Value]:
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


UNSEEN = np.array(-1e30, np.float32)  # a masked product, 0 after the softmax


def build_score(b: Builder, c: TextConfig, kv_type: ir.DataType) -> None:
    """Head-mean softmax attention of the last tokens of a cache over its filled slots, their sum and maximum.

    `query` [tokens, heads * head_dim] are the rotated queries of the tokens in the last slots, so token i sees the
    slots up to total_slots - tokens + i. The largest intermediate is [heads, tokens, slots] float32
    (MustDrop Eq. 8 and 10).
    """
    query = b.input(names.QUERY, FLOAT, ["tokens", c.heads * c.head_dim])
    key = b.input(names.KEY, kv_type, b.dialect.cache_shape(c.kv_heads, "capacity", c.head_dim))
    total = b.op("Cast", b.input(names.TOTAL_SLOTS, ir.DataType.INT32, [1]), to=ir.DataType.INT64.value)
    key = b.dialect.filled(b, key, total)
    if kv_type != FLOAT:
        key = b.op("Cast", key, to=FLOAT.value)
    if KV_DTYPES[kv_type.numpy().name].scaled:
        key = b.op("Mul", key, b.input(names.KEY_SCALE, FLOAT, [1, c.kv_heads, 1, c.head_dim]))
    tokens, slots = b.op("Shape", query, start=0, end=1), b.op("Shape", key, start=2, end=3)
    # scaled products [heads, tokens, slots] of the queries with their groups' keys [kv_heads, slots, head_dim]
    scaled = b.op("Mul", query, b.constant(np.array(c.head_dim**-0.5, np.float32)))
    grouped = b.op("Transpose", b.reshape(scaled, 0, c.kv_heads, -1, c.head_dim), perm=[1, 2, 0, 3])
    keys = b.op("Transpose", b.op("Squeeze", key, b.constant([0])), perm=[0, 2, 1])
    products = b.op("MatMul", b.reshape(grouped, c.kv_heads, -1, c.head_dim), keys)
    products = b.op("Reshape", products, b.op("Concat", b.constant([c.heads]), tokens, slots, axis=0))
    # a token sees the slots [tokens, slots] up to its own
    zero, one = b.constant(np.array(0, np.int64)), b.constant(np.array(1, np.int64))
    every = b.op("Range", zero, b.op("Squeeze", slots), one)
    own = b.op("Add", b.op("Range", zero, b.op("Squeeze", tokens), one), b.op("Sub", total, tokens))
    seen = b.op("LessOrEqual", b.op("Unsqueeze", every, b.constant([0])), b.op("Unsqueeze", own, b.constant([1])))
    weights = b.op("Softmax", b.op("Where", seen, products, b.constant(UNSEEN)), axis=-1)
    shares = b.op("Div", weights, b.constant(np.array(c.heads, np.float32)))
    mean = b.op("ReduceSum", shares, b.constant([0]), keepdims=0)
    if b.dialect.opsets[""] < 18:  # which made the axes an input
        largest = b.op("ReduceMax", mean, axes=[0], keepdims=0)
    else:
        largest = b.op("ReduceMax", mean, b.constant([0]), keepdims=0)
    b.output(b.op("ReduceSum", mean, b.constant([0]), keepdims=0), names.ATTENTION_SUM, FLOAT, ["slots"])
    b.output(largest, names.ATTENTION_MAX, FLOAT, ["slots"])
