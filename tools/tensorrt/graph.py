"""An ONNX graph for the linter: nodes, types, shapes, and the sources of values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtx.runtime.errors import BundleError

if TYPE_CHECKING:
    import onnx

Dim = int | str | None
_SHAPES_ONLY = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class SeenGraph:
    """A graph without its weights, types and shapes inferred if ONNX can.

    `shapes` gives sizes (int: fixed, str: a free size's name, None: unknown); a missing value has no known rank.
    `files` hold its weights, `weights` bytes of them, `int8` of which are int8 weights.
    """

    name: str
    opset: int
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    types: dict[str, str]
    shapes: dict[str, tuple[Dim, ...]]
    files: frozenset[str]
    weights: int
    int8: int

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        return {value: node for node in self.nodes for value in node.output if value}

    @cached_property
    def computed(self) -> dict[str, str]:
        """Values that depend on the values of an input, not only on its shape, and such an input of each."""
        source = {name: name for name in self.inputs}
        for node in self.nodes:
            sources = [source[value] for value in node.input if value in source]
            if sources and node.op_type not in _SHAPES_ONLY:
                source.update({value: sources[0] for value in node.output if value})
        return source

    @cached_property
    def folded(self) -> frozenset[str]:
        """Constants, and values computed from constants alone, e.g. casts."""
        constant = set(self.constants)
        for node in self.nodes:
            if node.input and all(value in constant for value in node.input if value):
                constant.update(node.output)
        return frozenset(constant)

    def users(self, value: str) -> Iterator[onnx.NodeProto]:
        return (node for node in self.nodes if value in node.input)


def load_graph(path: Path) -> SeenGraph:
    """Read a graph file, without weights in other files. Raises BundleError."""
    import onnx

    fix = "export the bundle again"
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except Exception as e:
        raise BundleError(f"{path.name} is not a readable ONNX graph ({type(e).__name__}); {fix}") from e
    if not model.opset_import or not model.graph.output:
        raise BundleError(f"{path.name} holds no ONNX graph; {fix}")
    return see(model, path.name)


def see(model: onnx.ModelProto, name: str) -> SeenGraph:
    import onnx

    opsets = {entry.domain: entry.version for entry in model.opset_import}
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # an opset newer than the onnx package; the operators are checked anyway
        inferred = model
    graph = inferred.graph
    weights = {tensor.name for tensor in graph.initializer}
    nodes = tuple(_nodes(graph))
    constants = weights | {node.output[0] for node in nodes if node.op_type == "Constant"}
    types = {}
    shapes = {}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        tensor = info.type.tensor_type
        types[info.name] = onnx.TensorProto.DataType.Name(tensor.elem_type)
        if tensor.HasField("shape"):
            shapes[info.name] = tuple(map(_side, tensor.shape.dim))
    files = set[str]()
    weight_bytes = 0
    int8_bytes = 0
    narrow = {"INT4", "UINT4", "FLOAT4E2M1"}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.TensorProto.DataType.Name(tensor.data_type)
        shapes[tensor.name] = tuple(tensor.dims)
        files |= {entry.value for entry in tensor.external_data if entry.key == "location"}
        count = math.prod(tensor.dims)
        width = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        weight_bytes += (count + 1) // 2 if types[tensor.name] in narrow else count * width
        int8_bytes += count if types[tensor.name] in ("INT8", "UINT8") else 0
    inputs = tuple(value.name for value in graph.input if value.name not in weights)
    return SeenGraph(
        name=name,
        opset=opsets.get("", 0),
        nodes=nodes,
        inputs=inputs,
        outputs=tuple(value.name for value in graph.output),
        constants=frozenset(constants),
        types=types,
        shapes=shapes,
        files=frozenset(filter(None, files)),
        weights=weight_bytes,
        int8=int8_bytes,
    )


def _side(dim: Any) -> int | str | None:
    """A number, the name of a dynamic one, or None if it is unknown."""
    return int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or None


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    import onnx

    for entry in node.attribute:
        if entry.name == name:
            return onnx.helper.get_attribute_value(entry)
    return default


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, including those in loops and branches."""
    for node in graph.node:
        yield node
        for entry in node.attribute:
            for inner in [entry.g] if entry.HasField("g") else entry.graphs:
                yield from _nodes(inner)
