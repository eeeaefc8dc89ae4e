"""Real engines of TensorRT-RTX from the demo model, compiled for cards that are not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_tensor_value_info
from tests.support.bundles import IGNORE, export, export_with
from tests.support.engine_graphs import Graph
from tests.support.families.eagle import TINY as EAGLE
from tests.support.families.eagle import make_eagle
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.glm_ocr import GLM_OCR
from tests.support.families.lerobot import make_policy
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.paddleocr_vl import PADDLE
from tests.support.families.paligemma import PALIGEMMA, PALIGEMMA2
from tests.support.families.pi0 import TinyPi0, make_pi0
from tests.support.families.pixtral import LIGHTON, MINISTRAL3, MISTRAL3, PIXTRAL
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25, QWEN35
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import Tiny, make

from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import demo_checkpoint, plan_export
from vtx.runtime.api.load import load
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError, ExportError
from vtx.runtime.precision import PRECISIONS
from vtx.tools.tensorrt.build import EnginePlan, build_engines, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, build
from vtx.tools.tensorrt.graph import load_graph
from vtx.tools.tensorrt.profiles import Shapes, input_shapes, stage_profiles
from vtx.tools.tensorrt.targets import TARGETS, load_tensorrt

trt = pytest.importorskip("tensorrt_rtx", reason='needs pip install "vtx-edge[rtx]"')
TRT = ("ort", "trt")
# A card for each precision, so that each card is built for.
CARDS = {"fp32": "sm86", "fp16": "sm89", "bf16": "sm120", "int8": "sm120", "int4": "sm89"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """The demo, cut at 16, in a precision; each is made once."""
    folder = tmp_path_factory.mktemp("rtx")
    return cache(lambda precision: export(demo_checkpoint(), folder / precision, (16,), precision, dialects=TRT))


@pytest.fixture
def bundle(bundles: Callable[[str], Bundle]) -> Bundle:
    return bundles("fp16")


def plan(bundle: Bundle, card: str, dialect: str = "trt") -> EnginePlan:
    module, release = load_tensorrt(TARGETS[card])
    return plan_engines(bundle, TARGETS[card], release, module.__version__, dialect)


def built(bundle: Bundle, dialect: str, *graphs: str, card: str = "sm89") -> set[str]:
    """Build engines of these graphs alone, where the others are those of other tests; the engines that there are."""
    whole = plan(bundle, card, dialect)
    jobs = tuple(job for job in whole.jobs if job.graph.name in graphs)
    assert all(outcome.built is not None for outcome in build_engines(replace(whole, jobs=jobs), IGNORE))
    return {*fingerprint.read_engines(bundle, card).engines}


def assert_all_built(bundle: Bundle, dialect: str = "trt") -> None:
    names = {*bundle.manifest.dialects[dialect].all}
    assert built(bundle, dialect, *names) == names


def assert_tower_and_stages_built(bundle: Bundle, dialect: str = "trt", card: str = "sm89", first: int = -1) -> None:
    """The stages from the `first` on: those before the last one have its layers, but where some keep a state.

    The operators of the embeddings and the head are those of the demo, built in every precision.
    """
    graphs = bundle.manifest.dialects[dialect]
    names = {graphs.vision, *graphs.stages[first:]}
    assert built(bundle, dialect, *names, card=card) == names


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_becomes_engines(precision: str, bundles: Callable[[str], Bundle]) -> None:
    """But for the first stage, which has the layers of the second one and more of them."""
    bundle, card = bundles(precision), CARDS[precision]
    graphs = bundle.manifest.dialects["trt"]
    names = {*graphs.all} - {graphs.stages[0]}
    assert built(bundle, "trt", *names, card=card) == names
    engines = fingerprint.read_engines(bundle, card)
    assert engines.capability == TARGETS[card].capability
    for record in engines.engines.values():
        fingerprint.open_engine(bundle, engines, record, whole=True).close()


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "precision"), [("trt", "fp16"), ("trt", "bf16"), ("trt10", "int4")])
def test_what_a_bundle_for_reductions_has_becomes_engines(dialect: str, precision: str, tmp_path: Path) -> None:
    """The vision graph whose windows merge, and the score graph. RTX stands in for JetPack 6, which reads `trt10`."""
    bundle = export(
        demo_checkpoint(), tmp_path / "bundle", (), precision, reductions=("mustdrop:192",), dialects=("ort", dialect)
    )
    graphs = bundle.manifest.dialects[dialect]
    assert graphs.vision_merges
    assert graphs.vision_last_attention  # the preset reads key tokens there, as the released code does
    assert built(bundle, dialect, graphs.vision, graphs.score) == {graphs.vision, graphs.score}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
def test_zero_points_of_four_bits_become_engines(dialect: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint(Tiny())), (), "int4", int4_block=32, dialects=("ort", dialect))
    assert "U8" in {weight.zeros and weight.zeros.dtype for weight in plan_export(options).weights.stored.values()}
    bundle = export_with(options, tmp_path / "bundle")
    (stage,) = bundle.manifest.dialects[dialect].stages
    assert built(bundle, dialect, stage) == {stage}


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "precision"), [("trt", "int8"), ("trt10", "fp16"), ("trt10", "int4")])
def test_what_a_rest_needs_becomes_engines_without_a_reduction(dialect: str, precision: str, tmp_path: Path) -> None:
    """The score graph, and the queries of the stage that ends before K."""
    bundle = export(demo_checkpoint(), tmp_path / "bundle", (16,), precision, dialects=("ort", dialect))
    graphs = bundle.manifest.dialects[dialect]
    assert [stage.query for stage in bundle.manifest.stages] == [True, False]
    assert built(bundle, dialect, graphs.score, graphs.stages[0]) == {graphs.score, graphs.stages[0]}


@pytest.mark.slow
def test_a_family_with_tiles_and_a_tower_of_its_own_becomes_engines(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """SmolVLM's vision graph ends in a norm, a pixel shuffle and one matrix, and takes one tile."""
    bundle = export(tiny_checkpoint(SMOLVLM), tmp_path / "bundle", (3,), "fp16", dialects=TRT)
    assert_tower_and_stages_built(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm89", "sm120"])
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("tiny", [QWEN2, QWEN25, QWEN3, GLM_OCR, PADDLE], ids=lambda tiny: tiny.family)
def test_towers_of_images_at_their_own_resolution_become_engines(
    tiny: Tiny, dialect: str, card: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    bundle = export(tiny_checkpoint(tiny), tmp_path / "bundle", (2,), "fp16", dialects=("ort", dialect))
    assert_tower_and_stages_built(bundle, dialect, card)
    engines = fingerprint.read_engines(bundle, card).engines
    unit = bundle.manifest.model.tower.patch * 2
    least, likely, most = engines[bundle.manifest.dialects[dialect].vision].profiles[0]["height"]
    area = bundle.manifest.layout.parameters["max_pixels"]
    assert least == unit
    assert likely**2 <= area < 2 * area < (most + unit) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "precision"), [("trt", "fp16"), ("trt10", "int4")])
