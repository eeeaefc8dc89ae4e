"""The rules of a release of TensorRT, each a function, and their findings in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtx.runtime.backends.tensorrt.backend import NOT_BUILT, has_engines
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.errors import BundleError, RequestError
from vtx.tools.tensorrt.graph import SeenGraph, attribute, load_graph
from vtx.tools.tensorrt.releases import CHANGED_IN_21, FLOOR, INT4_OPSET, Release

if TYPE_CHECKING:
    import onnx

Problems = Iterator[tuple["onnx.NodeProto | None", str]]
Rule = Callable[[SeenGraph, Release], Problems]

CACHES = (names.past_key(0)[:-1], names.past_value(0)[:-1])
_STANDARD = frozenset({"", "ai.onnx"})
_LOOPS = frozenset({"Loop", "Scan"})
_SIZED_BY_VALUES = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
# Operators whose output's size is given by the values of these inputs.
_SIZE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "Tile": (1,),
    "Slice": (1, 2, 4),
    "Pad": (1,),
    "TopK": (1,),
    "Split": (1,),
    "OneHot": (1,),
    "Resize": (2, 3),
}
_ATTENTION_INPUTS = {4: "past_key", 5: "past_value", 6: "nonpad_kv_seqlen"}
_FIXED_AXES = frozenset({"Squeeze", "Unsqueeze"})  # of a tensor only since 10.7
_REDUCTIONS = frozenset(
    {
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    }
)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One part of a graph that a release does not read, and the dialect that is exported for that release."""

    graph: str
    node: str
    rule: str
    problem: str
    release: str
    dialect: str

    def __str__(self) -> str:
        where = f"{self.graph}, {self.node}" if self.node else self.graph
        return f"{where}: {self.problem} [{self.rule}]; for {self.release} export the {self.dialect!r} dialect"


def lint(graph: SeenGraph, release: Release) -> list[LintFinding]:
    """The violations of the rules of `release` in a graph, in the order of the rules."""
    return [
        LintFinding(
            graph=graph.name,
            node=node.name or node.op_type if node else "",
            rule=name,
            problem=problem,
            release=release.name,
            dialect=release.dialect,
        )
        for name, check in RULES.items()
        for node, problem in check(graph, release)
    ]


def lint_bundle(bundle: Bundle, dialect: str, release: Release) -> list[LintFinding]:
    graphs = (load_graph(bundle.path(name)) for name in dialect_graphs(bundle, dialect))
    return [finding for graph in graphs for finding in lint(graph, release)]


def dialect_graphs(bundle: Bundle, dialect: str) -> list[str]:
    """Files of a dialect's graphs: vision, embed, stages, head, gates, score. Raises RequestError, BundleError."""
    if not has_engines(bundle.manifest):
        raise RequestError(f"{NOT_BUILT}; run the bundle with --device cpu or openvino")
    dialects = bundle.manifest.dialects
    if dialect not in dialects:
        raise BundleError(
            f"{bundle.folder} holds no graphs of the {dialect!r} dialect, only {', '.join(sorted(dialects))}; "
            f"export it again with --dialect {dialect}"
        )
    return list(dialects[dialect].all)


def _opset(graph: SeenGraph, release: Release) -> Problems:
    ceiling = release.opset
    if not any(node.op_type == CHANGED_IN_21 for node in graph.nodes):
        ceiling = max(ceiling, INT4_OPSET)
    if not FLOOR <= graph.opset <= ceiling:
        yield None, f"opset {graph.opset}, {release.name} reads {FLOOR} to {ceiling}"


def _operators(graph: SeenGraph, release: Release) -> Problems:
    for node in graph.nodes:
        if node.domain not in _STANDARD:
            yield node, f"{node.op_type} of {node.domain} is not an operator of ONNX, and vtx uses no plug-ins"
            continue
        since = release.since(node.op_type)
        if since is None:
            yield node, f"{release.name} has no {node.op_type}"
        elif release.version < since:
            yield node, f"{node.op_type} came with {since[0]}.{since[1]}"


def _types(graph: SeenGraph, release: Release) -> Problems:
    for value, kind in graph.types.items():
        maker = graph.makers.get(value)
        if kind not in release.types and kind != "UNDEFINED":
            yield maker, f"{value} is {kind}, which {release.name} does not support"
        elif kind == "DOUBLE":
            yield maker, f"{value} is DOUBLE, which is rounded to FLOAT"
        elif kind == "UINT8" and value not in {*graph.inputs, *graph.outputs}:
            yield maker, f"{value} is UINT8, which only inputs and outputs may be"


