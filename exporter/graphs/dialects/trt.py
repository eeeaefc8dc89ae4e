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
from vtx.exporter.graphs.builder import FLOAT, INT32, INT64, Builder, Dialect, Heads
from vtx.exporter.graphs.dialects.heads import HeadsApart, for_every_head, join_heads, split_heads
from vtx.runtime.bundle.spec import names

HEADS_FIRST = [0, 2, 1, 3]  # of [1, slots, kv_heads, head_dim], and back
LARGEST = (1 << 31) - 1  # numbers of a tensor (NvInfer.h of 10.3: "less than 2^31 elements")
UNSEEN = -65504.0  # a masked score, 0 after the softmax; float16 holds it
NO_SLOT = 1 << 30  # the number of a slot that no token sees


@dataclass(frozen=True)
class Trt(Dialect):
    """ONNX opset 24, tables of `max_context` rows. Norms are float32 whatever `compute` is, as in Hugging Face."""

    name: str = "trt"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 24})
    ir_version: int = 10
    max_context: int = 0
    branches: bool = False  # CUDA does not record them
    largest: int | None = LARGEST
    zero_points: bool = False
    joins: bool = True

    def norm(self, b: Builder, x: ir.Value, weight: str | int, eps: float) -> ir.Value:
        y = b.op("RMSNormalization", b.to_float32(x), b.weight(weight, FLOAT), axis=-1, epsilon=eps)
        return b.from_float32(y)

    def cache_shape(self, kv_heads: int, slots: str, head_dim: int) -> tuple[int | str, ...]:
        return (1, slots, kv_heads, head_dim)

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        return b.transpose(keys, *HEADS_FIRST)

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> TrtAttention:
        return TrtAttention(b, c, kv_type, layers, self.max_context)

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: Heads, seen: ir.Value | None = None
    ) -> ir.Value:
        value_size = heads.value_size or heads.size
        q, k = (split_heads(b, x, heads.count, heads.size) for x in (q, k))
        v = split_heads(b, v, heads.count, value_size)
        if value_size < heads.size:  # TensorRT's heads have one size
            v = b.op("Pad", v, b.constant([0] * 7 + [heads.size - value_size]))
        mask = []
        if seen is not None:  # [1, 1, 1, n] as [1, 1, n, n]
            tokens = b.size(q, 2)
            mask = [b.op("Expand", seen, b.op("Concat", b.constant([1, 1]), tokens, b.constant([1]), axis=0))]
        y = b.op("Attention", q, k, v, *mask, scale=heads.size**-0.5, is_causal=int(heads.causal))
        if value_size < heads.size:
            y = b.slice(y, 0, value_size, 3)
        return join_heads(b, y, heads.count * value_size)