@pytest.mark.parametrize(
    "tiny", [PIXTRAL, MISTRAL3, MINISTRAL3, LIGHTON], ids=("pixtral", "mistral3", "ministral3", "lighton")
)
def test_towers_of_images_up_to_a_longest_edge_become_engines(
    tiny: Tiny, dialect: str, precision: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    bundle = export(tiny_checkpoint(tiny), tmp_path / "bundle", (2,), precision, dialects=("ort", dialect))
    assert_tower_and_stages_built(bundle, dialect)
    vision = fingerprint.read_engines(bundle, "sm89").engines[bundle.manifest.dialects[dialect].vision]
    assert vision.profiles[0]["height"] == (tiny.patch * bundle.manifest.model.tower.square, tiny.image, tiny.image)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int4"])
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("tiny", [LFM2, QWEN35, MINICPM, LFM3], ids=lambda tiny: tiny.family)
def test_layers_with_states_and_views_of_any_shape_become_engines(
    tiny: Tiny, dialect: str, precision: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """With stages of no layer with attention, whose inputs for slots nothing reads."""
    bundle = export(tiny_checkpoint(tiny), tmp_path / "bundle", (2, 3), precision, dialects=("ort", dialect))
    assert_tower_and_stages_built(bundle, dialect, first=0)
    engines = fingerprint.read_engines(bundle, "sm89").engines
    m = bundle.manifest
    graphs = m.dialects[dialect]
    assert engines[graphs.stages[0]].profiles[0]["ends"] == (1, 1, 65)
    assert engines[graphs.stages[0]].longest("tokens") == (m.max_context if m.model.delta is None else 128)
    if tiny not in (QWEN35, LFM3):
        unit, likely, longest = engines[graphs.vision].profiles[0]["width"]
        assert unit == m.model.tower.patch * m.model.tower.square
        assert longest == 2 * likely >= m.model.tower.image


@pytest.mark.slow
@pytest.mark.parametrize("family", ["paligemma", "paligemma2", "pi0"])
def test_a_prompt_that_sees_itself_both_ways_and_an_expert_become_engines(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    tiny = PALIGEMMA2 if family == "paligemma2" else PALIGEMMA
    checkpoint = make_pi0(folder, TinyPi0()) if family == "pi0" else make(folder, tiny)
    bundle = export(checkpoint, tmp_path / "bundle", (3,), "fp16", dialects=TRT)
    assert_all_built(bundle)
    if family == "pi0":
        with pytest.raises(
            DeviceError, match="output actions, but does not run them yet; run the bundle with --device"
        ):
            load(bundle.folder, device="tensorrt")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["smolvla", "pi05"])
def test_experts_of_lerobot_become_engines(policy: str, tmp_path: Path, tiny_pi: None) -> None:
    checkpoint = make_policy(tmp_path / "checkpoint", policy)
    assert_all_built(export(checkpoint, tmp_path / "bundle", (3,), "fp16", dialects=TRT))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["trt", "trt10"])
@pytest.mark.parametrize("precision", ["fp16", "int4"])
@pytest.mark.parametrize("tiny", [GEMMA3, GEMMA4], ids=lambda tiny: tiny.family)
def test_windows_and_shared_keys_and_values_become_engines(
    tiny: Tiny, precision: str, dialect: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(replace(tiny, head_dim=32))
    bundle = export(checkpoint, tmp_path / "bundle", (2, 4), precision, dialects=("ort", dialect))
    assert_all_built(bundle, dialect)


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "precision"), [("trt", "int8"), ("trt10", "fp16")])
def test_five_towers_become_an_engine(dialect: str, precision: str, tmp_path: Path) -> None:
    """With products in float32 beside those in half precision, and heads whose keys are longer than their values."""
    checkpoint = make_eagle(tmp_path / "checkpoint", EAGLE)
    bundle = export(checkpoint, tmp_path / "bundle", (3,), precision, dialects=("ort", dialect))
    assert_tower_and_stages_built(bundle, dialect)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_network_that_is_built_keeps_types_and_caches(precision: str, bundles: Callable[[str], Bundle]) -> None:
    bundle = bundles(precision)
    m = bundle.manifest
    graph = m.dialects["trt"].stages[1]
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(bundle.path(graph)))
    inputs = {network.get_input(n).name: network.get_input(n) for n in range(network.num_inputs)}
    cache = inputs["past_key.16"]
    kind = {"float16": trt.DataType.HALF, "float32": trt.DataType.FLOAT}[m.kv_dtype]
    assert (tuple(cache.shape), cache.dtype) == ((-1, -1, m.model.kv_heads, m.model.head_dim), kind)
    assert not any(tensor.is_shape_tensor for tensor in inputs.values())
    held = {network.get_layer(n).type for n in range(network.num_layers)}
    assert trt.LayerType.ATTENTION_INPUT in held
    assert (trt.LayerType.DEQUANTIZE in held) == (m.precision in ("int8", "int4"))


