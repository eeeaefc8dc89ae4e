"""The operator sets that the graphs can be written in; the graphs themselves know none of them by name."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.dialects.base import Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.graphs.dialects.plain import Plain
from vtx.exporter.graphs.dialects.trt import Trt


def make_dialect(name: str, kv_type: ir.DataType, max_context: int, *, int4: bool = False) -> Dialect:
    """The dialect of that name, one of `names.DIALECTS`, for caches of a type and at most `max_context` slots.

    Weights of 4 bits need opset 21, which is more than the plain dialect asks for without them.
    """
    if name == "trt":
        return Trt(compute=kv_type, capacity=max_context)
    if name == "plain":
        return Plain(opsets={"": 21}, ir_version=10) if int4 else Plain()
    return Ort()
