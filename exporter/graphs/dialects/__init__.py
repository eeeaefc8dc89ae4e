"""The operator sets that the graphs can be written in."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.builder import Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.graphs.dialects.plain import Plain
from vtx.exporter.graphs.dialects.trt import Trt
from vtx.runtime.precision import PRECISIONS

ARITHMETIC = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def make_dialect(name: str, precision: str, max_context: int, kv_type: ir.DataType | None = None) -> Dialect:
    """The dialect of that name, one of `names.DIALECTS`, for a graph whose weights have `precision`.

    `kv_type` is the type of its caches if it has any: float32 K and V mean float32 arithmetic.
    """
    if name == "trt":
        compute = ir.DataType.FLOAT if kv_type == ir.DataType.FLOAT else ARITHMETIC[PRECISIONS[precision].arithmetic]
        return Trt(compute=compute, max_context=max_context)
    if name == "plain":
        opset = PRECISIONS[precision].opset
        return Plain(opsets={"": opset}, ir_version=10 if opset > 17 else 8)
    return Ort()
