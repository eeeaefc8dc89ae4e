"""The operator sets that the graphs can be written in."""

from __future__ import annotations

import onnx_ir as ir

from vtx.exporter.graphs.builder import Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.graphs.dialects.plain import Plain
from vtx.exporter.graphs.dialects.trt import Trt
from vtx.exporter.graphs.dialects.trt10 import Trt10
from vtx.runtime.precision import PRECISIONS

BLOCKS_OPSET = PRECISIONS["int4"].opset  # the first whose scales may be those of a row's blocks
SCALES_OPSET = 19  # the first whose scales of integers may be float16
ARITHMETIC = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def make_dialect(
    name: str, precision: str, max_context: int, kv_type: ir.DataType | None = None, *, blocked: bool = False
) -> Dialect:
    """The dialect of that name, one of `names.DIALECTS`, for a graph whose weights have `precision`.

    `kv_type` is the type of its caches if it has any: float32 K and V mean float32 arithmetic. `blocked`: weights of
    any precision may have a scale for each block of a row, as those of quantised checkpoints.
    """
    if name == "ort":
        return Ort()
    opset = max(PRECISIONS[precision].opset, BLOCKS_OPSET * blocked)
    if name == "plain":
        return Plain(opsets={"": opset}, ir_version=10 if opset > 17 else 8)
    compute = ir.DataType.FLOAT if kv_type == ir.DataType.FLOAT else ARITHMETIC[PRECISIONS[precision].arithmetic]
    if name == "ort-cuda":
        return Ort(name, compute=compute, joins=True)
    if name == "trt":
        return Trt(compute=compute, max_context=max_context)
    opset = max(opset, SCALES_OPSET)
    return Trt10(
        opsets={"": opset}, ir_version=10 if opset > SCALES_OPSET else 9, compute=compute, max_context=max_context
    )
