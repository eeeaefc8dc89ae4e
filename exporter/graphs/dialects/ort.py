"""The dialects of onnxruntime: its own fused operators, K and V updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, INT32, INT64, MICROSOFT, Builder, Dialect, Heads
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.stored import INT8_ACTIVATIONS, power_of_two_in
from vtx.runtime.precision import KV_DTYPES, STORED

UNSEEN = np.array(-1e30, np.float32)  # of a product with a slot that is not seen, 0 after the softmax
LARGEST_BLOCK = {8: 64, 4: 128}  # values that MatMulNBits groups, by bits; int8 has one scale a row, or larger groups


@dataclass(frozen=True)
class Ort(Dialect):
    """ONNX opset 21 with onnxruntime's operators.

    `ort` is float32, like its CPU provider's arithmetic; `ort-cuda` states another type for its CUDA provider.
    """

    name: str = "ort"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 21, MICROSOFT: 1})
    ir_version: int = 10
    sizes_from_values: bool = True

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        return b.slice(keys, 0, total, 2)

    def norm(self, b: Builder, x: ir.Value, weight: str | int, eps: float) -> ir.Value:
        return b.op("SimplifiedLayerNormalization", x, b.weight(weight), axis=-1, epsilon=eps, stash_type=1)

    def add_norm(
        self, b: Builder, delta: ir.Value, total: ir.Value, weight: str, eps: float
    ) -> tuple[ir.Value, ir.Value]:
        outs = b.ops(
            "SkipSimplifiedLayerNormalization", delta, total, b.weight(weight), outputs=4, domain=MICROSOFT, epsilon=eps
        )
        return outs[0], outs[3]

    def quantised(self, b: Builder, x: ir.Value, weight: str, bias: str | None) -> ir.Value:
        """MatMulNBits on the stored bytes. It reads them as unsigned: one bit of each integer is flipped."""
        bits, block = read_blocks(b, weight)
        rows, width = b.location(weight).shape
        unsigned, scales, *points = unsigned_parts(b, weight, block)
        sizes = {"K": width, "N": rows, "bits": bits, "block_size": block}
        if self.name == "ort":
            added: list[ir.Value | None] = [*points]
            if bias:
                added += [None] * (2 - len(points))
                added.append(b.weight(bias))
            return b.op(
                "MatMulNBits", x, unsigned, scales, *added, domain=MICROSOFT, accuracy_level=INT8_ACTIVATIONS, **sizes
            )
        # not every release adds a bias on CUDA
        y = b.op("MatMulNBits", x, unsigned, scales, *points, domain=MICROSOFT, **sizes)
        return b.op("Add", y, b.weight(bias)) if bias else y

    def swish(self, b: Builder, x: ir.Value, rate: float) -> ir.Value:
        return b.op("QuickGelu", x, domain=MICROSOFT, alpha=rate)

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> OrtAttention:
        return OrtAttention(b, c, kv_type, layers)

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: Heads, seen: ir.Value | None = None
    ) -> ir.Value:
        """`seen` is given for windows only: merged tokens are removed in these graphs."""
        mask = []
        if seen is not None:
            mask = [None, b.cast(b.squeeze(seen, 1, 2), INT32)]
        return b.op(
            "MultiHeadAttention",
            q,
            k,
            v,
            *mask,
            domain=MICROSOFT,
            num_heads=heads.count,
            unidirectional=int(heads.causal),
        )


def read_blocks(b: Builder, name: str) -> tuple[int, int]:
    """Bits of a quantised matrix's integers, and the number that operators group: some or all of those with a scale."""
    stored = b.location(name)
    bits = STORED[stored.dtype].bits
    assert stored.scales is not None
    assert bits is not None
    return bits, power_of_two_in(stored.shape[1] // stored.scales.shape[1], LARGEST_BLOCK[bits])


def unsigned_parts(b: Builder, name: str, block: int) -> list[ir.Value]:
    """A quantised matrix in groups of `block`: unsigned integers [rows, groups, bytes] with one bit of each flipped,
    scales, and zero points if it has any.
    """
    stored = b.location(name)
    assert stored.scales is not None
    rows, width = stored.shape
    blocks = stored.scales.shape[1]
    bits, _ = read_blocks(b, name)
    octets = b.octets(name, rows, width // block, block * bits // 8)
    unsigned = b.op("BitwiseXor", octets, b.constant(np.array(0x80 if bits == 8 else 0x88, np.uint8)))
    scales = b.scales(name, b.dialect.compute, rows, blocks)
    parts = [unsigned, _repeated(b, scales, rows, blocks, width // block)]
    if (zeros := b.zero_octets(name)) is None:
        return parts
    if zeros.shape != (rows, blocks):  # two to a byte, as the operator reads them
        parts.append(b.op("BitwiseXor", zeros, b.constant(np.array(0x88, np.uint8))))
    else:
        parts.append(_points(b, _repeated(b, zeros, rows, blocks, width // block), rows, width // block, bits))
    return parts


def _repeated(b: Builder, x: ir.Value, rows: int, apart: int, blocks: int) -> ir.Value:
    """[rows, apart] as [rows, blocks]: a value for each part of a larger block."""
    if apart == blocks:
        return x
    parts = b.op("Expand", b.reshape(x, rows, apart, 1), b.constant([rows, apart, blocks // apart]))
    return b.reshape(parts, rows, blocks)


def _points(b: Builder, zeros: ir.Value, rows: int, blocks: int, bits: int) -> ir.Value:
    """Zero points [rows, blocks] as MatMulNBits reads them: unsigned, of 4 bits two to a byte, in whole bytes a row."""
    unsigned = b.op("BitwiseXor", zeros, b.constant(np.array(1 << (bits - 1), np.uint8)))
    if bits == 8:
        return unsigned
    halves = b.op("BitwiseAnd", unsigned, b.constant(np.array(15, np.uint8)))
    if blocks % 2:
        halves = b.op("Pad", halves, b.constant([0, 0, 0, 1]))
    halves = b.reshape(halves, rows, -1, 2)
    low, high = (b.op("Gather", halves, b.constant(half), axis=2) for half in (0, 1))
    return b.op("BitwiseOr", low, b.op("BitShift", high, b.constant(np.array(4, np.uint8)), direction="LEFT"))


class OrtAttention:
    """`StageAttention` with rotation outside of GroupQueryAttention, which would rotate by slot at decode.

    Positions [batch, tokens of each] give the number of conversations: several with one token each, whose caches are
    the batch of K and V, or one with any number of tokens.
    """

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> None:
        self._b = b
        self._c = c
        self._kv_type = kv_type
        self._positions = positions = b.input(names.POSITIONS, INT64, ["batch", "each"])
        tables = (
            ((names.COS, names.SIN), c.head_dim),
            *(((names.SLIDING_COS, names.SLIDING_SIN), s.head_dim) for s in [c.sliding] if s),
        )
        self._ropes = [
            [b.from_float32(b.input(name, FLOAT, ["max_context", width // 2])) for name in pair]
            for pair, width in tables
        ]
        self._first = b.input(names.FIRST_SLOT, INT64, ["batch", "each"]) if c.sliding else None
        shapes = ((names.LAST_SLOT, "batch"), (names.TOTAL_SLOTS, 1))
        has_own = any(c.source(layer) == layer for layer in layers)
        self._slots = [b.input(name, INT32, [size]) for name, size in shapes] if has_own else []
        self._seen_slots = b.input(names.SEEN_SLOTS, INT64, ["batch", "each"]) if c.two_way else None
        self._masks: dict[bool, ir.Value] = {}  # of tokens that see each other both ways, by sliding
        self._ahead = self._sees_ahead() if c.two_way == "images" else None
        self._apart = b.op("Concat", b.op("Shape", positions), b.constant([-1]), axis=0)
        self._bias: ir.Value | None = None
        self._sources: dict[int, tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._presents: list[tuple[ir.Value, str, int]] = []

    def _cache_shape(self, layer: int) -> tuple[int | str, ...]:
        return "batch", self._c.kv_heads, "capacity", self._c.heads_of(layer)

    def split(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        width = heads * self._c.heads_of(layer)
        return self._b.declared(self._b.op("Reshape", x, self._apart), "batch", "each", width)

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        tables = self._ropes[self._c.slides(layer)]
        return self._b.op("RotaryEmbedding", x, self._positions, *tables, domain=MICROSOFT, num_heads=heads)

    def _seen(self, slots: ir.Value) -> ir.Value:
        """True for slots [slots] that are not before those of a token's window, [batch, 1, each, slots]."""
        b = self._b
        assert self._first is not None
        return b.op("GreaterOrEqual", slots, b.unsqueeze(self._first, 1, 3))

    def read(self, q: ir.Value, layer: int) -> ir.Value:
        source = self._c.source(layer)
        if source not in self._sources:
            self._sources[source] = self._read_source(source)
        return self._attend_masked(q, *self._sources[source], layer)

    def _read_source(self, source: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """A source's filled K and V, and the mask of those that each token sees."""
        b = self._b
        c = self._c
        one = self._b.constant([1])
        source_slot = b.input(names.source_slot(source), INT32, ["batch"])
        last = b.cast(source_slot, INT64)
        total = b.op("Add", b.op("ReduceMax", last, b.constant([0])), one)
        parts = []
        for past, scale in ((names.past_key, names.key_scale), (names.past_value, names.value_scale)):
            cache = b.input(past(source), self._kv_type, self._cache_shape(source))
            of_cache = None
            if KV_DTYPES[self._kv_type.numpy().name].scaled:
                of_cache = b.input(scale(source), FLOAT, (1, c.kv_heads, 1, c.heads_of(source)))
            parts.append(self._filled(cache, of_cache, total))
        zero = b.constant(0)
        step = b.constant(1)
        slots = b.op("Range", zero, b.op("Squeeze", total), step)
        count = b.size(self._positions, 1)
        begins = b.op("Sub", b.op("Add", last, one), count)  # of the tokens' own slots
        slot = b.op("Add", b.op("Unsqueeze", begins, one), b.op("Range", zero, b.op("Squeeze", count), step))
        visible = b.op("LessOrEqual", slots, b.unsqueeze(slot, 1, 3))
        visible = b.op("And", visible, self._seen(slots)) if c.slides(source) else visible
        mask = b.op("Where", visible, b.single(0), b.constant(UNSEEN))
        return parts[0], parts[1], b.op("Unsqueeze", mask, one)

    def _window(self) -> ir.Value:
        """A term of products with filled slots, [batch, 1, each, slots], that hides those before a window."""
        b = self._b
        if self._bias is None:
            total = b.cast(b.op("Squeeze", self._slots[1]), INT64)
            slots = b.op("Range", b.constant(0), total, b.constant(1))
            half = self._kv_type == ir.DataType.FLOAT16  # then the operator computes with it
            hidden = np.array(np.finfo(np.float16).min, np.float16) if half else UNSEEN
            self._bias = b.op("Where", self._seen(slots), b.constant(np.zeros((), hidden.dtype)), b.constant(hidden))
        return self._bias

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        b = self._b
        c = self._c
        kv_type = self._kv_type
        shape = self._cache_shape(layer)
        width = c.heads_of(layer)
        past = [b.input(name(layer), kv_type, shape) for name in (names.past_key, names.past_value)]
        further: list[ir.Value | None] = [None, None, None, self._window()] if c.slides(layer) else []
        compute = b.dialect.compute
        casts = kv_type == ir.DataType.FLOAT16 and compute != kv_type
        if casts:
            q, k, v = (b.cast(part, kv_type) for part in (q, k, v))
        rounding: dict[str, Any] = {}
        scales = self._scales(layer)
        if scales:  # keep K and V as integers times them
            further += [None] * (5 - len(further))  # tables of a rotation, positions, a bias, sinks
            further += scales
            rounding = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            rounding["kv_cache_bit_width"] = kv_type.bitwidth
        # the operator is causal: where all tokens see each other both ways it only fills the cache, by the fewest heads
        fills = c.two_way == "prompt"
        y, key, value = b.ops(
            "GroupQueryAttention",
            k if fills else q,
            k,
            v,
            *past,
            *self._slots,
            *further,
            outputs=3,
            domain=MICROSOFT,
            num_heads=c.kv_heads if fills else c.heads,
            kv_num_heads=c.kv_heads,
            scale=c.scale(layer),
            **rounding,
        )
        self._presents += [(key, names.present_key(layer), layer), (value, names.present_value(layer), layer)]
        mask = self._seen_both_ways(sliding=c.slides(layer)) if c.two_way else None

        def causal() -> ir.Value:
            return b.cast(y, compute) if casts else y

        def both_ways() -> ir.Value:
            assert mask is not None
            of_keys, of_values = scales or (None, None)
            total = b.cast(self._slots[1], INT64)
            keys = self._filled(key, of_keys, total)
            values = self._filled(value, of_values, total)
            wide = b.cast(q, FLOAT) if kv_type == ir.DataType.FLOAT16 else q
            return b.from_float32(self._attend_masked(wide, keys, values, mask, layer))

        if self._ahead is None:
            return causal() if mask is None else both_ways()
        (out,) = b.choose(self._ahead, lambda: [both_ways()], lambda: [b.op("Identity", causal())])
        return b.declared(out, "batch", "each", c.heads * width)

    def _scales(self, layer: int) -> list[ir.Value]:
        """The scales of a layer's K and V, none unless they are integers."""
        if not KV_DTYPES[self._kv_type.numpy().name].scaled:
            return []
        sizes = (1, self._c.kv_heads, 1, self._c.heads_of(layer))
        return [self._b.input(name(layer), FLOAT, sizes) for name in (names.key_scale, names.value_scale)]

    def _seen_both_ways(self, *, sliding: bool) -> ir.Value:
        """The mask added to products, [batch, 1, 1, each, slots]."""
        b = self._b
        assert self._seen_slots is not None
        if sliding not in self._masks:
            total = b.op("Squeeze", b.cast(self._slots[1], INT64))
            slots = b.op("Range", b.constant(0), total, b.constant(1))
            visible = b.op("Less", slots, b.unsqueeze(self._seen_slots, 1, 3))
            visible = b.op("And", visible, self._seen(slots)) if sliding else visible
            mask = b.op("Where", visible, b.single(0), b.constant(UNSEEN))
            self._masks[sliding] = b.unsqueeze(mask, 1)
        return self._masks[sliding]

    def _sees_ahead(self) -> ir.Value:
        """True if a token of the run sees one behind it; if none does, the operator's causal attention is right."""
        b = self._b
        assert self._seen_slots is not None
        last = b.unsqueeze(b.cast(self._slots[0], INT64), 1)
        count = b.op("Squeeze", b.size(self._positions, 1))
        behind = b.op("Range", count, b.constant(0), b.constant(-1))  # it and those behind, of each
        slot = b.op("Add", b.op("Sub", last, behind), b.constant([2]))
        after = b.cast(b.op("Greater", self._seen_slots, slot), INT32)
        return b.cast(b.op("ReduceMax", after, keepdims=0), ir.DataType.BOOL)

    def _filled(self, cache: ir.Value, scale: ir.Value | None, total: ir.Value) -> ir.Value:
        """The filled slots of a layer's K or V as numbers, [batch, kv_heads, 1, slots, head_dim]."""
        b = self._b
        filled = b.slice(cache, 0, total, 2)
        if self._kv_type != FLOAT:
            filled = b.cast(filled, FLOAT)
        if scale is not None:
            filled = b.op("Mul", filled, scale)
        return b.unsqueeze(filled, 2)

    def _attend_masked(self, q: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        """Attention of q [batch, each, heads * head_dim] over filled slots, by `mask` [batch, 1, 1, each, slots]."""
        b = self._b
        c = self._c
        width = self._c.heads_of(layer)
        scaled = b.op("Mul", q, b.single(c.scale(layer)))
        by_group = b.reshape(scaled, 0, 0, c.kv_heads, c.heads // c.kv_heads, width)
        queries = b.transpose(by_group, 0, 2, 3, 1, 4)
        products = b.op("MatMul", queries, b.transpose(keys, 0, 1, 2, 4, 3))
        if c.attention_softcap is not None:
            products = b.bounded(products, c.attention_softcap)
        weights = b.op("Softmax", b.op("Add", products, mask), axis=-1)
        attended = b.transpose(b.op("MatMul", weights, values), 0, 3, 1, 2, 4)
        return b.reshape(attended, 0, 0, c.heads * width)

    def join(self, x: ir.Value, layer: int) -> ir.Value:
        width = self._c.heads * self._c.heads_of(layer)
        return self._b.declared(self._b.reshape(x, -1, width), "tokens", width)

    def finish(self) -> None:
        for present, name, layer in self._presents:
            self._b.output(present, name, self._kv_type, self._cache_shape(layer))
