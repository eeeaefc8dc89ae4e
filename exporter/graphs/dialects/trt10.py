"""The dialect of TensorRT from 10.0 to 10.14 (JetPack 6): inputs, outputs and types of `trt`, from older operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects.plain import UNSEEN, Plain, at_positions, for_every_head, rotate_halves
from vtx.exporter.graphs.dialects.trt import LARGEST, Trt, TrtAttention


@dataclass(frozen=True)
class Trt10(Plain, Trt):
    """ONNX opset 19, 21 over int4 weights: norms, activations and attention from their parts, as in `plain`."""

    name: str = "trt10"
    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 19})
    ir_version: int = 9
    branches: bool = False
    largest: int | None = LARGEST
    zero_points: bool = False

    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> Trt10Attention:
        return Trt10Attention(b, c, kv_type, layers, self.max_context)


class Trt10Attention(TrtAttention):
    """`TrtAttention` of products around a softmax."""

    def __init__(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range, max_context: int) -> None:
        super().__init__(b, c, kv_type, layers, max_context)
        self._turns = [[at_positions(b, table, self._positions) for table in pair] for pair in self._tables]

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        cos, sin = self._turns[self._c.slides(layer)]
        return rotate_halves(self._b, x, cos, sin, self._c.heads_of(layer))

    def _as_mask(self, seen: ir.Value) -> ir.Value:
        """To be added to products, of the KV type."""
        kind = self._kv_type.numpy()
        return self._b.op("Where", seen, *(self._b.constant(np.array(x, kind)) for x in (0, UNSEEN)))

    def _attended(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        b = self._b
        c = self._c
        scale = b.constant(np.array(c.scale(layer), self._kv_type.numpy()))
        q = b.op("Mul", q, scale)  # before the product, which may exceed float16
        k, v = (for_every_head(b, c, x, layer) for x in (k, v))  # with fewer heads or five axes none is fused
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
        return b.op("MatMul", b.op("Softmax", b.op("Add", scores, mask), axis=-1), v)
