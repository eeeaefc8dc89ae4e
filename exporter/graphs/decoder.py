"""The decoder's graphs: token embedding, stages of consecutive layers, the head, and the score of attention.

One builder for the llama family, whose members differ in the flags of `TextConfig`.
Hidden states are [tokens, hidden], batch 1. Rotation is outside of attention, because a token's position is not its KV
slot after image tokens have been withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.activations import activate, gated_mlp
from vtx.exporter.graphs.builder import FLOAT, INT32, INT64, Builder, StageAttention
from vtx.exporter.graphs.gated_delta import mix_by_delta_rule
from vtx.exporter.graphs.mixture import mix_experts
from vtx.exporter.graphs.short_convolution import mix_by_convolution
from vtx.exporter.graphs.states import States
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import TokenInput
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEADS
from vtx.runtime.precision import KV_DTYPES
from vtx.tools.model.decoder import PER_LAYER, PER_LAYER_NORM, PER_LAYER_PROJECTION


def build_embed(b: Builder, c: TextConfig) -> None:
    ids = b.input(names.IDS, INT64, ["tokens"])
    hidden = b.cast(b.op("Gather", b.stored(EMBEDDING), ids), FLOAT)
    if c.scaled_embedding:
        hidden = b.op("Mul", hidden, b.single(c.hidden**0.5))
    if c.per_layer is not None:
        add_layer_inputs(b, c, hidden, _rows(b, PER_LAYER, ids))
    b.output(hidden, names.HIDDEN, FLOAT, ["tokens", c.hidden])


def add_layer_inputs(b: Builder, c: TextConfig, hidden: ir.Value, rows: ir.Value) -> None:
    """Outputs of each layer's input [tokens, per_layer] from embedded tokens and their rows of the table, or one row.

    In float32: the sum of both is small beside its parts.
    """
    width = c.per_layer
    assert width is not None
    weight = b.weight(PER_LAYER_PROJECTION, FLOAT)
    projection = b.op("Mul", b.op("Gemm", hidden, weight, transB=1), b.single(c.hidden**-0.5))
    square = b.op("Pow", (projection := b.reshape(projection, -1, c.layers, width)), b.single(2))
    if b.dialect.opsets[""] < 18:
        mean = b.op("ReduceMean", square, axes=[-1], keepdims=1)
    else:
        mean = b.op("ReduceMean", square, b.constant([-1]), keepdims=1)
    size = b.op("Sqrt", b.op("Add", mean, b.single(c.eps)))
    normed = b.op("Mul", b.op("Div", projection, size), b.weight(PER_LAYER_NORM, FLOAT))
    embedding = b.cast(rows, FLOAT)
    embedding = b.op("Mul", b.reshape(embedding, -1, c.layers, width), b.single(width**0.5))
    total = b.op("Mul", b.op("Add", normed, embedding), b.single(2**-0.5))
    for layer in range(1, c.layers + 1):
        layer_inputs = b.op("Gather", total, b.constant(layer - 1), axis=1)
        b.output(layer_inputs, names.token_input(f"layer{layer}"), FLOAT, ["tokens", width])


def _rows(b: Builder, table: str, ids: ir.Value) -> ir.Value:
    """Rows of a stored table [rows, width]; of one that is larger than a tensor may be, from parts of it."""
    rows, width = b.location(table).shape
    largest = b.dialect.largest
    if largest is None or rows * width <= largest:
        return b.op("Gather", b.stored(table), ids)
    repeats = largest // width
    parts_of = list[ir.Value]()
    for first in range(0, rows, repeats):
        count = min(repeats, rows - first)
        start = b.constant(first)
        within = b.op("Max", b.op("Sub", ids, start), b.constant(0))
        within = b.op("Min", within, b.constant(count - 1))
        part = b.op("Gather", b.stored_rows(table, first, count), within)
        behind = b.unsqueeze(b.op("GreaterOrEqual", ids, start), 1)
        parts_of.append(b.op("Where", behind, part, parts_of[-1]) if parts_of else part)
    return parts_of[-1]


def build_head(b: Builder, c: TextConfig) -> None:
    hidden = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    x = b.dialect.norm(b, hidden, "text.norm.weight", c.eps)
    parts = [b.project(x, name) for name in HEADS if b.holds(name)] or [b.project(x, EMBEDDING)]
    logits = b.to_float32(b.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0])
    if c.softcap is not None:
        logits = b.bounded(logits, c.softcap)
    b.output(logits, names.LOGITS, FLOAT, ["tokens", c.vocab])
    if b.dialect.name in names.ON_GPU:
        b.output(_best(b, logits, c.vocab), names.BEST, INT32, ["tokens"])


def _best(b: Builder, logits: ir.Value, vocab: int) -> ir.Value:
    """The id of the largest of each token's logits [tokens], -1 if one of them is not finite.

    Not ArgMax, because engines differ in the one of equal logits that they choose; float16 arithmetic gives equal ones.
    """
    last = b.constant([-1])
    bounds = [b.constant(np.array(n, np.int32)) for n in (0, vocab, 1, -1)]
    largest = b.op("Equal", logits, b.op("ReduceMax", logits, last, keepdims=1))
    first = b.op("Where", largest, b.op("Range", *bounds[:3]), bounds[1])
    finite = b.op("LessOrEqual", b.op("Abs", logits), b.single(float(np.finfo(np.float32).max)))
    return b.op("ReduceMin", b.op("Where", finite, first, bounds[3]), last, keepdims=0)


def _gated_input(b: Builder, c: TextConfig, x: ir.Value, layer_input: ir.Value, prefix: str) -> ir.Value:
    """The part of a layer's own input that is added, by a gate of the hidden states."""
    gate = activate(b, b.linear(x, f"{prefix}.per_layer_input_gate", bias=False), c.activation)
    projected = b.linear(b.op("Mul", gate, layer_input), f"{prefix}.per_layer_projection", bias=False)
    return b.dialect.norm(b, projected, f"{prefix}.post_per_layer_input_norm.weight", c.eps)


