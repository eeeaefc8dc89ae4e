"""The operator sets that the graphs can be written in; the graphs themselves know none of them by name."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.dialects.base import Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.graphs.dialects.plain import Plain
from vtx.exporter.graphs.dialects.trt import Trt


def make_dialect(name: str, kv_type: ir.DataType, max_context: int) -> Dialect:
    """The dialect of that name, one of `names.DIALECTS`, for caches of a type and at most `max_context` slots."""
    if name == "trt":
        return Trt(compute=kv_type, capacity=max_context)
    return Plain() if name == "plain" else Ort()