def _attention(graph: SeenGraph, _: Release) -> Problems:
    for node in _standard(graph, "Attention"):
        for problem in _attention_forms(graph, node):
            yield node, problem
        maker = graph.makers.get(node.input[1])
        cached = node.input[1].startswith(CACHES) or (maker and maker.op_type in ("TensorScatter", "Concat"))
        if attribute(node, "is_causal", 0) and cached:
            yield node, "is_causal counts from the upper left, wrong over a cache; give a mask"


def _attention_forms(graph: SeenGraph, node: onnx.NodeProto) -> Iterator[str]:
    """The inputs, outputs, shapes and attributes of Attention that are not supported."""
    for index, name in _ATTENTION_INPUTS.items():
        if len(node.input) > index and node.input[index]:
            yield f"Attention's input {name} is not supported; keep the cache with TensorScatter"
    if any(node.output[1:]):
        yield "only Attention's first output is supported"
    for value in node.input[:4]:
        if value and len(graph.shapes.get(value, (0,) * 4)) != 4:
            yield f"{value} has {len(graph.shapes[value])} axes, Attention takes 4"
    for name in ("softcap", "softmax_precision", "qk_matmul_output_mode"):
        if attribute(node, name, 0):
            yield f"Attention's {name} is not supported"


def _caches(graph: SeenGraph, _: Release) -> Problems:
    for node in _standard(graph, "TensorScatter"):
        cache = node.input[0]
        indices = node.input[2] if len(node.input) > 2 else ""
        shape = graph.shapes.get(cache, ())
        if cache not in graph.inputs or node.output[0] not in graph.outputs:
            yield node, "a cache must be an input of the graph, and its update an output: they share one buffer"
        if len(shape) != 4 or not isinstance(shape[2], int):
            yield node, f"{cache} is {list(shape)}; a cache has 4 axes and a fixed capacity"
        if attribute(node, "mode", b"linear") != b"linear" or attribute(node, "axis", -2) not in (-2, 2):
            yield node, "only linear updates along axis -2 are supported"
        if not indices or graph.types.get(indices) not in ("INT32", "INT64", None):
            yield node, "the slot of the update must be given, as INT32 or INT64"


def _loops(graph: SeenGraph, _: Release) -> Problems:
    for node in graph.nodes:
        if node.op_type in _LOOPS and node.domain in _STANDARD:
            yield node, f"{node.op_type} runs its body one node at a time; unroll it"


def _sizes(graph: SeenGraph, _: Release) -> Problems:
    for node in graph.nodes:
        if node.op_type in _SIZED_BY_VALUES:
            yield node, f"the size of the output of {node.op_type} depends on values"
        for index in _SIZE_OPERANDS.get(node.op_type, ()):
            value = node.input[index] if len(node.input) > index else ""
            if value in graph.computed:
                yield node, f"a size depends on the values of {graph.computed[value]}; take it from a shape"


def _constants(graph: SeenGraph, release: Release) -> Problems:
    moving_axes = not release.has_attention and release.version < (10, 7)
    for node in graph.nodes:
        second = node.input[1] if len(node.input) > 1 else ""
        fixed = node.op_type in _REDUCTIONS or (moving_axes and node.op_type in _FIXED_AXES)
        if fixed and second and second not in graph.constants:
            yield node, f"the axes of {node.op_type} must be a constant"
        if node.op_type == "LayerNormalization" and any(node.output[1:]):
            yield node, "only LayerNormalization's first output is supported"
        if node.op_type == "ScatterND" and attribute(node, "reduction", b"none") != b"none":
            yield node, "ScatterND's reduction is not supported"


def _quantized(graph: SeenGraph, _: Release) -> Problems:
    for node in _standard(graph, "DequantizeLinear"):
        if graph.types.get(node.input[0]) not in ("INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"):
            yield node, f"DequantizeLinear of {graph.types.get(node.input[0])}; weights are INT8 or INT4, symmetric"
        if len(node.input) > 2 and node.input[2]:
            yield node, "a zero point is given; weights must be symmetric"
        if node.input[0] not in graph.constants or node.input[1] not in graph.folded:
            yield node, "the weights and their scales must be constants"


def _standard(graph: SeenGraph, operator: str) -> Iterator[onnx.NodeProto]:
    return (node for node in graph.nodes if node.op_type == operator and node.domain in _STANDARD)


RULES: Mapping[str, Rule] = {
    "opset": _opset,
    "operator": _operators,
    "type": _types,
    "attention": _attention,
    "cache": _caches,
    "loop": _loops,
    "size": _sizes,
    "constant": _constants,
    "quantized": _quantized,
}
