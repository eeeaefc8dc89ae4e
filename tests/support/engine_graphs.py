"""Hand-built stages as TensorRT takes them, and the same graph broken in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CAPACITY = 128, 4, 2, 32, 256, 64
BLOCK = 32
TYPES = {"fp32": T.FLOAT, "fp16": T.FLOAT16, "int4": T.FLOAT16, "int8": T.FLOAT16}
Change = Callable[[onnx.ModelProto], None]


class Graph:
    """A graph under construction: nodes named by their outputs."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        out = to or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=f"node_{out}", **attributes))
        return out

    def constant(self, value: Any) -> str:
        name = f"const_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def random_weight(self, *shape: int) -> np.ndarray:
        return (self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def linear(self, x: str, into: int, out: int, precision: str) -> str:
        """X @ W, [in, out]; int4 and int8 as blocks of BLOCK along the input."""
        matrix = self.random_weight(into, out)
        if precision in ("fp32", "fp16"):
            return self.op("MatMul", x, self.constant(matrix.astype(np.float16 if precision == "fp16" else np.float32)))
        limit = 7 if precision == "int4" else 127
        blocks = matrix.reshape(into // BLOCK, BLOCK, out)
        scales = (np.abs(blocks).max(1) / limit).astype(np.float16)
        codes = np.clip(np.round(blocks / scales[:, None]), -limit, limit).astype(np.int8).reshape(into, out)
        name = f"codes_{len(self.weights)}"
        kind = T.INT4 if precision == "int4" else T.INT8
        self.weights.append(helper.make_tensor(name, kind, codes.shape, codes.reshape(-1).tolist()))
        weight = self.op("DequantizeLinear", name, self.constant(scales), axis=0, block_size=BLOCK)
        return self.op("MatMul", x, weight)

    def model(self, inputs: Sequence[Any], outputs: Sequence[Any], opset: int = 24) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "graph", list(inputs), list(outputs), self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def trt_stage(precision: str = "fp16", layers: Sequence[int] = (1, 2), capacity: int = CAPACITY) -> onnx.ModelProto:
    """Decoder layers with caches updated in place, in opset 24."""
    kind = TYPES[precision]
    g, value = Graph(), helper.make_tensor_value_info
    cache = [1, KV_HEADS, capacity, HEAD_DIM]
    inputs = [
        value("hidden", T.FLOAT, ["tokens", HIDDEN]),
        value("position_ids", T.INT64, [1, "tokens"]),
        value("cos", T.FLOAT, ["max_context", HEAD_DIM // 2]),
        value("sin", T.FLOAT, ["max_context", HEAD_DIM // 2]),
        value("last_slot", T.INT32, [1]),
        value("total_slots", T.INT32, [1]),
    ]
    outputs = [value("hidden_out", T.FLOAT, ["tokens", HIDDEN])]
    rows = g.op("Shape", "hidden", start=0, end=1)
    start = g.op("Sub", _cast(g, "total_slots", T.INT64), rows)
    steps = g.op("Range", g.constant(np.int64(0)), g.op("Squeeze", rows, g.constant([0])), g.constant(np.int64(1)))
    slots = g.op("Unsqueeze", g.op("Add", steps, start), g.constant([1]))
    allowed = g.op("LessOrEqual", g.constant(np.arange(capacity)[None]), slots)
    mask = g.op("Unsqueeze", allowed, g.constant([0, 1]))
    cos, sin = _cast(g, "cos", kind), _cast(g, "sin", kind)
    x = _cast(g, "hidden", kind)
    for layer in layers:
        for part in ("key", "value"):
            inputs.append(value(f"past_{part}.{layer}", kind, cache))
            outputs.append(value(f"present_{part}.{layer}", kind, cache))
        normed = _norm(g, x, precision)
        q = _heads(g, g.linear(normed, HIDDEN, HEADS * HEAD_DIM, precision), HEADS)
        k = _heads(g, g.linear(normed, HIDDEN, KV_HEADS * HEAD_DIM, precision), KV_HEADS)
        v = _heads(g, g.linear(normed, HIDDEN, KV_HEADS * HEAD_DIM, precision), KV_HEADS)
        q = g.op("RotaryEmbedding", q, cos, sin, "position_ids")
        k = g.op("RotaryEmbedding", k, cos, sin, "position_ids")
        key = g.op("TensorScatter", f"past_key.{layer}", k, start, to=f"present_key.{layer}")
        values = g.op("TensorScatter", f"past_value.{layer}", v, start, to=f"present_value.{layer}")
        y = g.op("Attention", q, key, values, mask, scale=HEAD_DIM**-0.5)
        y = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.constant([-1, HEADS * HEAD_DIM]))
        x = g.op("Add", x, g.linear(y, HEADS * HEAD_DIM, HIDDEN, precision))
        normed = _norm(g, x, precision)
        gate, up = (g.linear(normed, HIDDEN, FFN, precision) for _ in range(2))
        x = g.op("Add", x, g.linear(g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up), FFN, HIDDEN, precision))
    _cast(g, x, T.FLOAT, out="hidden_out")
    return g.model(inputs, outputs)


def _cast(g: Graph, x: str, kind: int, out: str = "") -> str:
    name = out or f"cast_{len(g.nodes)}"
    g.nodes.append(helper.make_node("Cast", [x], [name], name=f"node_{name}", to=kind))
    return name


def _norm(g: Graph, x: str, precision: str) -> str:
    scale = 1 + 0.1 * g.random.standard_normal(HIDDEN)
    weight = g.constant(scale.astype(helper.tensor_dtype_to_np_dtype(TYPES[precision])))
    return g.op("RMSNormalization", x, weight, axis=-1, epsilon=1e-5)


def _heads(g: Graph, x: str, heads: int) -> str:
    split = g.op("Reshape", x, g.constant([1, -1, heads, HEAD_DIM]))
    return g.op("Transpose", split, perm=[0, 2, 1, 3])