@pytest.mark.slow
@pytest.mark.parametrize("card", ["SM89", "SM120"])
@pytest.mark.parametrize(("precision", "fused"), [("fp16", True), ("fp32", False)])
def test_attention_to_any_number_of_slots_has_a_fused_kernel_in_half_precision(
    precision: str, fused: bool, card: str, bundles: Callable[[str], Bundle]
) -> None:
    """Not computed from its parts, as vtx-build allows where there is none."""
    bundle = bundles(precision)
    m = bundle.manifest
    graph = load_graph(bundle.path(m.dialects["trt"].stages[1]))
    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR)).parse_from_file(str(bundle.path(graph.name)))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for name, shapes in input_shapes(graph, stage_profiles(m, None)[0]).items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, card), 0)
    assert (builder.build_serialized_network(network, config) is not None) == fused


@pytest.mark.slow
def test_narrow_weights_stay_narrow_in_the_engine(tmp_path: Path) -> None:
    """The demo is too small to tell weights from kernels, so two products of [2048, 4096] each."""
    sizes = {precision: _wide(tmp_path, precision) for precision in ("fp16", "int8", "int4")}
    assert sizes["int8"] < 0.65 * sizes["fp16"]
    assert sizes["int4"] < 0.40 * sizes["fp16"]


@pytest.mark.slow
def test_a_graph_that_tensorrt_cannot_build_is_one_error(bundle: Bundle, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x07 no graph")
    request = BuildRequest("tensorrt_rtx", broken, tmp_path / "e", (8, 9), ())
    with pytest.raises(ExportError, match=r"TensorRT cannot build broken\.onnx: .*; the bundle is unchanged"):
        build(request, lambda *_: None)


@pytest.mark.slow
def test_a_build_tells_of_its_phases(bundle: Bundle, tmp_path: Path) -> None:
    graph = bundle.manifest.dialects["trt"].stages[0]
    job = next(job for job in plan(bundle, "sm89").jobs if job.graph.name == graph)
    told: list[tuple[str, float]] = []
    request = BuildRequest("tensorrt_rtx", bundle.path(graph), tmp_path / "e", (8, 9), _shapes(job))
    build(request, lambda *event: told.append(event))
    assert any("engine" in phase for phase, _ in told)
    assert all(0 <= share <= 1 for _, share in told)
    assert [share for _, share in told] == sorted(share for _, share in told)


def _shapes(job: Any) -> tuple[Shapes, ...]:
    return tuple(input_shapes(job.graph, profile) for profile in job.profiles)


@pytest.mark.slow
def test_the_record_of_all_engines_is_what_the_runtime_reads_and_nothing_is_built_again(bundle: Bundle) -> None:
    outcomes = list(build_engines(plan(bundle, "sm89"), IGNORE))
    assert len(outcomes) == 6
    assert all(outcome.built is None for outcome in build_engines(plan(bundle, "sm89"), IGNORE))
    told = read_json(bundle.path("engines/sm89/engines.json"))
    assert told["version"] == trt.__version__
    assert told["engines"]["head.trt.onnx"]["profiles"][0]["tokens"] == [1, 1, 16]
    assert load_graph(bundle.path("head.trt.onnx")).opset == 24


def _wide(folder: Path, precision: str) -> int:
    """Bytes of an engine of two wide products, with weights as the exporter writes them."""
    g, kind = Graph(), TensorProto.FLOAT16
    y = g.linear(g.op("Relu", g.linear("x", 2048, 4096, precision)), 4096, 2048, precision)
    g.op("Identity", y, to="y")
    sizes = ["tokens", 2048]
    model = g.model([make_tensor_value_info("x", kind, sizes)], [make_tensor_value_info("y", kind, sizes)])
    path = folder / f"{precision}.onnx"
    onnx.save(model, path)
    shapes = ({"x": ((1, 2048), (64, 2048), (256, 2048))},)
    return build(BuildRequest("tensorrt_rtx", path, folder / "e", (8, 9), shapes), lambda *_: None).bytes
