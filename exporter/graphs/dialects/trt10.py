"""The dialect of TensorRT from 10.0 to 10.14 (JetPack 6): inputs, outputs and types of `trt`, from older operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects.plain import UNSEEN, Plain, at_positions, rotate_halves
from vtx.exporter.graphs.dialects.trt import Trt, TrtAttention


@dataclass(frozen=True)
class Trt10(Plain, Trt):
    """ONNX opset 19, 21 over int4 weights: norms, activations and attention from their parts, as in `plain`."""

    name: str = "trt10"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 19})
    ir_version: int = 9
    branches: bool = False

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> Trt10Attention:
        assert c.sliding is None, "refused for these layers"
        return Trt10Attention(b, c, kv_type, self.max_context)


class Trt10Attention(TrtAttention):
    """`TrtAttention` of products around a softmax."""

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, max_context: int) -> None:
        super().__init__(b, c, kv_type, max_context)
        self._turn = [at_positions(b, table, self._positions) for table in self._tables]
        self._hides: ir.Value | None = None  # added to products

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        return rotate_halves(self._b, x, self._turn[0], self._turn[1], self._c.heads_of(layer))

    def _attended(self, q: ir.Value, k: ir.Value, v: ir.Value, seen: ir.Value, layer: int) -> ir.Value:
        b, c, kind = self._b, self._c, self._kv_type.numpy()
        if self._hides is None:
            self._hides = b.op("Where", seen, *(b.constant(np.array(x, kind)) for x in (0, UNSEEN)))
        q = b.op("Mul", q, b.constant(np.array(c.scale(layer), kind)))  # before the product, which may exceed float16
        hides, width = self._hides, c.heads_of(layer)
        if c.heads != c.kv_heads:  # each K/V head serves several, without a copy for each
            q = b.reshape(q, 1, c.kv_heads, c.heads // c.kv_heads, -1, width)
            k, v, hides = (b.op("Unsqueeze", x, b.constant([2])) for x in (k, v, hides))
        axes = list(range(4 if c.heads == c.kv_heads else 5))
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[*axes[:-2], axes[-1], axes[-2]]))
        y = b.op("MatMul", b.op("Softmax", b.op("Add", scores, hides), axis=-1), v)
        return y if c.heads == c.kv_heads else b.reshape(y, 1, c.heads, -1, width)