def _mix_by_states(b: Builder, c: TextConfig, states: States, x: ir.Value, prefix: str, layer: int) -> ir.Value:
    """A layer's mixer that keeps a state: a convolution, with the gated delta rule behind it if the decoder has one."""
    if c.delta is None:
        return mix_by_convolution(b, c, states, x, f"{prefix}.conv", layer)
    return mix_by_delta_rule(b, c, states, x, f"{prefix}.linear_attn", layer)


def _feed_forward(b: Builder, c: TextConfig, x: ir.Value, name: str, layer: int) -> ir.Value:
    """A layer's MLP, or its experts."""
    mixture = c.mixture_of(layer)
    if mixture is None:
        return gated_mlp(b, x, name, c.activation, bias=c.mlp_bias)
    return mix_experts(b, c, mixture, x, name)


def build_stage(
    b: Builder,
    c: TextConfig,
    layers: range,
    kv_type: ir.DataType,
    *,
    query: bool = False,
    inputs: Mapping[int, TokenInput] | None = None,
) -> None:
    """The layers of these numbers, with the KV cache of each as input and output; with `query` also the last one's q.

    `inputs` are added to the hidden states after layers, by their number, or are each layer's own.
    """
    total = b.from_float32(b.input(names.HIDDEN, FLOAT, ["tokens", c.hidden]))
    attention = b.dialect.stage_attention(b, c, kv_type, layers)
    convolved = sorted({*layers} & {*c.conv_layers})
    states = States(b, c, convolved) if convolved else None
    delta: ir.Value | None = None
    for layer in layers:
        prefix = f"text.layers.{layer - 1}"
        norm = f"{prefix}.input_layernorm.weight"
        if delta is None:
            x = b.dialect.norm(b, total, norm, c.eps)
        else:
            x, total = b.dialect.add_norm(b, delta, total, norm, c.eps)
        if states is not None and layer in convolved:
            delta = _mix_by_states(b, c, states, x, prefix, layer)
        else:
            delta, q = _attention(b, c, x, f"{prefix}.self_attn", attention, layer)
        before = "post_attention_layernorm"
        if c.post_norms:
            delta = b.dialect.norm(b, delta, f"{prefix}.{before}.weight", c.eps)
            before = "pre_feedforward_layernorm"
        x, total = b.dialect.add_norm(b, delta, total, f"{prefix}.{before}.weight", c.eps)
        delta = _feed_forward(b, c, x, f"{prefix}.mlp", layer)
        if c.post_norms:
            delta = b.dialect.norm(b, delta, f"{prefix}.post_feedforward_layernorm.weight", c.eps)
        given = None if inputs is None else inputs.get(layer)
        if given is not None:
            layer_input = b.from_float32(b.input(names.token_input(given.name), FLOAT, ["tokens", given.width]))
            if c.per_layer is None:
                total = b.op("Add", total, layer_input)
            else:
                total = b.op("Add", total, delta)
                delta = _gated_input(b, c, total, layer_input, prefix)
        if c.layer_scale:
            total = b.op("Mul", b.op("Add", total, delta), b.weight(f"{prefix}.layer_scalar"))
            delta = None
    out = total if delta is None else b.op("Add", total, delta)
    b.output(b.to_float32(out), names.HIDDEN_OUT, FLOAT, ["tokens", c.hidden])
    if query:
        last = layers[-1]
        b.output(b.to_float32(attention.join(q, last)), names.QUERY, FLOAT, ["tokens", c.heads * c.heads_of(last)])
    attention.finish()
    if states is not None:
        states.finish()


