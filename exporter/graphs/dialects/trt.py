"""The dialect of TensorRT 10.15 or later and TensorRT-RTX: standard operators of opset 24, every type written down.

These releases are strongly typed, so the graph states the precision of the arithmetic. A cache has any number of slots,
one after the other, and a mask in the graph hides those that are not filled; K and V of the new tokens are outputs.
TensorRT's own update of a cache in place needs a fixed number of slots: in every layer, that of the longest context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, Builder, Dialect
from vtx.exporter.graphs.dialects.heads import HeadsApart, join_heads, split_heads
from vtx.runtime.bundle.spec import names

HEADS_FIRST = [0, 2, 1, 3]  # of [1, slots, kv_heads, head_dim], and back


@dataclass(frozen=True)
class Trt(Dialect):
    """ONNX opset 24, tables of `max_context` rows. Norms are float32 whatever `compute` is, as in Hugging Face."""

    name: str = "trt"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 24})
    ir_version: int = 10
    max_context: int = 0
    branches: bool = False  # CUDA does not record them

    def norm(self, b: Builder, x: ir.Value, weight: str | int, eps: float) -> ir.Value:
        y = b.op("RMSNormalization", b.to_float32(x), b.weight(weight, FLOAT), axis=-1, epsilon=eps)
        return b.from_float32(y)

    def cache_shape(self, kv_heads: int, slots: str, head_dim: int) -> tuple[int | str, ...]:
        return (1, slots, kv_heads, head_dim)

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        return b.op("Transpose", keys, perm=HEADS_FIRST)

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> TrtAttention:
        assert c.sliding is None, "refused for these layers"
        return TrtAttention(b, c, kv_type, self.max_context)

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

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, max_context: int) -> None:
        super().__init__(b, c, kv_type)
        shape = [max_context, c.head_dim // 2]
        self._tables = [b.from_float32(b.input(name, FLOAT, shape)) for name in (names.COS, names.SIN)]
        self._total = b.op("Cast", b.input(names.TOTAL_SLOTS, ir.DataType.INT32, [1]), to=ir.DataType.INT64.value)
        self._mask: ir.Value | None = None

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        return self._b.op("RotaryEmbedding", x, *self._tables, self._positions)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        b, (past_key, past_value) = self._b, self._past(layer, "slots")
        compute, kv_type = b.dialect.compute, self._kv_type
        if compute != kv_type:  # cast the few new tokens, not the cache
            q, k, v = (b.op("Cast", x, to=kv_type.value) for x in (q, k, v))
        if self._mask is None:
            self._mask = self._seen(past_key)
        new = [b.op("Transpose", x, perm=HEADS_FIRST) for x in (k, v)]
        self._keep(layer, *new)
        joined = [b.op("Concat", past, x, axis=1) for past, x in zip((past_key, past_value), new, strict=True)]
        key_value = [b.op("Transpose", x, perm=HEADS_FIRST) for x in joined]
        y = self._attended(q, key_value[0], key_value[1], self._mask, layer)
        return y if compute == kv_type else b.op("Cast", y, to=compute.value)

    def _attended(self, q: ir.Value, k: ir.Value, v: ir.Value, seen: ir.Value, layer: int) -> ir.Value:
        """Attention of q to K and V [1, heads or kv_heads, slots + tokens, head_dim], all of the KV type."""
        return self._b.op("Attention", q, k, v, seen, scale=self._c.scale(layer))

    def read(self, q: ir.Value, layer: int) -> ir.Value:
        raise AssertionError("refused for these layers")

    def _seen(self, past: ir.Value) -> ir.Value:
        """[1, 1, tokens, slots + tokens]: a token sees the filled slots up to its own, or up to `seen_slots`."""
        b = self._b
        zero, one = b.constant(np.array(0)), b.constant(np.array(1))
        tokens, slots = b.op("Shape", self._positions, start=1, end=2), b.op("Shape", past, start=1, end=2)
        filled = b.op("Sub", self._total, tokens)
        own = b.op("Add", b.op("Range", zero, b.op("Squeeze", tokens), one), filled)
        every = b.op("Range", zero, b.op("Squeeze", slots), one)
        every = b.op("Where", b.op("Less", every, filled), every, b.constant([1 << 30]))
        last = b.op("Unsqueeze", own, b.constant([1]))
        if self._seen_slots is not None:
            last = b.op("Sub", self._seen_slots, one)
        slot = b.op("Unsqueeze", b.op("Concat", every, own, axis=0), b.constant([0]))
        return b.op("Unsqueeze", b.op("LessOrEqual", slot, last), b.constant([0, 1]))

    def finish(self) -> None:
        self._finish("tokens")
