"""The dialect for all other engines: operators that every engine supports, and caches that grow by concatenation.

Rotation and attention have the forms that engines fuse: rotate-half on [1, heads, tokens, head_dim], and products
around a softmax with the scale and the mask between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, INT64, Builder, Dialect, Heads, StageAttention
from vtx.exporter.graphs.dialects.heads import HeadsApart, for_every_head, join_heads, split_heads
from vtx.runtime.bundle.spec import names

MAX_SIZE = 1 << 30
UNSEEN = -65504.0  # a masked score, 0 after the softmax; float16 holds it


@dataclass(frozen=True)
class Plain(Dialect):
    """ONNX opset 17 in float32, which engines may convert to a lower precision."""

    name: str = "plain"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 17})
    ir_version: int = 8

    def norm(self, b: Builder, x: ir.Value, weight: str | int, eps: float) -> ir.Value:
        x = b.to_float32(x)
        square = b.op("Mul", x, x)
        if self.opsets[""] < 18:  # which made the axes an input
            mean = b.op("ReduceMean", square, axes=[-1], keepdims=1)
        else:
            mean = b.op("ReduceMean", square, b.constant([-1]), keepdims=1)
        size = b.op("Sqrt", b.op("Add", mean, b.single(eps)))
        return b.from_float32(b.op("Mul", b.op("Div", x, size), b.weight(weight, FLOAT)))

    def gelu(self, b: Builder, x: ir.Value, *, tanh: bool) -> ir.Value:
        if tanh:
            cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.scalar(0.044715))
            inner = b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.scalar(math.sqrt(2 / math.pi))))
        else:
            inner = b.op("Erf", b.op("Div", x, b.scalar(math.sqrt(2))))
        return b.op("Mul", b.op("Mul", x, b.op("Add", inner, b.scalar(1))), b.scalar(0.5))

    def mish(self, b: Builder, x: ir.Value) -> ir.Value:
        return b.op("Mul", x, b.op("Tanh", b.op("Softplus", x)))

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> StageAttention:
        return PlainAttention(b, c, kv_type)

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: Heads, seen: ir.Value | None = None
    ) -> ir.Value:
        value_size = heads.value_size or heads.size
        q, k = (split_heads(b, x, heads.count, heads.size) for x in (q, k))
        v = split_heads(b, v, heads.count, value_size)
        if heads.causal:
            every = b.numbers(b.size(q, 2))
            seen = b.op("GreaterOrEqual", b.unsqueeze(every, 1), every)
        mask = None if seen is None else b.op("Where", seen, b.scalar(0), b.scalar(UNSEEN))
        return join_heads(b, _weighted(b, _scores(b, q, k, heads.size**-0.5), v, mask), heads.count * value_size)


class PlainAttention(HeadsApart):
    """`StageAttention` from its parts. A cache grows by the slots of the new tokens."""

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType) -> None:
        super().__init__(b, c, kv_type, (1, "tokens"))
        self._turns = [self._turn(names.COS, names.SIN, c.head_dim)]
        self._first: ir.Value | None = None
        if c.sliding is not None:
            width = c.sliding.head_dim
            self._turns.append(self._turn(names.SLIDING_COS, names.SLIDING_SIN, width))
            self._first = b.input(names.FIRST_SLOT, INT64, [1, "tokens"])
        self._masks: dict[tuple[int | None, bool], ir.Value] = {}
        self._sources: dict[int, tuple[ir.Value, ir.Value]] = {}

    def _turn(self, cos: str, sin: str, head_dim: int) -> list[ir.Value]:
        tables = (self._b.input(name, FLOAT, ["max_context", head_dim // 2]) for name in (cos, sin))
        return [at_positions(self._b, table, self._positions) for table in tables]

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        cos, sin = self._turns[self._c.slides(layer)]
        return rotate_halves(self._b, x, cos, sin, self._c.heads_of(layer))

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        past_key, past_value = self._past(layer, "past")
        sliding = self._c.slides(layer)
        if (None, sliding) not in self._masks:
            self._masks[None, sliding] = self._causal(q, past_key, sliding=sliding)
        keys = self._append(past_key, k)
        values = self._append(past_value, v)
        self._keep(layer, self._narrow(keys), self._narrow(values))
        keys, values = (for_every_head(self._b, self._c, x, layer) for x in (keys, values))
        return self._attend(q, keys, values, self._masks[None, sliding], layer)

    def read(self, q: ir.Value, layer: int) -> ir.Value:
        b = self._b
        source = self._c.source(layer)
        if source not in self._sources:
            keys, values = (
                x if self._kv_type == FLOAT else b.cast(x, FLOAT) for x in self._past(source, f"slots.{source}")
            )
            self._masks[source, False] = self._causal(q, keys, sliding=self._c.slides(source), filled=True)
            self._sources[source] = for_every_head(b, self._c, keys, source), for_every_head(b, self._c, values, source)
        return self._attend(q, *self._sources[source], self._masks[source, False], layer)

    def _attend(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        b = self._b
        scores = _scores(b, q, k, self._c.scale(layer))
        if self._c.attention_softcap is not None:
            scores = b.bounded(scores, self._c.attention_softcap, b.dialect.compute)
        return _weighted(b, scores, v, mask)

    def _append(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """The past's slots and then the new ones, in float32."""
        wide = past if self._kv_type == FLOAT else self._b.cast(past, FLOAT)
        return self._b.op("Concat", wide, new, axis=2)

    def _narrow(self, x: ir.Value) -> ir.Value:
        return x if self._kv_type == FLOAT else self._b.cast(x, self._kv_type)

    def _causal(self, q: ir.Value, past: ir.Value, *, sliding: bool, filled: bool = False) -> ir.Value:
        """The mask added to scores [tokens, slots]: a token sees its own slot, one of the last, and those before.

        `sliding`: only from its first slot on; `filled`: the past has the tokens already.
        Slots are counted at the past, since OpenVINO fuses a cache only if nothing else reads its result.
        """
        b = self._b
        before, tokens = (b.op("Squeeze", b.size(x, 2)) for x in (past, q))
        if filled:
            before = b.op("Sub", before, tokens)
        every = b.op("Range", b.constant(0), b.op("Add", before, tokens), b.constant(1))
        if self._seen_slots is not None:
            visible = b.op("Less", every, b.transpose(self._seen_slots, 1, 0))
        else:
            first = b.unsqueeze(before, 0)
            most = b.constant([MAX_SIZE])
            numbers = b.slice(every, first, most, 0)
            visible = b.op("GreaterOrEqual", b.unsqueeze(numbers, 1), every)
        if sliding:
            assert self._first is not None
            visible = b.op("And", visible, b.op("LessOrEqual", b.transpose(self._first, 1, 0), every))
        return b.op("Where", visible, b.scalar(0), b.scalar(UNSEEN))

    def finish(self) -> None:
        self._finish("slots")