def _attention(
    b: Builder, c: TextConfig, x: ir.Value, name: str, attention: StageAttention, layer: int
) -> tuple[ir.Value, ir.Value]:
    parts = list[ir.Value]()
    width = c.heads_of(layer)
    gate = None
    heads_of = {"q": c.heads}
    if c.source(layer) == layer:
        heads_of |= {"k": c.kv_heads, "v": c.kv_heads}
    projections = b.linears(x, [f"{name}.{part}_proj" for part in heads_of], bias=c.qkv_bias)
    for (part, heads), y in zip(heads_of.items(), projections, strict=True):
        if c.gated and part == "q":  # each head's query and gate stand side by side
            sizes = b.constant([width, width])
            y, gate = b.ops("Split", b.reshape(y, -1, heads, 2 * width), sizes, outputs=2, axis=-1)
            gate = b.op("Sigmoid", b.reshape(gate, -1, heads * width))
        if c.v_norm if part == "v" else c.qk_norm:  # of each head
            normed = b.dialect.norm(
                b, b.reshape(y, -1, heads, width), width if part == "v" else f"{name}.{part}_norm.weight", c.eps
            )
            if c.head_order and part != "v":
                normed = b.op("Gather", normed, b.constant(c.head_order), axis=-1)
            y = b.reshape(normed, -1, heads * width)
        y = attention.split(y, heads, layer)
        parts.append(y if part == "v" else attention.rotate(y, heads, layer))
    q, *others_of = parts
    attended = attention.join(
        attention.attend(q, others_of[0], others_of[1], layer) if others_of else attention.read(q, layer), layer
    )
    if gate is not None:
        attended = b.op("Mul", attended, gate)
    if c.head_gates:
        gates = b.unsqueeze(b.op("Sigmoid", b.linear(x, f"{name}.g_proj", bias=False)), 2)
        attended = b.reshape(b.op("Mul", b.reshape(attended, -1, c.heads, width), gates), -1, c.heads * width)
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
    total = b.cast(b.input(names.TOTAL_SLOTS, INT32, [1]), INT64)
    key = b.dialect.filled(b, key, total)
    if kv_type != FLOAT:
        key = b.cast(key, FLOAT)
    if KV_DTYPES[kv_type.numpy().name].scaled:
        key = b.op("Mul", key, b.input(names.KEY_SCALE, FLOAT, [1, c.kv_heads, 1, c.head_dim]))
    tokens = b.size(query, 0)
    slots = b.size(key, 2)
    # scaled products [heads, tokens, slots] of the queries with their groups' keys [kv_heads, slots, head_dim]
    scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
    scaled = b.op("Mul", query, b.single(scale))
    grouped = b.transpose(b.reshape(scaled, 0, c.kv_heads, -1, c.head_dim), 1, 2, 0, 3)
    keys = b.transpose(b.squeeze(key, 0), 0, 2, 1)
    products = b.op("MatMul", b.reshape(grouped, c.kv_heads, -1, c.head_dim), keys)
    products = b.op("Reshape", products, b.op("Concat", b.constant([c.heads]), tokens, slots, axis=0))
    # a token sees the slots [tokens, slots] up to its own
    zero = b.constant(0)
    one = b.constant(1)
    every = b.op("Range", zero, b.op("Squeeze", slots), one)
    slot = b.op("Add", b.op("Range", zero, b.op("Squeeze", tokens), one), b.op("Sub", total, tokens))
    visible = b.op("LessOrEqual", b.unsqueeze(every, 0), b.unsqueeze(slot, 1))
    weights = b.op("Softmax", b.op("Where", visible, products, b.constant(UNSEEN)), axis=-1)
    shares = b.op("Div", weights, b.single(c.heads))
    mean = b.sum(shares, 0)
    if b.dialect.opsets[""] < 18:  # which made the axes an input
        largest = b.op("ReduceMax", mean, axes=[0], keepdims=0)
    else:
        largest = b.op("ReduceMax", mean, b.constant([0]), keepdims=0)
    b.output(b.sum(mean, 0), names.ATTENTION_SUM, FLOAT, ["slots"])
    b.output(largest, names.ATTENTION_MAX, FLOAT, ["slots"])
