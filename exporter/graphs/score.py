"""The score graph: the attention of some tokens to each KV slot, in a stage's last layer.

It has no weights and serves every layer. A method that prunes by attention runs it between two stages.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, Builder
from vtx.runtime.bundle.spec import names
from vtx.runtime.precision import KV_DTYPES

UNSEEN = np.array(-1e30, np.float32)  # a masked product, 0 after the softmax


def build_score(b: Builder, c: TextConfig, kv_type: ir.DataType) -> None:
    """Head-mean softmax attention of the last tokens of a cache over its filled slots, their sum and maximum.

    `query` [tokens, heads * head_dim] are the rotated queries of the tokens in the last slots, so token i sees the
    slots up to total_slots - tokens + i. The largest intermediate is [heads, tokens, slots] float32. If a dialect
    fixes the number of slots, a mask hides the empty ones, and the outputs are as long as the buffer, 0 beyond the
    filled slots (MustDrop Eq. 8 and 10).
    """
    capacity = b.dialect.capacity
    query = b.input(names.QUERY, FLOAT, ["tokens", c.heads * c.head_dim])
    key = b.input(names.KEY, kv_type, [1, c.kv_heads, capacity or "capacity", c.head_dim])
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
    mean = b.op(
        "ReduceSum", b.op("Div", weights, b.constant(np.array(c.heads, np.float32))), b.constant([0]), keepdims=0
    )
    if b.dialect.opsets[""] < 18:  # which made the axes an input
        largest = b.op("ReduceMax", mean, axes=[0], keepdims=0)
    else:
        largest = b.op("ReduceMax", mean, b.constant([0]), keepdims=0)
    length = capacity or "slots"
    b.output(b.op("ReduceSum", mean, b.constant([0]), keepdims=0), names.ATTENTION_SUM, FLOAT, [length])
    b.output(largest, names.ATTENTION_MAX, FLOAT, [length])
