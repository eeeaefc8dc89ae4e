"""The dialect of TensorRT from 10.0 to 10.14 (JetPack 6): inputs, outputs and types of `trt`, from older operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects.plain import Plain, at_positions, rotate_halves
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
    joins: bool = True

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
        return self._added(seen)

    def _attended(self, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, layer: int) -> ir.Value:
        return self._by_products(q, k, v, mask, layer)