class TrtAttention(HeadsApart):
    """`StageAttention` by TensorRT's Attention, whose inputs are separate heads and a mask, without a cache.

    Its causal flag counts from the first slot, which is wrong for every chunk but the first. There is one mask for
    layers that slide, one for the others, and one for each source of layers without keys and values of their own.

    Positions [batch, each] give the number of conversations: one with any number of tokens, or several with one each.
    """

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range, max_context: int) -> None:
        super().__init__(b, c, kv_type, ("batch", "each"))
        tables = [((names.COS, names.SIN), c.head_dim)]
        self._first: ir.Value | None = None  # the first slot that each token sees in layers that slide
        if c.sliding is not None:
            tables.append(((names.SLIDING_COS, names.SLIDING_SIN), c.sliding.head_dim))
            self._first = b.input(names.FIRST_SLOT, INT64, self._sizes)
        self._apart = b.op("Shape", self._positions)
        self._tables = [
            [b.from_float32(b.input(name, FLOAT, [max_context, width // 2])) for name in pair] for pair, width in tables
        ]
        has_own = any(c.source(layer) == layer for layer in layers)
        self._total = self._whole(b.input(names.TOTAL_SLOTS, INT32, ["batch"])) if has_own else None
        self._masks: dict[bool, ir.Value] = {}  # by sliding
        self._sources: dict[int, tuple[ir.Value, ir.Value, ir.Value]] = {}

    def _whole(self, x: ir.Value) -> ir.Value:
        """A number of each conversation as int64 [batch, 1]."""
        return self._b.cast(self._b.unsqueeze(x, 1), INT64)

    def split(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        b = self._b
        sizes = b.op("Concat", self._apart, b.constant([heads, self._c.heads_of(layer)]), axis=0)
        return b.transpose(b.op("Reshape", x, sizes), *HEADS_FIRST)

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        return self._b.op("RotaryEmbedding", x, *self._tables[self._c.slides(layer)], self._positions)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        b = self._b
        past = self._past(layer, "slots")
        sliding = self._c.slides(layer)
        new = [b.transpose(self._in_kv_type(x), *HEADS_FIRST) for x in (k, v)]
        if sliding not in self._masks:
            assert self._total is not None
            filled = b.op("Sub", self._total, self._tokens())
            slots = b.numbers(b.size(past[0], 1))
            past_slots = b.op("Where", b.op("Less", slots, filled), slots, b.constant([NO_SLOT]))
            numbers = self._own(filled)
            self._masks[sliding] = self._mask(b.op("Concat", past_slots, numbers, axis=1), numbers, sliding=sliding)
        self._keep(layer, *new)
        joined = [b.op("Concat", *pair, axis=1) for pair in zip(past, new, strict=True)]
        key, value = (b.transpose(x, *HEADS_FIRST) for x in joined)
        return self._attend_masked(q, key, value, self._masks[sliding], layer)

    def read(self, q: ir.Value, layer: int) -> ir.Value:
        b = self._b
        source = self._c.source(layer)
        if source not in self._sources:
            last = self._whole(b.input(names.source_slot(source), INT32, ["batch"]))
            past = self._past(source, f"slots.{source}")
            slots = b.unsqueeze(b.numbers(b.size(past[0], 1)), 0)
            one = b.constant([1])
            numbers = self._own(b.op("Sub", b.op("Add", last, one), self._tokens()))
            key, value = (b.transpose(x, *HEADS_FIRST) for x in past)
            self._sources[source] = key, value, self._mask(slots, numbers, sliding=self._c.slides(source))
        return self._attend_masked(q, *self._sources[source], layer)

    def _in_kv_type(self, x: ir.Value) -> ir.Value:
        """The few new tokens are cast, not the cache."""
        return x if self._b.dialect.compute == self._kv_type else self._b.cast(x, self._kv_type)

    def _attend_masked(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        """Attention to K and V [1, kv_heads, all slots, head_dim] of the KV type, in the arithmetic's type."""
        compute = self._b.dialect.compute
        y = self._attended(self._in_kv_type(q), k, v, mask, layer)
        return y if compute == self._kv_type else self._b.cast(y, compute)

    def _attended(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        if self._c.attention_softcap is not None:  # TensorRT's Attention has none
            return self._by_products(q, k, v, self._added(mask), layer)
        return self._b.op("Attention", q, k, v, mask, scale=self._c.scale(layer))

    def _by_products(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        """Attention from products around a softmax, to which `mask` is added."""
        b = self._b
        c = self._c
        scale = b.constant(np.array(c.scale(layer), self._kv_type.numpy()))
        q = b.op("Mul", q, scale)  # before the product, which may exceed float16
        k, v = (for_every_head(b, c, x, layer) for x in (k, v))  # with fewer heads or five axes none is fused
        scores = b.op("MatMul", q, b.transpose(k, 0, 1, 3, 2))
        if c.attention_softcap is not None:
            scores = b.bounded(scores, c.attention_softcap, self._kv_type)
        return b.op("MatMul", b.op("Softmax", b.op("Add", scores, mask), axis=-1), v)

    def _added(self, seen: ir.Value) -> ir.Value:
        """A mask as what is added to products, of the KV type."""
        kind = self._kv_type.numpy()
        return self._b.op("Where", seen, *(self._b.constant(np.array(x, kind)) for x in (0, UNSEEN)))

    def _tokens(self) -> ir.Value:
        """The number of a conversation's tokens [1]."""
        return self._b.size(self._positions, 1)

    def _own(self, filled: ir.Value) -> ir.Value:
        """The tokens' own slots [batch, each], which follow `filled` [batch, 1] ones."""
        return self._b.op("Add", self._b.numbers(self._tokens()), filled)

    def _mask(self, slots: ir.Value, own: ir.Value, *, sliding: bool) -> ir.Value:
        """[batch, 1, each, slots]: a token sees the slots up to its own, or `seen_slots`; `sliding`: the window.

        `slots` [batch or 1, slots] are their numbers, NO_SLOT of those that are not filled.
        """
        b = self._b
        across = b.constant([1, 3])
        slot = b.unsqueeze(slots, 1, 2)
        last = own
        if self._seen_slots is not None:
            last = b.op("Sub", self._seen_slots, b.constant(1))
        visible = b.op("LessOrEqual", slot, b.op("Unsqueeze", last, across))
        if sliding:
            assert self._first is not None
            visible = b.op("And", visible, b.op("GreaterOrEqual", slot, b.op("Unsqueeze", self._first, across)))
        return self._as_mask(visible)

    def _as_mask(self, seen: ir.Value) -> ir.Value:
        return seen

    def finish(self) -> None:
        self._finish("tokens")
