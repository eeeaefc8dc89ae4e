"""Every dialect's graphs answer as the PyTorch statement does, run by onnxruntime's CPU provider."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tests.support.bundles import export, export_with
from tests.support.dialects import DialectBackend
from tests.support.exported import KS, Models, greedy, policy, prompt
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN35
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime import precision
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.names import DIALECTS, TENSORRT
from vtx.runtime.errors import RequestError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates

STEPS = 12
TOLERANCES = {"fp32": 1e-4, "fp16": 0.13}  # on logits that reach 12; fp16 as in test_parity
FEATURE_TOLERANCES = {"fp32": 1e-5, "fp16": 1.5e-2}  # features reach 5; three times the largest difference seen
PRECISIONS = {
    "int8": {"precision": "int8"},
    "int4": {"precision": "int4"},
    "int4-everywhere": {"precision": "int4", "vision_precision": "int4", "head_precision": "int4"},
    "fp32-tower": {"precision": "fp16", "vision_precision": "fp32"},
    "fp32-kv": {"precision": "fp16", "kv_precision": "fp32"},
    "fp16-kv": {"precision": "fp32", "kv_precision": "fp16"},
}
OTHERS = tuple(name for name in DIALECTS if name != "ort")  # which all other tests run
VARIANTS = {
    "clip-gqa": Tiny(),
    "clip-mha": Tiny(kv_heads=4, projector_act="quick_gelu", feature_layer=(-2, -1)),
    "clip-one-kv-head-llama3": Tiny(kv_heads=1, head_dim=24, rope="llama3", tied=True),
    "siglip-biases": Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True),
    "vipllava": Tiny(family="vipllava", feature_layer=(-2, -1)),
    "internvl": Tiny(
        family="internvl", vision="internvl", text="qwen2", tokenizer="bytes", names="saved", feature_layer=-1
    ),
    "qwen2-siglip-mha": Tiny(text="qwen2", vision="siglip", kv_heads=4, vision_act="gelu"),
    "qwen3": Tiny(text="qwen3"),
}
STATEFUL = {
    LFM2: (150, 60),
    LFM3: (150, 60),
    QWEN35: (300, 160),
    MINICPM: (150, 61),
}  # and a picture that they see in tiles or slices
WORDS = "What is the colour of the square in the picture?"
Get = Callable[..., Model]


@pytest.fixture(scope="module")
def dialect_models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Get:
    """`models(dialect, tiny, precision)`: that bundle, run in that dialect."""
    models = Models(tmp_path_factory.mktemp("dialects"), tiny_checkpoint, DIALECTS)

    @cache
    def get(dialect: str, tiny: Tiny = Tiny(), precision: str = "fp32") -> Model:  # noqa: B008 - frozen
        bundle = models(tiny, KS, precision).bundle
        return Model(bundle, DialectBackend(bundle, dialect), 0)

    return get


@pytest.mark.sampled
@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_a_dialect_answers_as_the_statement_at_every_k(
    dialect_models: Get, reference: References, tiny: Tiny, precision: str, dialect: str
) -> None:
    model, judge, image = dialect_models(dialect, tiny, precision), reference(tiny), random_image(0)
    messages = prompt_messages(WORDS)
    inputs, asked = judge.inputs(messages, [image]), prompt(model, messages, [image])
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert_near(found.logits, wanted.logits, TOLERANCES[precision])
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        if precision == "fp32":
            assert wanted.margin > 2 * TOLERANCES["fp32"], "this prompt proves nothing: two tokens are too close"
            assert found.ids == wanted.ids


@pytest.mark.parametrize("dialect", OTHERS)
def test_a_second_question_goes_on_from_the_slots_that_were_kept(
    dialect_models: Get, reference: References, dialect: str
) -> None:
    model, judge, images = dialect_models(dialect), reference(Tiny()), [random_image(seed) for seed in (0, 1)]
    session = Session(model.backend, model.manifest)
    for words, k in ((WORDS, None), ("how many red shapes are there?", 3), ("red?", None), (WORDS, 5)):
        messages = prompt_messages(words, 2)
        done = session.prefill(prompt(model, messages, images), policy(k))
        wanted = judge.greedy(judge.inputs(messages, images), k, 4)
        found = [done.logits, *(session.decode(token) for token in wanted.ids[:3])]
        assert_near(np.stack(found), wanted.logits, TOLERANCES["fp32"])


@pytest.mark.parametrize("dialect", names.ON_GPU)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("tiny", STATEFUL, ids=lambda tiny: tiny.family)
def test_layers_that_keep_a_state_answer_as_transformers_and_go_back_to_the_image(
    dialect_models: Get, reference: References, tiny: Tiny, precision: str, dialect: str
) -> None:
    """Three questions in one conversation, at K that leave stages with and without attention; also long prompts."""
    model, judge, images = dialect_models(dialect, tiny, precision), reference(tiny), [random_image(0, STATEFUL[tiny])]
    session = Session(model.backend, model.manifest)
    for words, k in (("red?", None), (WORDS, None), ("red?", 3), (WORDS, 3), ("red?", 8), (WORDS * 4, 2)):
        messages = prompt_messages(words)
        wanted = judge.greedy(judge.inputs(messages, images), k, 4)
        done = session.prefill(prompt(model, messages, images), policy(k))
        found = np.stack([done.logits, *(session.decode(token) for token in wanted.ids[:3])])
        # of float32 a share of the largest logit, the limit of golden vectors: 1.07e-4 was seen where it is 7
        largest = float(wanted.logits.abs().max()) if precision == "fp32" else 1.0
        assert_near(found, wanted.logits, TOLERANCES[precision] * largest)
        if precision == "fp32":
            assert wanted.margin > 2 * TOLERANCES["fp32"], "this prompt proves nothing: two tokens are too close"
            assert found.argmax(-1).tolist() == wanted.ids


@pytest.mark.parametrize("dialect", TENSORRT)
def test_graphs_for_tensorrt_have_no_graph_within_them(dialect_models: Get, dialect: str) -> None:
    """CUDA does not record conditionals and loops."""
    bundle = dialect_models(dialect, QWEN35).bundle
    for name in bundle.manifest.dialects[dialect].stages:
        nodes = onnx.load(bundle.path(name), load_external_data=False).graph.node
        assert {node.op_type for node in nodes}.isdisjoint({"If", "Loop", "Scan", "CumSum"})


@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("cuts", [(13,), (1, 2, 3, 7), tuple(range(1, 24))], ids=len)
def test_rows_in_chunks_equal_rows_at_once(dialect_models: Get, dialect: str, cuts: tuple[int, ...]) -> None:
    model = dialect_models(dialect)
    rows = np.random.default_rng(0).standard_normal((24, model.manifest.model.hidden), np.float32)
    positions = np.sort(np.random.default_rng(1).choice(200, 24, replace=False))  # not the slots
    whole = model.backend.stage(1, model.manifest.max_context).append(TokenStates(rows), positions)
    cache = model.backend.stage(1, model.manifest.max_context)
    cache.append(TokenStates(rows[::-1].copy()), positions)
    cache.keep(0)
    parts = [
        cache.append(TokenStates(r), p) for r, p in zip(np.split(rows, cuts), np.split(positions, cuts), strict=True)
    ]
    assert_near(np.concatenate(parts), whole, 2e-5)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("precision", FEATURE_TOLERANCES)
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_a_tower_gives_what_transformers_does(
    dialect_models: Get, reference: References, tiny: Tiny, precision: str, dialect: str
) -> None:
    model, judge = dialect_models(dialect, tiny, precision), reference(tiny)
    for seed in range(3):
        pixels = model.loaded.images.prepare(random_image(seed)).pixels[None]
        wanted = judge.model.model.get_image_features(pixel_values=torch.from_numpy(pixels)).pooler_output
        found = model.backend.vision(pixels).hidden
        assert_near(found, torch.cat(list(wanted)).detach().numpy(), FEATURE_TOLERANCES[precision])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_gate_is_float32_in_every_dialect(
    tmp_path: Path, tiny_checkpoint: Checkpoints, precision: str, dialect: str, count: int
) -> None:
    rng, hidden = np.random.default_rng(count), Tiny().hidden
    first, second = (rng.standard_normal(shape, np.float32) for shape in ((24, 2 * hidden), (2, 24)))
    gates = tmp_path / "gates.safetensors"
    write_safetensors(gates, {"gate.1.fc1.weight": first / 8, "gate.1.fc2.weight": second / 5}, None)
    plan = plan_export(ExportOptions(str(tiny_checkpoint()), (3,), precision, gates=gates))
    bundle = run_export(plan, tmp_path / "bundle", force=False, report=lambda *_: None)
    rows = rng.standard_normal((count, hidden), np.float32)
    mean = rows[:-1].mean(0) if count > 1 else np.zeros(hidden, np.float32)
    inner = torch.nn.functional.gelu(torch.from_numpy(np.concatenate([mean, rows[-1]]) @ (first / 8).T))
    wanted = torch.softmax(inner @ torch.from_numpy(second / 5).T, -1).numpy()
    np.testing.assert_allclose(DialectBackend(bundle, dialect).gate(3, rows), wanted, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("dialect", names.ON_GPU)
def test_a_head_for_gpus_gives_the_first_of_the_largest_logits(
    tiny_checkpoint: Checkpoints, tmp_path: Path, dialect: str, precision: str
) -> None:
    bundle = export_with(
        ExportOptions(str(tiny_checkpoint()), (3,), precision, dialects=("ort", dialect)), tmp_path / "bundle"
    )
    m = bundle.manifest
    session = ort.InferenceSession(str(bundle.path(m.dialects[dialect].head)), providers=["CPUExecutionProvider"])
    states = np.random.default_rng(0).standard_normal((12, m.model.hidden), np.float32)
    states[1] = 0  # all logits are equal
    states[2, 5] = np.nan
    states[3, 0] = np.inf
    logits, best = session.run([names.LOGITS, names.BEST], {names.HIDDEN: states})
    assert best.tolist() == [-1 if row in (2, 3) else int(logits[row].argmax()) for row in range(12)]
    assert best[1] == 0


@pytest.mark.parametrize("dialect", ["plain", "trt", "trt10"])
def test_only_the_dialects_of_onnxruntime_use_its_operators(dialect_models: Get, dialect: str) -> None:
    bundle = dialect_models(dialect).bundle
    graphs = bundle.manifest.dialects[dialect]
    for name in (graphs.vision, graphs.embed, graphs.head, *graphs.stages):
        model = onnx.load(bundle.path(name), load_external_data=False)
        assert [entry.domain for entry in model.opset_import] == [""]
        assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("asked", PRECISIONS.values(), ids=list(PRECISIONS))
def test_a_dialect_computes_what_the_stored_weights_say(
    tiny_checkpoint: Checkpoints, tmp_path: Path, asked: dict[str, str], dialect: str
) -> None:
    """As closely as fp16 does, whatever the weights are: only the dialect of onnxruntime rounds rows to 8 bits."""
    bundle = export_with(ExportOptions(str(tiny_checkpoint()), (3,), **asked), tmp_path / "bundle")
    checks = list(check_golden(Model(bundle, DialectBackend(bundle, dialect), 0)))
    assert len(checks) == 5
    assert all(check.difference <= precision.PRECISIONS["fp16"].tolerance for check in checks), checks


@pytest.mark.parametrize(("precision", "wanted"), [("fp16", "FLOAT16"), ("bf16", "BFLOAT16"), ("fp32", "FLOAT")])
def test_products_for_tensorrt_have_the_type_of_the_bundle(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, wanted: str
) -> None:
    bundle = export(tiny_checkpoint(), tmp_path / "bundle", (3,), precision, dialects=("ort", *TENSORRT))
    typed = [bundle.manifest.dialects[name] for name in TENSORRT]
    for name in (name for graphs in typed for name in (graphs.vision, graphs.head, *graphs.stages)):
        model = onnx.shape_inference.infer_shapes(onnx.load(bundle.path(name), load_external_data=False))
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        found = {
            types[value]
            for node in model.graph.node
            if node.op_type in ("Gemm", "Conv")
            for value in (node.input[0], node.output[0])
            if value in types
        }
        assert found == {onnx.TensorProto.DataType.Value(wanted)}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4"])
def test_weights_are_not_widened_on_cuda(tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str) -> None:
    """And those of 4 bits with the same inputs, q, k and v, and gate and up, are one product."""
    options = ExportOptions(str(tiny_checkpoint()), (3,), precision, dialects=("ort", "ort-cuda"))
    bundle = export_with(options, tmp_path / "bundle")
    for name in bundle.manifest.dialects["ort-cuda"].stages:
        graph = onnx.load(bundle.path(name), load_external_data=False).graph
        stored = {tensor.name for tensor in graph.initializer}
        assert not [node.input[0] for node in graph.node if node.op_type == "Cast" and node.input[0] in stored]
        products = [node for node in graph.node if node.op_type == ("MatMulNBits" if precision == "int4" else "Gemm")]
        layers = len([node for node in graph.node if node.op_type == "GroupQueryAttention"])
        assert len(products) == layers * (4 if precision == "int4" else 7)
        if precision == "int4":
            assert sorted(len(node.input[2].split("+")) for node in products) == sorted([3, 1, 2, 1] * layers)


def test_a_bundle_holds_the_dialects_that_were_asked_for(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp16", dialects=("ort", "trt"))
    folder = run_export(plan_export(options), tmp_path / "bundle", force=False, report=lambda *_: None).folder
    assert not list(folder.glob("*.plain.onnx"))
    assert [len(list(folder.glob(f"*.{name}.onnx"))) for name in options.dialects] == [6, 6]
    assert len(list((folder / "weights").iterdir())) == 1, "weights are shared"
    assert sum(path.stat().st_size for path in folder.glob("*.onnx")) < 1 << 18


@pytest.mark.parametrize("dialects", [("plain",), (), ("ort", "tensorrt")])
def test_dialects_without_ort_or_unknown_are_refused(dialects: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=r"name ort, .* plain, trt"):
        ExportOptions(dialects=dialects)
