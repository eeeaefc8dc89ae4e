"""What engines of stages with the heads of published models contain, by the builder's own list of their layers.

TensorRT-RTX builds them without a GPU, in both dialects, so it stands in for TensorRT with `trt10`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from tests.support.bundles import export
from tests.support.tiny import Tiny, make

from vtx.runtime.backends.tensorrt.engine import LOG
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.tensorrt.build import LARGEST_ENGINE, EngineJob, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, build
from vtx.tools.tensorrt.profiles import input_shapes
from vtx.tools.tensorrt.targets import TARGETS, load_tensorrt

trt = pytest.importorskip("tensorrt_rtx", reason='needs pip install "vtx-edge[rtx]"')
pytestmark = pytest.mark.slow
LAYERS = 2
KERNELS = 10 << 20  # bytes of engines of this size that are no weights
SHAPES = {
    "grouped": Tiny(hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816, context=2048),
    "all": Tiny(hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2816, context=2048),
}
LAUNCHES = 16  # of a layer, at most
PRODUCTS = 4  # of a layer with quantised weights: q, k and v are one, and so are gate and up
LAYER = re.compile(r"^Name: (?P<name>.+?)_myl(?P<graph>\d+)_\d+, LayerType: (?P<kind>\w+),", re.MULTILINE)
NO_LAUNCHES = ("reshape", "cast", "copy", "signal", "wait")  # of sizes, on the host, and between streams
PAGE = Path(__file__).parents[3] / "docs/reference/devices.md"
PRECISIONS = ("fp16", "int8", "int4")
TABLED = "1.7."  # the release of TensorRT-RTX that the page's table is of
Bundles = Callable[[str, str, int], Bundle]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """A bundle of one stage by its shape, precision and layers; each is made once."""
    folder = tmp_path_factory.mktemp("layers")

    @cache
    def checkpoint(shape: str, layers: int) -> Path:
        return make(folder / f"{shape}-{layers}", replace(SHAPES[shape], layers=layers))

    def bundle(shape: str, precision: str, layers: int) -> Bundle:
        return export(checkpoint(shape, layers), folder / f"{shape}-{layers}-{precision}", (), precision,
                      max_context=2048, dialects=("ort", "trt", "trt10"))  # fmt: skip

    return cache(bundle)


def build_stage(
    bundle: Bundle,
    card: str,
    dialect: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> tuple[EngineJob, int, list[list[str]]]:
    """The job of the stage, the bytes of its engine, and the names of what each profile launches."""
    module, release = load_tensorrt(TARGETS[card])
    plan = plan_engines(bundle, TARGETS[card], release, module.__version__, dialect)
    (stage,) = bundle.manifest.dialects[dialect].stages
    job = next(job for job in plan.jobs if job.graph.name == stage)
    shapes = tuple(input_shapes(job.graph, profile) for profile in job.profiles)
    request = BuildRequest("tensorrt_rtx", bundle.path(stage), folder / "engine", TARGETS[card].capability, shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG, "1")
        built = build(request, lambda *_: None)
    graphs = defaultdict[str, list[str]](list)
    for layer in LAYER.finditer(capfd.readouterr().err):
        if layer["kind"] not in NO_LAUNCHES:
            graphs[layer["graph"]].append(layer["name"])
    return job, built.bytes, list(graphs.values())


@pytest.mark.covering(2)
@pytest.mark.parametrize("card", ["sm86", "sm89", "sm120"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_weights_are_fused_in_every_profile(
    shape: str, dialect: str, precision: str, card: str, bundles: Bundles, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    job, size, graphs = build_stage(bundles(shape, precision, LAYERS), card, dialect, tmp_path, capfd)
    assert len(graphs) == len(job.profiles) == 2
    for names in graphs:
        assert sum("_mha_" in name for name in names) == LAYERS
        apart = [name for name in names if "CastMulCast" in name and "Fc" not in name and "Mean" not in name]
        assert not apart, "weights are dequantised by kernels of their own"
        assert len(names) <= LAUNCHES * LAYERS
        if precision != "fp16":
            separate = 2 if (shape, precision) == ("all", "int8") else 0  # three equal int8 matrices are not joined
            assert sum("Fc" in name for name in names) == (PRODUCTS + separate) * LAYERS
    assert any("_gemv_mha_" in name for name in graphs[0]), "no kernels of its own for single tokens"
    assert size < LARGEST_ENGINE * job.graph.weights + KERNELS


def tabled(shape: str, dialect: str, precision: str) -> list[int]:
    """Launches of a layer by the page, for a token and for a prompt."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("<!-- launches -->\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2 : 2 + len(SHAPES)]]
    column = 1 + 3 * ("trt", "trt10").index(dialect) + PRECISIONS.index(precision)
    return [int(number) for row in rows if row[0] == shape for number in row[column].split("/")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_has_the_launches_of_the_page_s_table(
    shape: str, dialect: str, precision: str, bundles: Bundles, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not trt.__version__.startswith(TABLED):
        pytest.skip(f"the table is of TensorRT-RTX {TABLED}x, this is {trt.__version__}")
    counts = []
    for layers in (LAYERS, LAYERS + 1):
        _, _, graphs = build_stage(bundles(shape, precision, layers), "sm89", dialect, tmp_path, capfd)
        counts.append([len(names) for names in graphs])
    assert [more - few for few, more in zip(*counts, strict=True)] == tabled(shape, dialect, precision)


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
