"""A builder of ONNX graphs whose weights stay in files, and the interface of its dialects."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.weights.plan import StoredTensor, adjoining

FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
MICROSOFT = "com.microsoft"
ELEMENT_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I8": ir.DataType.INT8,
    "I4": ir.DataType.INT4,
}
# onnx_ir tells an attribute's type slowly, by protocols.
ATTRIBUTES: Mapping[type, Callable[[str, Any], ir.Attr]] = {
    int: ir.AttrInt64,
    float: ir.AttrFloat32,
    str: ir.AttrString,
}
Shape = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a tower's attention; `value_size` is None for the size of queries and keys, `size`."""

    count: int
    size: int
    value_size: int | None = None
    causal: bool = False


class Builder:
    """One graph under construction, in the operators of its `dialect`.

    Weights keep their stored type and are cast on use, which the engine folds at load. A weight is never read here:
    initializers point into the bundle's files.
    """

    def __init__(self, name: str, weights: Mapping[str, StoredTensor], folder: Path, dialect: Dialect) -> None:
        self.name = name
        self.dialect = dialect
        self._weights = dict(weights)
        self._folder = folder
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._count = 0  # of nodes, those of branches included
        self._initializers: dict[str, ir.Value] = {}
        self._cast: dict[tuple[str, ir.DataType], ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Shape) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Shape) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._outputs.append(value)

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        known = {n: ATTRIBUTES[type(value)](n, value) for n, value in attributes.items() if type(value) in ATTRIBUTES}
        node = ir.node(kind, list(inputs), {**attributes, **known} or None, domain=domain, num_outputs=outputs)
        node.name = f"{kind}_{self._count}"
        self._count = self._count + 1
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}.{number}"
        self._nodes.append(node)
        return node.outputs

    def choose(
        self, condition: ir.Value, chosen: Callable[[], Sequence[ir.Value]], otherwise: Callable[[], Sequence[ir.Value]]
    ) -> Sequence[ir.Value]:
        """The values of one of two functions, by a condition known at run time; the other's operators do not run.

        A weight that both read is read before, since its cast belongs to where it is read first.
        """
        first = self._inner([], chosen)
        second = self._inner([], otherwise)
        return self.ops("If", condition, outputs=len(first.outputs), then_branch=first, else_branch=second)

    def scan(
        self, step: Callable[..., Sequence[ir.Value]], carried: ir.Value, given: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Run `step` over the first axis of `given`: it takes what is carried and a part of each, float32 in all.

        It returns what is carried on, and further values. Returned are the last one, and the others along a first axis.
        """
        count = self._count
        inputs = [
            ir.Value(name=f"scan_{count}.{number}", type=ir.TensorType(FLOAT)) for number in range(1 + len(given))
        ]
        body = self._inner(inputs, lambda: step(*inputs))
        return self.ops("Scan", carried, *given, outputs=len(body.outputs), body=body, num_scan_inputs=len(given))

    def _inner(self, inputs: Sequence[ir.Value], make: Callable[[], Sequence[ir.Value]]) -> ir.Graph:
        """A graph within this one, of the operators that `make` adds."""
        outside = self._nodes
        self._nodes = []
        outputs = make()
        graph = ir.Graph(inputs, outputs, nodes=self._nodes, name=f"{outputs[0].name}.inner")
        self._nodes = outside
        return graph

    def declared(self, x: ir.Value, *shape: int | str) -> ir.Value:
        """A result with a shape that no engine infers: without it onnxruntime loads a stage twice as slowly."""
        x.type, x.shape = ir.TensorType(self.dialect.compute), ir.Shape(shape)
        return x

    def constant(self, array: NDArray[Any] | Sequence[int] | int) -> ir.Value:
        """A small constant, stored in the graph itself. An integer or a list becomes int64."""
        data = np.asarray(array, np.int64) if not isinstance(array, np.ndarray) else array
        name = f"const_{len(self._initializers)}"
        return self._initializer(name, ir.Tensor(data, name=name))

    def stored(self, name: str) -> ir.Value:
        location = self._weights[name]
        return self._external(name, location, ELEMENT_TYPES[location.dtype], location.shape)

    def stored_rows(self, name: str, first: int, count: int) -> ir.Value:
        """Neighbouring rows [count, ...] of a table, from the place of the table.

        To gather a row whose number is in the graph, engines read the whole table while they load, and hold it twice.
        """
        table = self._weights[name]
        row = table.nbytes // table.shape[0]
        shape = (count, *table.shape[1:])
        rows = replace(table, offset=table.offset + first * row, nbytes=count * row, shape=shape)
        return self._external(f"{name}.{first}", rows, ELEMENT_TYPES[table.dtype], shape)

    def location(self, name: str) -> StoredTensor:
        return self._weights[name]

    def holds(self, name: str) -> bool:
        return name in self._weights

    def octets(self, name: str, *shape: int) -> ir.Value:
        return self._external(name, self._weights[name], ir.DataType.UINT8, shape)

    def scales(self, name: str, dtype: ir.DataType, *shape: int) -> ir.Value:
        """The scales of a quantised matrix, in `dtype`."""
        location = self._weights[name].scales
        assert location is not None, name
        scales = self._external(f"{name}.scales", location, ir.DataType.FLOAT16, shape)
        return scales if dtype == ir.DataType.FLOAT16 else self.cast(scales, dtype)

    def zeros(self, name: str, *shape: int) -> ir.Value:
        """The zero points of a quantised matrix, int8, or int4 where there are two to a byte."""
        location = self._weights[name].zeros
        assert location is not None, name
        kind = ir.DataType.INT4 if location.dtype == "U8" else ir.DataType.INT8
        return self._external(f"{name}.zeros", location, kind, shape)

    def zero_octets(self, name: str) -> ir.Value | None:
        """The bytes [out, ...] of a quantised matrix's zero points; None if it is symmetric."""
        location = self._weights[name].zeros
        if location is None:
            return None
        return self._external(f"{name}.zeros", location, ir.DataType.UINT8, location.shape)

    def _external(self, name: str, location: StoredTensor, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        if name in self._initializers:
            return self._initializers[name]
        tensor = ir.ExternalTensor(
            location.file,
            location.offset,
            location.nbytes,
            dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=os.fspath(self._folder),
        )
        return self._initializer(name, tensor)

    def weight(self, name: str | int, dtype: ir.DataType | None = None) -> ir.Value:
        """A weight in `dtype`; for a norm without weights, whose width is given, ones."""
        dtype = dtype or self.dialect.compute
        if isinstance(name, int):
            return self.constant(np.ones(name, dtype.numpy()))
        if ELEMENT_TYPES[self._weights[name].dtype] == dtype:
            return self.stored(name)
        if (name, dtype) not in self._cast:
            self._cast[name, dtype] = self.cast(self.stored(name), dtype)
        return self._cast[name, dtype]

    def linear(self, x: ir.Value, name: str, *, bias: bool) -> ir.Value:
        """X @ W^T (+ b) for [tokens, in], with W as Hugging Face stores it, [out, in], or quantised."""
        return self.project(x, f"{name}.weight", f"{name}.bias" if bias else None)

    def linears(self, x: ir.Value, names: Sequence[str], *, bias: bool) -> Sequence[ir.Value]:
        """`linear` of several matrices with the same inputs.

        In a dialect that joins them it is one product, if they are quantised and side by side in their file; but not of
        three equal int8 matrices, which TensorRT-RTX takes apart again and dequantises in a kernel of its own.
        """
        matrices = [self._weights[f"{name}.weight"] for name in names]
        joins = self.dialect.joins and len(names) > 1 and all(matrix.scales is not None for matrix in matrices)
        if len(names) == 3 and matrices[0].dtype == "I8" and len({matrix.shape for matrix in matrices}) == 1:
            joins = False
        matrix = adjoining(matrices) if joins else None
        if matrix is None:
            return [self.linear(x, name, bias=bias) for name in names]
        joined_name = "+".join(names)
        self._weights[joined_name] = matrix
        y = self.project(x, joined_name)
        if bias:
            biases = [self.weight(f"{name}.bias") for name in names]
            y = self.op("Add", y, self.op("Concat", *biases, axis=0))
        rows = self.constant([part.shape[0] for part in matrices])
        return self.ops("Split", y, rows, outputs=len(names), axis=-1)

    def project(self, x: ir.Value, weight: str, bias: str | None = None) -> ir.Value:
        if self._weights[weight].scales is not None:
            return self.dialect.quantised(self, x, weight, bias)
        return self.gemm(x, self.weight(weight), bias)

    def gemm(self, x: ir.Value, matrix: ir.Value, bias: str | None) -> ir.Value:
        return self.op("Gemm", x, matrix, *([self.weight(bias)] if bias else []), transB=1)

    def dequantised(self, name: str) -> ir.Value:
        """A quantised matrix [out, in] in the dialect's arithmetic type, by the operator that engines fuse.

        Its zero points are counted only in a dialect that has them.
        """
        location = self._weights[name]
        compute = self.dialect.compute
        assert location.scales is not None, name
        rows, blocks = location.scales.shape
        shape = (rows,) if blocks == 1 else (rows, blocks)
        parts = [self.stored(name), self.scales(name, compute, *shape)]
        if location.zeros is not None and self.dialect.zero_points:
            kind = ELEMENT_TYPES[location.dtype]
            parts.append(self.cast(self.zeros(name, *shape), kind))
        if blocks == 1:
            return self.op("DequantizeLinear", *parts, axis=0)
        return self.op("DequantizeLinear", *parts, axis=1, block_size=location.shape[1] // blocks)

    def stack(self, name: str, count: int) -> ir.Value:
        """A matrix as `count` matrices [count, out, in] of its rows, of a type that engines widen as they read it."""
        location = self._weights[name]
        shape = (count, location.shape[0] // count, location.shape[1])
        compute = self.dialect.compute
        kind = ELEMENT_TYPES[location.dtype]
        matrices = self._external(name, location, kind, shape)
        if location.scales is None:
            return matrices if kind == compute else self.cast(matrices, compute)
        blocks = location.scales.shape[1]
        parts = [matrices, self.scales(name, compute, *shape[:2], blocks)]
        if location.zeros is not None:
            zeros = self.zeros(name, *shape[:2], blocks)
            parts.append(self.cast(zeros, kind))
        return self.op("DequantizeLinear", *parts, axis=2, block_size=shape[2] // blocks)

    def less_zeros(self, product: ir.Value, x: ir.Value, name: str) -> ir.Value:
        """The product of x [tokens, in] and the integers of a quantised matrix, less that of x and its zero points.

        All weights of a block have the same one, so it is multiplied by the sum of their inputs.
        """
        location = self._weights[name]
        if location.zeros is None:
            return product
        assert location.scales is not None, name
        rows, blocks = location.scales.shape
        shape = (rows,) if blocks == 1 else (rows, blocks)
        zeros = self.op("DequantizeLinear", self.zeros(name, *shape), self.scalar(1))
        steps = self.op("Neg", self.op("Mul", zeros, self.scales(name, self.dialect.compute, *shape)))
        by_block = self.reshape(x, -1, blocks, location.shape[1] // blocks)
        sums = self.sum(by_block, -1)
        return self.op("Gemm", sums, self.reshape(steps, rows, blocks), product, transB=1)

    def from_float32(self, x: ir.Value) -> ir.Value:
        compute = self.dialect.compute
        return x if compute == FLOAT else self.cast(x, compute)

    def to_float32(self, x: ir.Value) -> ir.Value:
        return x if self.dialect.compute == FLOAT else self.cast(x, FLOAT)

    def scalar(self, value: float) -> ir.Value:
        return self.constant(np.array(value, self.dialect.compute.numpy()))

    def bounded(self, x: ir.Value, bound: float, kind: ir.DataType = FLOAT) -> ir.Value:
        """Numbers of a type between -bound and bound, by tanh."""
        cap = self.constant(np.array(bound, kind.numpy()))
        return self.op("Mul", self.op("Tanh", self.op("Div", x, cap)), cap)

    def single(self, value: float) -> ir.Value:
        """A constant of type float32, whatever the arithmetic's type."""
        return self.constant(np.array(value, np.float32))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.op("Cast", x, to=dtype.value)

    def transpose(self, x: ir.Value, *order: int) -> ir.Value:
        return self.op("Transpose", x, perm=list(order))

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        return self.op("Unsqueeze", x, self.constant(axes))

    def squeeze(self, x: ir.Value, *axes: int) -> ir.Value:
        return self.op("Squeeze", x, self.constant(axes))

    def slice(self, x: ir.Value, start: int | ir.Value, stop: int | ir.Value, axis: int | ir.Value) -> ir.Value:
        """The part from `start` to `stop` along one axis; what the graph computes has shape [1]."""
        bounds = [self.constant([bound]) if isinstance(bound, int) else bound for bound in (start, stop, axis)]
        return self.op("Slice", x, *bounds)

    def sum(self, x: ir.Value, *axes: int, keepdims: bool = False) -> ir.Value:
        return self.op("ReduceSum", x, self.constant(axes), keepdims=int(keepdims))

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one axis, [1] int64."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def squares(self, side: int, x: ir.Value, *weights: ir.Value) -> ir.Value:
        """A convolution of squares side by side: [images, channels, height, width] to [images, hidden, rows, columns].

        `weights` are the kernel and maybe a bias.
        """
        return self.op("Conv", x, *weights, kernel_shape=[side] * 2, strides=[side] * 2)

    def numbers(self, count: ir.Value) -> ir.Value:
        """0, 1, 2, ... below `count` [1], int64."""
        return self.op("Range", self.constant(0), self.op("Squeeze", count), self.constant(1))

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        """0 keeps an axis, -1 is inferred."""
        return self.op("Reshape", x, self.constant(list(shape)))

    def model(self) -> ir.Model:
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=dict(self.dialect.opsets),
            name=self.name,
        )
        return ir.Model(graph, ir_version=self.dialect.ir_version, producer_name="vtx")

    def write(self, path: Path) -> None:
        ir.save(self.model(), path)

    def _initializer(self, name: str, tensor: Any) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._initializers[name] = value
        return value


class StageAttention(Protocol):
    """Attention of one stage under construction, by KV slot; making one declares the stage's inputs for it.

    `split` converts [tokens, heads * head_dim] to the layout of `rotate` and `attend`, `join` back.
    """

    def split(self, x: ir.Value, heads: int, layer: int) -> ir.Value: ...

    def rotate(self, x: ir.Value, heads: int, layer: int) -> ir.Value:
        """Rotary embedding by the tokens' positions, which differ from their KV slots after a withdrawal."""
        ...

    def attend(self, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        """Append K and V to the layer's cache, an input; every token sees its own slot and those before.

        In a decoder whose tokens may see each other both ways, it sees the first `names.SEEN_SLOTS` instead; in layers
        that slide, only from `names.FIRST_SLOT` on.
        """
        ...

    def read(self, q: ir.Value, layer: int) -> ir.Value:
        """Attend to K and V of the layer's source, which an earlier stage has filled."""
        ...

    def join(self, x: ir.Value, layer: int) -> ir.Value: ...

    def finish(self) -> None:
        """Declare the caches of all layers as outputs."""
        ...


@dataclass(frozen=True)
class Dialect(ABC):
    """One operator set. `compute` is the type of the arithmetic; hidden states cross a graph's boundary in float32.

    `sizes_from_values`: the number of tokens may depend on a tensor's values; else a mask hides tokens. `branches`: a
    graph may have others within it, conditionals and loops; if not, one run is of one conversation, too. `largest`: the
    most numbers of a tensor, None for any number. `zero_points`: integers may have zero points. `joins`: products with
    quantised matrices that have the same inputs are one, as a product is a launch.
    """

    name: str
    opsets: Mapping[str, int]
    ir_version: int
    compute: ir.DataType = FLOAT
    sizes_from_values: bool = False
    branches: bool = True
    largest: int | None = None
    zero_points: bool = True
    joins: bool = False

    def cache_shape(self, kv_heads: int, slots: str, head_dim: int) -> tuple[int | str, ...]:
        return (1, kv_heads, slots, head_dim)

    def filled(self, b: Builder, keys: ir.Value, total: ir.Value) -> ir.Value:
        """A layer's first `total` [1] int64 keys [1, kv_heads, slots, head_dim], or all if a mask hides the rest.

        `keys` are as in a cache.
        """
        return keys

    @abstractmethod
    def norm(self, b: Builder, x: ir.Value, weight: str | int, eps: float) -> ir.Value:
        """RMS norm over the last axis, computed in float32; `weight` as in `Builder.weight`."""

    def add_norm(
        self, b: Builder, delta: ir.Value, total: ir.Value, weight: str, eps: float
    ) -> tuple[ir.Value, ir.Value]:
        """(norm(total + delta), total + delta)."""
        total = b.op("Add", total, delta)
        return self.norm(b, total, weight, eps), total

    def layer_norm(self, b: Builder, x: ir.Value, name: str, eps: float) -> ir.Value:
        """Layer norm over the last axis with `name`.weight and `name`.bias, computed in float32."""
        scale = b.weight(f"{name}.weight", FLOAT)
        bias = b.weight(f"{name}.bias", FLOAT)
        return b.from_float32(b.op("LayerNormalization", b.to_float32(x), scale, bias, axis=-1, epsilon=eps))

    def quantised(self, b: Builder, x: ir.Value, weight: str, bias: str | None) -> ir.Value:
        """X @ W^T (+ b) with the quantised matrix W of that name."""
        product = b.gemm(x, b.dequantised(weight), bias)
        return product if self.zero_points else b.less_zeros(product, x, weight)

    def gelu(self, b: Builder, x: ir.Value, *, tanh: bool) -> ir.Value:
        """Exact GELU, or its tanh approximation."""
        return b.op("Gelu", x, approximate="tanh") if tanh else b.op("Gelu", x)

    def swish(self, b: Builder, x: ir.Value, rate: float) -> ir.Value:
        inner = x if rate == 1 else b.op("Mul", x, b.scalar(rate))
        return b.op("Mul", x, b.op("Sigmoid", inner))

    def mish(self, b: Builder, x: ir.Value) -> ir.Value:
        return b.op("Mish", x)

    @abstractmethod
    def stage_attention(self, b: Builder, c: TextConfig, kv_type: ir.DataType, layers: range) -> StageAttention:
        """The attention of these layers of the decoder."""

    @abstractmethod
    def tower_attention(
        self, b: Builder, q: ir.Value, k: ir.Value, v: ir.Value, heads: Heads, seen: ir.Value | None = None
    ) -> ir.Value:
        """Attention of every token to every other, or causal to itself and those before; all [batch, tokens, hidden].

        `seen` [1 or batch, 1, 1, tokens] bool: the tokens that are attended to, None for all; not if causal.
        Merged tokens are hidden by it if `sizes_from_values` is false, else removed.
        """
