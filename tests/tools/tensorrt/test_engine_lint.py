"""The linter: clean graphs stay clean, and every rule is broken by a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper
from tests.support.bundles import export_all
from tests.support.engine_graphs import Graph, trt_stage
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError, RequestError
from vtx.tools.tensorrt.graph import load_graph, see
from vtx.tools.tensorrt.lint import RULES, LintFinding, lint, lint_bundle
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release, parse_release

JETPACK_6, JETPACK_7, ELEVEN = (Release(TENSORRT, version) for version in ((10, 3), (10, 16), (11, 0)))
RTX_17 = Release(RTX, (1, 7))
value = helper.make_tensor_value_info


def rules(model: onnx.ModelProto, release: Release) -> set[str]:
    return {finding.rule for finding in lint(see(model, "g.onnx"), release)}


def one_node(kind: str, *inputs: Any, domain: str = "", opset: int = 20, outputs: int = 1, **attributes: Any) -> Any:
    """A graph of one node; an input is a shape, a (shape, type) pair, or an array for a constant."""
    g, given, names = Graph(), [], []
    for number, item in enumerate(inputs):
        if item is None:
            names.append("")
        elif isinstance(item, np.ndarray | np.generic):
            names.append(g.constant(item))
        else:
            shape, dtype = item if isinstance(item, tuple) else (item, T.FLOAT)
            names.append(f"in_{number}")
            given.append(value(f"in_{number}", dtype, shape))
    outs = [f"out_{number}" for number in range(outputs)]
    g.nodes.append(helper.make_node(kind, names, outs, name="it", domain=domain, **attributes))
    return g.model(given, [value(name, T.FLOAT, None) for name in outs], opset)


Q = [1, 4, "rows", 8]
KV = [1, 4, 16, 8]
MASK = ([1, 1, "rows", 16], T.BOOL)
BROKEN: dict[str, Any] = {
    "a custom operator": ("operator", one_node("QuickGelu", [2], domain="com.microsoft")),
    "an operator that no release has": ("operator", one_node("Det", [2, 2])),
    "strings": ("type", one_node("Identity", ([2], T.STRING))),
    "doubles": ("type", one_node("Identity", ([2], T.DOUBLE))),
    "a past input of attention": ("attention", one_node("Attention", Q, KV, KV, MASK, KV, KV, opset=24)),
    "attention over three axes": (
        "attention",
        one_node("Attention", [1, "rows", 32], [1, 16, 32], [1, 16, 32], opset=24, q_num_heads=4, kv_num_heads=4),
    ),
    "a soft cap": ("attention", one_node("Attention", Q, KV, KV, MASK, opset=24, softcap=30.0)),
    "attention scores as an output": ("attention", one_node("Attention", Q, KV, KV, MASK, opset=24, outputs=4)),
    "a cache that is no input": ("cache", one_node("TensorScatter", np.zeros((1, 4, 16, 8), np.float32), Q, [1])),
    "a circular cache": ("cache", one_node("TensorScatter", KV, Q, ([1], T.INT64), opset=24, mode="circular")),
    "a cache along another axis": ("cache", one_node("TensorScatter", KV, KV, ([1], T.INT64), opset=24, axis=1)),
    "a size from values": ("size", one_node("NonZero", [4])),
    "a shape from an input": ("size", one_node("Reshape", [4], ([2], T.INT64))),
    "a slice to where an input says": ("size", one_node("Slice", [9], np.zeros(1, int), ([1], T.INT64))),
    "axes from an input": ("constant", one_node("ReduceMean", [4, 4], ([1], T.INT64))),
    "statistics of a layer norm": ("constant", one_node("LayerNormalization", [4, 4], [4], outputs=3)),
    "a scatter that adds": (
        "constant", one_node("ScatterND", [4], ([1, 1], T.INT64), [1], reduction="add")
    ),
    "weights with a zero point": (
        "quantized", one_node("DequantizeLinear", np.zeros(4, np.int8), np.float32(1), np.int8(3))
    ),
    "unsigned weights": ("quantized", one_node("DequantizeLinear", np.zeros(4, np.uint8), np.float32(1))),
    "weights that are an input": ("quantized", one_node("DequantizeLinear", ([4], T.INT8), np.float32(1))),
    "opset 26": ("opset", one_node("Relu", [4], opset=26)),
    "opset 8": ("opset", one_node("Relu", [4], opset=8)),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule_is_broken_by_a_graph_of_its_own(what: str) -> None:
    rule, model = BROKEN[what]
    for release in (JETPACK_7, ELEVEN, RTX_17):
        assert rule in rules(model, release), release.name


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert {rule for rule, _ in BROKEN.values()} | {"loop"} == set(RULES)


def test_a_loop_is_found_and_what_stands_in_it_too() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Det", ["x"], ["y"], name="inner"),
        ],
        "body",
        [value("i", T.INT64, []), value("go", T.BOOL, []), value("x", T.FLOAT, [2, 2])],
        [value("go_on", T.BOOL, []), value("y", T.FLOAT, [])],
    )
    model = one_node("Loop", np.int64(3), np.bool_(True), [2, 2], body=body)
    found = {(finding.rule, finding.node) for finding in lint(see(model, "g"), JETPACK_7)}
    assert {("loop", "it"), ("operator", "inner")} <= found


@pytest.mark.sampled
@pytest.mark.parametrize("release", [JETPACK_7, ELEVEN, RTX_17], ids=lambda r: r.name)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_a_stage_with_caches_in_place_is_clean_from_10_15_on(release: Release, precision: str) -> None:
    assert lint(see(trt_stage(precision), "stage.onnx"), release) == []


def test_the_same_stage_is_named_operator_by_operator_for_10_3() -> None:
    found = lint(see(trt_stage(), "stage.onnx"), JETPACK_6)
    operators = {finding.problem.split()[0] for finding in found if finding.rule == "operator"}
    assert operators == {"Attention", "RMSNormalization", "RotaryEmbedding", "TensorScatter"}
    assert any(finding.rule == "opset" and "opset 24" in finding.problem for finding in found)
    assert {finding.dialect for finding in found} == {"trt10"}


def test_a_finding_says_graph_node_rule_and_the_dialect_that_would_do() -> None:
    finding = LintFinding("stage.onnx", "node_7", "operator", "Attention came with 10.14", JETPACK_6.name, "trt10")
    assert str(finding) == (
        "stage.onnx, node_7: Attention came with 10.14 [operator]; for TensorRT 10.3 export the 'trt10' dialect"
    )


def test_a_cache_of_free_size_that_is_updated_in_place_is_found() -> None:
    model = trt_stage()
    for info in [*model.graph.input, *model.graph.output]:
        if info.name.startswith(("past_", "present_")):
            info.type.tensor_type.shape.dim[2].dim_param = "capacity"
    assert rules(model, RTX_17) == {"cache"}


def test_the_upper_left_causal_flag_over_a_cache_is_found() -> None:
    model = trt_stage()
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(helper.make_attribute("is_causal", 1))
    assert rules(model, RTX_17) == {"attention"}


def test_sizes_from_shapes_are_no_findings() -> None:
    g = Graph()
    g.op("Expand", g.constant(np.float32(1)), g.op("Shape", "x"), to="y")
    model = g.model([value("x", T.INT64, ["a", "b"])], [value("y", T.FLOAT, None)], 20)
    assert rules(model, JETPACK_6) == set()


def test_axes_of_unsqueeze_may_move_only_from_10_7_on() -> None:
    model = one_node("Unsqueeze", [4], ([1], T.INT64))
    assert "constant" in rules(model, JETPACK_6)
    assert "constant" not in rules(model, Release(TENSORRT, (10, 7)))


@pytest.mark.parametrize("cast", [False, True])
def test_int4_weights_are_read_from_10_0_on_their_scales_cast_or_not(cast: bool) -> None:
    codes = helper.make_tensor("codes", T.INT4, [32, 4], [1] * 128)
    g = Graph()
    g.weights.append(codes)
    scales = g.constant(np.ones((1, 4), np.float16))
    if cast:
        g.nodes.append(helper.make_node("Cast", [scales], ["cast"], to=T.FLOAT))
        scales = "cast"
    g.op("MatMul", "x", g.op("DequantizeLinear", "codes", scales, axis=0, block_size=32), to="y")
    kind = T.FLOAT if cast else T.FLOAT16
    model = g.model([value("x", kind, ["rows", 32])], [value("y", kind, ["rows", 4])], 21)
    assert rules(model, JETPACK_6) == set()


def test_opset_21_is_beyond_10_3_where_it_changed_an_operator() -> None:
    norm = [[1, 4, 2], [4], [4]]
    assert rules(one_node("GroupNormalization", *norm, opset=21, num_groups=2), JETPACK_6) == {"opset"}
    assert rules(one_node("Relu", [4], opset=21), JETPACK_6) == set()
    assert rules(one_node("Relu", [4], opset=22), JETPACK_6) == {"opset"}


def test_the_rules_say_what_the_parser_of_tensorrt_rtx_says() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs vtx-edge[tensorrt]")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    parser = trt.OnnxParser(builder.create_network(0), trt.Logger(trt.Logger.ERROR))
    standard = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    judged = {name for name in standard if RTX_17.since(name) is not None}
    assert judged == {name for name in standard if parser.supports_operator(name)}


@pytest.mark.slow
def test_a_bundle_of_onnxruntimes_dialect_is_named_as_such(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    bundle = export_all(tiny_checkpoint(Tiny(layers=2)), tmp_path / "bundle", (2,))
    found = lint_bundle(bundle, "ort", JETPACK_7)
    assert {finding.graph for finding in found} >= {"vision.ort.onnx", "stage-01-01.ort.onnx", "head.ort.onnx"}
    assert any("GroupQueryAttention of com.microsoft" in finding.problem for finding in found)
    assert {finding.dialect for finding in found} == {"trt"}
    with pytest.raises(BundleError, match=r"no graphs of the 'nonesuch' dialect, only .* with --dialect nonesuch"):
        lint_bundle(Bundle.open(bundle.folder), "nonesuch", JETPACK_7)


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x07" * 50], ids=["empty", "text", "no graph"])
def test_a_file_that_is_no_graph_is_said_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"g\.onnx"):
        load_graph(path)


@pytest.mark.parametrize(
    ("flavour", "text", "version"),
    [(TENSORRT, "10.3.0.30", (10, 3)), (TENSORRT, "11", (11, 0)), (RTX, "1.7.1.116", (1, 7))],
)
def test_a_release_is_its_major_and_minor_number(flavour: str, text: str, version: Sequence[int]) -> None:
    assert parse_release(flavour, text).version == version


@pytest.mark.parametrize(("flavour", "text"), [(TENSORRT, "8.6.1"), (RTX, "1.4"), (TENSORRT, "ten"), (TENSORRT, "")])
def test_a_release_that_is_too_old_or_none_is_refused(flavour: str, text: str) -> None:
    with pytest.raises(RequestError, match="is not supported; use"):
        parse_release(flavour, text)


def test_the_dialect_follows_from_the_release() -> None:
    assert [r.dialect for r in (JETPACK_6, JETPACK_7, ELEVEN, RTX_17)] == ["trt10", "trt", "trt", "trt"]
    assert [r.opset for r in (JETPACK_6, Release(TENSORRT, (10, 8)), JETPACK_7)] == [20, 22, 24]
