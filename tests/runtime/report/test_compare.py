"""vtx-doctor --compare: graphs of two sources agree, and one that was changed is named, with the layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from tests.support import bundles
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.qwen import QWEN3
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.cli import doctor
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.errors import BundleError, DeviceError, RequestError
from vtx.runtime.report.compare import compare, first_difference, parse_sources

REDUCTIONS = ("fastv:k=2",)
GOLDEN = "golden.safetensors"


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "bundle"
    return bundles.export_all(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), reductions=REDUCTIONS).folder


def invoke(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(doctor, [str(word) for word in words], catch_exceptions=False)


def perturb(folder: Path, graph: str, weight: str) -> None:
    """Give one graph its own copy of a weight, [out, in] or [in, out], with a number changed much."""
    path = folder / graph
    model = onnx.load(path)  # with its weights
    (tensor,) = [t for t in model.graph.initializer if t.name.endswith(weight)]
    values = numpy_helper.to_array(tensor).copy()
    values[3, 5] += 40 * np.abs(values).max()
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)
    bundles.reseal(folder, graph)


@pytest.mark.sampled
@pytest.mark.parametrize("other", ["plain", "trt", "openvino"])
def test_sources_of_a_sound_bundle_agree(other: str, whole: Path) -> None:
    if other == "openvino":
        pytest.importorskip("openvino")
    graphs = list(compare(Bundle.open(whole), "ort", other))
    dialect = "trt" if other == "trt" else "plain"
    names = ["vision", "embed", "stage-01-01", "stage-02-02", "stage-03-04", "head"]
    compared = [graph.graph for graph in graphs]
    assert [name for name in compared if not name.startswith("score")] == [f"{name}.{dialect}.onnx" for name in names]
    assert f"score.{dialect}.onnx after layer 2" in compared
    assert first_difference(graphs) is None
    outputs = {output.tensor for graph in graphs for output in graph.outputs}
    kv = {f"present_{part}.{layer}" for part in ("key", "value") for layer in (1, 2, 3, 4)}
    assert outputs >= {"image_features", "hidden", "hidden_out", "attention_sum", "attention_max", "logits"}
    assert (outputs >= kv) == (other != "openvino")  # a backend keeps its K and V to itself


@pytest.mark.parametrize("other", ["plain", "trt", "openvino"])
def test_inputs_of_stages_per_token_are_given_and_compared(
    other: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    if other == "openvino":
        pytest.importorskip("openvino")
    bundle = bundles.export_all(tiny_checkpoint(QWEN3), tmp_path / "bundle", (3,), reductions=("fastv:k=2",))
    graphs = list(compare(bundle, "ort", other))
    assert first_difference(graphs) is None
    assert {f"token_input.map{n}" for n in (1, 2, 3)} <= {output.tensor for output in graphs[0].outputs}


@pytest.mark.parametrize("other", ["plain", "trt", "trt10", "openvino"])
@pytest.mark.parametrize("tiny", [GEMMA3, GEMMA4], ids=lambda tiny: tiny.family)
def test_layers_that_slide_and_layers_that_read_others_are_compared(
    tiny: Tiny, other: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    if other == "openvino":
        pytest.importorskip("openvino")
    bundle = bundles.export_all(tiny_checkpoint(tiny), tmp_path / "bundle", (3,))
    graphs = list(compare(bundle, "ort", other))
    assert len(graphs) == 3 + len(bundle.manifest.stages)
    assert first_difference(graphs) is None


def test_k_and_v_in_8_bits_are_compared_as_numbers(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint(Tiny(layers=2))), (2,), "fp32", kv_precision="int8")
    bundle = bundles.export_with(options, tmp_path / "bundle")
    graphs = list(compare(bundle, "ort", "plain"))
    assert first_difference(graphs) is None
    largest = max(output.difference for graph in graphs for output in graph.outputs if "present" in output.tensor)
    assert 1e-4 < largest < 0.05  # rounded to 8 bits, and no more


@pytest.mark.parametrize(
    ("graph", "weight", "tensor"),
    [
        ("stage-03-04.plain.onnx", "layers.3.self_attn.k_proj.weight", "present_key.4"),
        ("stage-03-04.plain.onnx", "layers.2.mlp.down_proj.weight", "present_key.4"),
        ("stage-01-01.plain.onnx", "layers.0.self_attn.v_proj.weight", "present_value.1"),
        ("head.plain.onnx", "head.weight", "logits"),
    ],
)
def test_a_perturbed_weight_names_its_graph_and_the_first_output_behind_it(
    graph: str, weight: str, tensor: str, folder: Path
) -> None:
    perturb(folder, graph, weight)
    graphs = list(compare(Bundle.open(folder), "ort", "plain"))
    assert [entry.graph for entry in graphs if not entry.worst.passed] == [graph]
    first = first_difference(graphs)
    assert first is not None
    assert (first.graph, first.tensor) == (graph, tensor)


def test_the_command_ends_with_the_first_difference(folder: Path) -> None:
    perturb(folder, "stage-02-02.trt.onnx", "layers.1.self_attn.v_proj.weight")
    result = invoke(folder, "--compare", "ort,trt")
    assert result.exit_code == 1
    assert "BEYOND" in result.stdout, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("doctor: trt differs from ort first in stage-02-02.trt.onnx, output present_value.2: by ")
    found: dict[str, Any] = json.loads(invoke(folder, "--compare", "ort,trt", "--json").stdout)
    assert found["compare"] == ["ort", "trt"]
    assert found["first_difference"]["tensor"] == "present_value.2"
    assert not found["first_difference"]["passed"]
    assert sum(not output["passed"] for output in found["outputs"]) >= 1


def test_the_command_says_that_sources_agree(whole: Path) -> None:
    result = invoke(whole, "--compare", "plain,ort")
    assert result.exit_code == 0, result.output
    assert "every graph of ort agrees with plain within the limits" in result.stdout
    assert "head.ort.onnx" in result.stdout
    found = json.loads(invoke(whole, "--compare", "plain,ort", "--json").stdout)
    assert found["first_difference"] is None


@pytest.mark.parametrize("wrong", ["no image token", "no token of the model", "a negative token"])
def test_forged_golden_ids_are_refused_in_one_line(folder: Path, wrong: str) -> None:
    values = {name: read_tensor(info) for name, info in read_header(folder / GOLDEN).tensors.items()}
    bad = {"no image token": values["ids"] * 0, "no token of the model": values["ids"] * 0 + (1 << 40)}
    values["ids"] = bad.get(wrong, np.concatenate([values["ids"], [-1]]))
    write_safetensors(folder / GOLDEN, values)
    bundles.reseal(folder, GOLDEN)
    with pytest.raises(BundleError, match="; export"):
        list(compare(Bundle.open(folder), "ort", "plain"))


def test_a_file_that_was_altered_is_named_before_anything_is_computed(folder: Path) -> None:
    bundles.flip(folder / "head.plain.onnx")
    result = invoke(folder, "--compare", "ort,plain")
    assert result.exit_code == 1
    assert "head.plain.onnx was altered" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("text", ["ort", "ort,ort", "ort,plain,trt", ""])
def test_a_comparison_takes_two_different_sources(text: str) -> None:
    with pytest.raises(RequestError, match=r"does not name two different sources; e\.g\. ort,plain"):
        parse_sources(text)


def test_what_cannot_be_compared_is_refused(whole: Path) -> None:
    bundle = Bundle.open(whole)
    with pytest.raises(RequestError, match=r"'cpu' cannot be compared; dialects on onnxruntime: ort, .*, trt10; dev"):
        list(compare(bundle, "ort", "cpu"))
    with pytest.raises(DeviceError, match="holds no engines"):
        list(compare(bundle, "ort", "tensorrt"))


@pytest.mark.parametrize("words", [["--compare", "ort,plain"], ["b", "--compare", "ort,plain", "--device", "cpu"]])
def test_a_comparison_takes_a_bundle_and_no_device(words: list[str]) -> None:
    assert invoke(*words).exit_code == 2