def at_positions(b: Builder, table: ir.Value, positions: ir.Value) -> ir.Value:
    """The values of a table at the tokens' positions, once for each half of a head: [1, 1, tokens, head_dim]."""
    gathered = b.unsqueeze(b.op("Gather", table, positions), 1)
    return b.op("Concat", gathered, gathered, axis=-1)


def rotate_halves(b: Builder, x: ir.Value, cos: ir.Value, sin: ir.Value, head_dim: int) -> ir.Value:
    """Rotary embedding of [1, heads, tokens, head_dim]."""
    first = b.slice(x, 0, head_dim // 2, 3)
    second = b.slice(x, head_dim // 2, MAX_SIZE, 3)
    turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))


def _scores(b: Builder, q: ir.Value, k: ir.Value, scale: float) -> ir.Value:
    """The products q k^T * scale of [batch, heads, tokens, head_dim]."""
    k = b.transpose(k, 0, 1, 3, 2)
    if b.dialect.compute == FLOAT:  # the form that OpenVINO fuses
        return b.op("Mul", b.op("MatMul", q, k), b.scalar(scale))
    return b.op("MatMul", b.op("Mul", q, b.scalar(scale)), k)  # products of unscaled numbers may exceed float16


def _weighted(b: Builder, scores: ir.Value, v: ir.Value, mask: ir.Value | None) -> ir.Value:
    """softmax(scores + mask) v."""
    if mask is not None:
        scores = b.op("Add", scores, mask)
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
