"""The dialect of onnxruntime: its own fused operators, K and V updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.config import TextConfig
from vtx.exporter.graphs.builder import FLOAT, MICROSOFT, Builder, Dialect
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.stored import INT8_ACTIVATIONS, power_of_two_in
from vtx.runtime.precision import KV_DTYPES, STORED

UNSEEN = -1e30  # a masked product, 0 after the softmax
LARGEST_BLOCK = {8: 64, 4: 128}  # values that MatMulNBits groups, by bits; int8 has one scale a row


@dataclass(frozen=True)
class Ort(Dialect):
    """ONNX opset 21 with onnxruntime's operators. Arithmetic is float32, like its CPU provider's."""

    name: str = "ort"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 21, MICROSOFT: 1})
    ir_version: int = 10
    sizes_from_values: bool = True

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        return b.op("Slice", keys, b.constant([0]), total, b.constant([2]))

    def norm(self, b: Builder, x: ir.Value, weight: str, eps: float) -> ir.Value:
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
        stored = b.location(weight)
        assert stored.scales is not None
        (rows, width), bits = stored.shape, STORED[stored.dtype].bits
        assert bits is not None
        apart = stored.scales.shape[1]
        block = power_of_two_in(width // apart, LARGEST_BLOCK[bits])
        octets = b.octets(weight, rows, width // block, block * bits // 8)
        unsigned = b.op("BitwiseXor", octets, b.constant(np.array(0x80 if bits == 8 else 0x88, np.uint8)))
        scales = b.scales(weight, FLOAT, rows, apart)
        if apart * block != width:
            scales = b.op("Expand", scales, b.constant([rows, width // block]))
        return b.op(
            "MatMulNBits", x, unsigned, scales, *([None, None, b.weight(bias)] if bias else []), domain=MICROSOFT,
            K=width, N=rows, bits=bits, block_size=block, accuracy_level=INT8_ACTIVATIONS,
        )  # fmt: skip

    def swish(self, b: Builder, x: ir.Value, rate: float) -> ir.Value:
        return b.op("QuickGelu", x, domain=MICROSOFT, alpha=rate)

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType) -> OrtAttention:
        return OrtAttention(b, c, kv_type)

    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: int, head_dim: int,
        seen: ir.Value | None = None, *, causal: bool = False,
    ) -> ir.Value:  # fmt: skip
        """`seen` is given for windows only: merged tokens are removed in these graphs."""
        mask = []
        if seen is not None:
            mask = [None, b.op("Cast", b.op("Squeeze", seen, b.constant([1, 2])), to=ir.DataType.INT32.value)]
        return b.op("MultiHeadAttention", q, k, v, *mask, domain=MICROSOFT, num_heads=heads, unidirectional=int(causal))


class OrtAttention:
    """`StageAttention` with rotation outside of GroupQueryAttention, which would rotate by slot at decode.

    Positions [batch, tokens of each] give the number of conversations: several with one token each, whose caches are
    the batch of K and V, or one with any number of tokens.
    """

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType) -> None:
        self._b, self._c, self._kv_type = b, c, kv_type
        half = c.head_dim // 2
        positions = b.input(names.POSITIONS, ir.DataType.INT64, ["batch", "each"])
        self._rope = (positions, *(b.input(name, FLOAT, ["max_context", half]) for name in (names.COS, names.SIN)))
        shapes = ((names.LAST_SLOT, "batch"), (names.TOTAL_SLOTS, 1))
        self._slots = [b.input(name, ir.DataType.INT32, [size]) for name, size in shapes]
        self._mask = self._seen() if c.two_way else None
        self._apart = b.op("Concat", b.op("Shape", self._rope[0]), b.constant([-1]), axis=0)
        self._cache_shape = ("batch", c.kv_heads, "capacity", c.head_dim)
        self._presents: list[tuple[ir.Value, str]] = []

    def split(self, x: ir.Value, heads: int) -> ir.Value:
        return self._b.declared(self._b.op("Reshape", x, self._apart), "batch", "each", heads * self._c.head_dim)

    def rotate(self, x: ir.Value, heads: int) -> ir.Value:
        return self._b.op("RotaryEmbedding", x, *self._rope, domain=MICROSOFT, num_heads=heads)

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        b, c, kv_type = self._b, self._c, self._kv_type
        past = [b.input(name(layer), kv_type, self._cache_shape) for name in (names.past_key, names.past_value)]
        narrow = kv_type == ir.DataType.FLOAT16
        if narrow:
            q, k, v = (b.op("Cast", part, to=kv_type.value) for part in (q, k, v))
        scales: list[ir.Value | None] = []
        rounding: dict[str, Any] = {}
        if KV_DTYPES[kv_type.numpy().name].scaled:  # keep K and V as integers times scales
            skipped = [None] * 5  # tables of a rotation, positions, a bias, sinks
            shape = (1, c.kv_heads, 1, c.head_dim)
            scales = [*skipped, *(b.input(name(layer), FLOAT, shape) for name in (names.key_scale, names.value_scale))]
            rounding = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            rounding["kv_cache_bit_width"] = kv_type.bitwidth
        causal = self._mask is None
        # the operator is causal: where tokens see each other both ways it only fills the cache, by the fewest heads
        y, key, value = b.ops(
            "GroupQueryAttention", q if causal else k, k, v, *past, *self._slots, *scales, outputs=3, domain=MICROSOFT,
            num_heads=c.heads if causal else c.kv_heads, kv_num_heads=c.kv_heads, scale=c.head_dim**-0.5, **rounding,
        )  # fmt: skip
        self._presents += [(key, names.present_key(layer)), (value, names.present_value(layer))]
        if not causal:
            of_keys, of_values = scales[-2:] or (None, None)
            return self._both_ways(q, self._filled(key, of_keys), self._filled(value, of_values))
        return b.op("Cast", y, to=FLOAT.value) if narrow else y

    def _seen(self) -> ir.Value:
        """The mask added to products, [batch, 1, 1, each, slots]."""
        b = self._b
        seen = b.op("Unsqueeze", b.input(names.SEEN_SLOTS, ir.DataType.INT64, ["batch", "each"]), b.constant([1, 2, 4]))
        total = b.op("Squeeze", b.op("Cast", self._slots[1], to=ir.DataType.INT64.value))
        slots = b.op("Range", b.constant(np.array(0)), total, b.constant(np.array(1)))
        return b.op("Where", b.op("Less", slots, seen), b.scalar(0), b.scalar(UNSEEN))

    def _filled(self, cache: ir.Value, scale: ir.Value | None) -> ir.Value:
        """The filled slots of a layer's K or V as numbers, [batch, kv_heads, 1, slots, head_dim]."""
        b = self._b
        total = b.op("Cast", self._slots[1], to=ir.DataType.INT64.value)
        filled = b.op("Slice", cache, b.constant([0]), total, b.constant([2]))
        if self._kv_type != FLOAT:
            filled = b.op("Cast", filled, to=FLOAT.value)
        if scale is not None:
            filled = b.op("Mul", filled, scale)
        return b.op("Unsqueeze", filled, b.constant([2]))

    def _both_ways(self, q: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        """Attention of q [batch, each, heads * head_dim] over the filled slots, by the mask."""
        b, c = self._b, self._c
        if self._kv_type == ir.DataType.FLOAT16:
            q = b.op("Cast", q, to=FLOAT.value)
        scaled = b.op("Mul", q, b.scalar(c.head_dim**-0.5))
        apart = b.reshape(scaled, 0, 0, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        queries = b.op("Transpose", apart, perm=[0, 2, 3, 1, 4])
        products = b.op("MatMul", queries, b.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
        weights = b.op("Softmax", b.op("Add", products, self._mask), axis=-1)
        attended = b.op("Transpose", b.op("MatMul", weights, values), perm=[0, 3, 1, 2, 4])
        return b.reshape(attended, 0, 0, c.heads * c.head_dim)

    def join(self, x: ir.Value) -> ir.Value:
        width = self._c.heads * self._c.head_dim
        return self._b.declared(self._b.reshape(x, -1, width), "tokens", width)

    def finish(self) -> None:
        for present, name in self._presents:
            self._b.output(present, name, self._kv_type, self._cache_shape)
