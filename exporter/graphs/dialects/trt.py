"""The dialect of TensorRT 10.15 or later and TensorRT-RTX: standard operators of opset 24, every type written down.

These releases are strongly typed, so the graph states the precision of the arithmetic. A cache has a fixed number of
slots; K and V are scattered into it, and a mask in the graph hides the empty slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, Builder, Dialect
from vtx.exporter.graphs.dialects.heads import HeadsApart, join_heads, split_heads
from vtx.runtime.bundle.spec import names


@dataclass(frozen=True)
class Trt(Dialect):
    """ONNX opset 24, with caches of `capacity` slots. Norms are float32 whatever `compute` is, as in Hugging Face."""

    name: str = "trt"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 24})
    ir_version: int = 10

    def norm(self, b: Builder, x: ir.Value, weight: str, eps: float) -> ir.Value:
        y = b.op("RMSNormalization", b.to_float32(x), b.weight(weight, FLOAT), axis=-1, epsilon=eps)
        return b.from_float32(y)

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType) -> TrtAttention:
        assert self.capacity is not None
        return TrtAttention(b, c, kv_type, self.capacity)

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: int, head_dim: int,
        seen: ir.Value | None = None, *, causal: bool = False,
    ) -> ir.Value:  # fmt: skip
        q, k, v = (split_heads(b, x, heads, head_dim) for x in (q, k, v))
        mask = []
        if seen is not None:  # [1, 1, 1, n] as [1, 1, n, n]
            tokens = b.op("Shape", q, start=2, end=3)
            mask = [b.op("Expand", seen, b.op("Concat", b.constant([1, 1]), tokens, b.constant([1]), axis=0))]
        y = b.op("Attention", q, k, v, *mask, scale=head_dim**-0.5, is_causal=int(causal))
        return join_heads(b, y, heads * head_dim)


class TrtAttention(HeadsApart):
    """`StageAttention` by TensorRT's Attention, whose inputs are separate heads and a mask, without a cache.

    Its causal flag counts from the first slot, which is wrong for every chunk but the first.
    """

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, capacity: int) -> None:
        super().__init__(b, c, kv_type)
        self._capacity = capacity
        shape = [capacity, c.head_dim // 2]
        self._tables = [b.from_float32(b.input(name, FLOAT, shape)) for name in (names.COS, names.SIN)]
        total = b.op("Cast", b.input(names.TOTAL_SLOTS, ir.DataType.INT32, [1]), to=ir.DataType.INT64.value)
        tokens = b.op("Shape", self._positions, start=1, end=2)
        self._first = b.op("Sub", total, tokens)
        # [1, 1, tokens, capacity]: a token sees the slots up to its own
        zero, one = b.constant(np.array(0)), b.constant(np.array(1))
        own = b.op("Add", b.op("Range", zero, b.op("Squeeze", tokens), one), self._first)
        slots = b.op("Range", zero, b.constant(np.array(capacity)), one)
        own = b.op("Unsqueeze", own, b.constant([1]))
        if self._seen_slots is not None:
            own = b.op("Sub", self._seen_slots, one)
        seen = b.op("GreaterOrEqual", own, b.op("Unsqueeze", slots, b.constant([0])))
        self._mask = b.op("Unsqueeze", seen, b.constant([0, 1]))

    def rotate(self, x: ir.Value, heads: int) -> ir.Value:
        return self._b.op("RotaryEmbedding", x, *self._tables, self._positions)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        b, (past_key, past_value) = self._b, self._past(layer, self._capacity)
        compute, kv_type = b.dialect.compute, self._kv_type
        if compute != kv_type:  # cast the few new tokens, not the cache
            q, k, v = (b.op("Cast", x, to=kv_type.value) for x in (q, k, v))
        key = b.op("TensorScatter", past_key, k, self._first, axis=2)
        value = b.op("TensorScatter", past_value, v, self._first, axis=2)
        self._keep(layer, key, value)
        y = b.op("Attention", q, key, value, self._mask, scale=self._c.head_dim**-0.5)
        return y if compute == kv_type else b.op("Cast", y, to=compute.value)

    def finish(self) -> None:
        self._finish(self._capacity)
