"""What engines of stages contain, by the builder's own list of their layers, and the results that a page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from tests.support.engine_layers import CARDS, DIALECTS, PRECISIONS, SHAPES, Bundles, build_stage, bundles_of

trt = pytest.importorskip("tensorrt_rtx", reason='needs pip install "vtx-edge[rtx]"')
pytestmark = pytest.mark.slow
LAYERS = 2
COPIES = 1.01  # bytes of weights in an engine by those of its graph, at most
OTHER = 3 << 20  # bytes beside weights, of an engine and of each layer, at most
LAUNCHES = 16  # of a layer, at most
PRODUCTS = 4  # of a layer with quantised weights: q, k and v are one, and so are gate and up
RESULTS = Path(__file__).parents[3] / "docs/measurements/results/engine-layers.jsonl"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return bundles_of(tmp_path_factory.mktemp("layers"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_weights_are_fused_in_every_profile(
    shape: str, dialect: str, precision: str, card: str, bundles: Bundles, tmp_path: Path
) -> None:
    engine = build_stage(bundles(shape, precision, LAYERS), card, dialect, tmp_path)
    assert len(engine.launches) == len(engine.job.profiles) == 2
    assert engine.attention == [LAYERS, LAYERS]
    assert engine.casts == [0, 0], "weights are dequantised by kernels of their own"
    assert engine.streams == {"0"}, "streams of the engine's own wait for the default one"
    for names in engine.launches:
        assert len(names) <= LAUNCHES * LAYERS
        if precision != "fp16":
            separate = 2 if (shape, precision) == ("all", "int8") else 0  # three equal int8 matrices are not joined
            assert sum("Fc" in name for name in names) == (PRODUCTS + separate) * LAYERS
    assert any("_gemv_mha_" in name for name in engine.launches[0]), "no kernels of its own for single tokens"
    assert 0.99 < engine.copies < COPIES
    assert engine.size - engine.weights < OTHER * (1 + LAYERS)


@pytest.mark.covering(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_has_the_launches_of_the_results(
    shape: str, dialect: str, precision: str, bundles: Bundles, tmp_path: Path
) -> None:
    head, *results = (json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines())
    if trt.__version__ not in head["caption"]:
        pytest.skip(f"the results are of another release than TensorRT-RTX {trt.__version__}")
    (row,) = (line["row"] for line in results if line.get("row", [])[:4] == ["sm89", dialect, shape, precision]
              and line["table"] == head["table"])  # fmt: skip
    few, more = (
        build_stage(bundles(shape, precision, layers), "sm89", dialect, tmp_path) for layers in (LAYERS, LAYERS + 1)
    )
    launches = [len(b) - len(a) for a, b in zip(few.launches, more.launches, strict=True)]
    assert row[head["columns"].index("launches of a layer")] == "/".join(map(str, launches))


def test_an_update_of_k_and_v_in_place_needs_a_fixed_number_of_slots() -> None:
    """So caches of the slots that a conversation fills are joined with the new ones before attention."""
    kinds = {"past": TensorProto.FLOAT16, "new": TensorProto.FLOAT16, "slot": TensorProto.INT64}
    shapes: dict[str, list[int | str]] = {"past": [1, 8, "slots", 128], "new": [1, 8, 1, 128], "slot": [1]}
    inputs = [helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in kinds.items()]
    output = helper.make_tensor_value_info("present", TensorProto.FLOAT16, shapes["past"])
    node = helper.make_node("TensorScatter", [*kinds], ["present"], axis=2, mode="linear")
    graph = helper.make_graph([node], "update", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert not parser.parse(model.SerializeToString())
    assert "must have a static sequence length dimension" in parser.get_error(0).desc()
