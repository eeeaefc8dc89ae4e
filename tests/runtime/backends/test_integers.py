"""`--compute int8` on OpenVINO multiplies integers as is done by hand, and answers as transformers does that way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support import bundles
from tests.support.exported import QUESTIONS, THREADS, answer, greedy, policy, prompt
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose
from vtx.runtime.backends.openvino import integers
from vtx.runtime.backends.openvino.cache import FEW
from vtx.runtime.backends.openvino.integers import in_int8, multiply_integers
from vtx.runtime.errors import DeviceError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates

openvino = pytest.importorskip("openvino", reason='openvino is not installed; pip install "vtx-edge[openvino]"')

DEPTH, WIDTH, ROWS = 96, 40, 7
STEPS = 6
KS = (2,)
FASTV = "fastv:k=2,ratio=0.5"
EXACT = 1e-4
TOLERANCE = 2e-3  # of logits that reach 4
Get = Callable[[str], Model]
Floats = NDArray[np.floating[Any]]


def by_hand(hidden: Any, weights: Any, scales: Any) -> Any:
    """Hidden states [.., in] in steps of 1/127 of each token's largest, by integers [out, in] with a scale a row."""
    largest = abs(hidden).max(-1, keepdims=True) if isinstance(hidden, np.ndarray) else hidden.abs().amax(-1, True)
    return ((hidden / largest * 127).round() @ weights.T) * (largest / 127) * scales


class ByHand(torch.nn.Module):
    """A linear layer of a transformers model, its weights rounded as int8 bundles round them, multiplied by hand."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight  # whose type transformers asks for
        self.scales = (linear.weight.abs().amax(1) / 127).half().float()
        self.weights, self.bias = (linear.weight / self.scales[:, None]).round().clamp(-127, 127), linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = by_hand(hidden, self.weights, self.scales)
        return product if self.bias is None else product + self.bias


def multiply_by_hand(module: torch.nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and child.in_features % 16 == 0:
            setattr(module, name, ByHand(child))
        else:
            multiply_by_hand(child)


@pytest.fixture(scope="module", params=["gqa", "mha-siglip"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    grouped = Tiny(layers=3, hidden=128, ffn=192)
    return grouped if request.param == "gqa" else replace(grouped, kv_heads=4, vision="siglip", select="full")


@pytest.fixture(scope="module")
def get(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints, tiny: Tiny,
    needs_arithmetic: Callable[[str], None],
) -> Get:  # fmt: skip
    """Models in `--compute int8` by their weights, the tower in float32 whatever the processor has."""
    needs_arithmetic("int8")

    def make(precision: str) -> Model:
        folder = tmp_path_factory.mktemp("integers") / precision
        options = ExportOptions(
            str(tiny_checkpoint(tiny)), KS, precision, kv_precision="fp32", reductions=(FASTV.partition(",")[0],)
        )
        made = bundles.export_with(options, folder)
        model = load(made.folder, device="openvino", compute="int8", threads=THREADS)
        model.backend.tower_settings = {}  # type: ignore[attr-defined]
        return model

    return cache(make)


def test_answers_are_those_of_transformers_with_products_by_hand(
    get: Get, tiny: Tiny, tiny_checkpoint: Checkpoints
) -> None:
    """A value on the edge of a step may fall to either side, and what follows then differs by such a step."""
    model, exact, reference = get("int8"), Reference(tiny_checkpoint(tiny)), Reference(tiny_checkpoint(tiny))
    multiply_by_hand(reference.model)
    for name, parameter in reference.model.named_parameters():
        if "weight" not in name or parameter.ndim != 2 or "embed" in name:
            parameter.data = parameter.data.half().float()  # as the bundle stores what is no matrix
    image = random_image(0)
    beside, apart = [], []
    for question, k in itertools.product(QUESTIONS, (None, *KS)):
        messages = prompt_messages(question)
        inputs = reference.inputs(messages, [image])
        want = reference.greedy(inputs, k, STEPS)
        got = greedy(model, prompt(model, messages, [image]), k, STEPS, want.ids)
        beside.append(float(np.abs(got.logits[0] - want.prompt.numpy()).max()))
        apart.append(float((exact.logits(inputs, k) - want.prompt).abs().max()))
    assert np.mean(beside) < 0.4 * np.mean(apart), (beside, apart)
    inputs = reference.inputs(prompt_messages(QUESTIONS[0]), [image])
    rows, floats = (_image_rows(one, inputs) for one in (reference, exact))
    ours = model.loaded.images.prepare(image).encode(model.backend).hidden
    assert np.median(np.abs(ours - rows).max(1)) < EXACT
    assert np.median(np.abs(floats - rows).max(1)) > 100 * EXACT  # so floats would show


def _image_rows(reference: Reference, inputs: Any) -> NDArray[np.float32]:
    """What a tower and its projector make of the image, [tokens, hidden]."""
    with torch.inference_mode():
        rows, vision = reference.prompt(inputs)
        found: NDArray[np.float32] = rows[0][vision].numpy()
    return found


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_second_and_third_question_are_answered_as_if_asked_first(get: Get, precision: str) -> None:
    model, image = get(precision), random_image(1)
    asked = [prompt(model, prompt_messages(question), [image]) for question in QUESTIONS]
    session = Session(model.backend, model.manifest)
    for one, k in zip((*asked, asked[0]), (None, 2, 2, None), strict=True):
        got = answer(session, one, policy(k), STEPS)
        assert_near(got, greedy(model, one, k, STEPS).logits, TOLERANCE)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_golden_vectors_hold(get: Get, precision: str) -> None:
    checks = list(check_golden(get(precision)))
    assert len(checks) == 5
    assert all(check.passed for check in checks), checks


def test_few_tokens_run_over_int4_and_many_over_int8(get: Get) -> None:
    backend: Any = get("int4").backend
    assert backend.stages[0].for_many is not None
    assert get("int8").backend.stages[0].for_many is None  # type: ignore[attr-defined]
    rows = np.random.default_rng(0).standard_normal((FEW + 1, 128)).astype(np.float32)
    cache = backend.stage(0, 64)
    few = cache.append(TokenStates(rows[:FEW]), np.arange(FEW)).copy()
    cache.length = 0
    many = cache.append(TokenStates(rows), np.arange(FEW + 1))[:FEW].copy()
    assert 0 < np.abs(few - many).max() < 0.1 * np.abs(few).max()
    one = backend.stage(0, 64)
    apart = np.concatenate(
        [one.append(TokenStates(row[None]), np.array([n])).copy() for n, row in enumerate(rows[:FEW])]
    )
    assert_near(apart, few, 1e-4)  # K and V are one cache, whoever fills it


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_reduction_that_asks_for_attention_is_repeated_exactly(get: Get, precision: str) -> None:
    model, image = get(precision), random_image(2)
    with model.open(image) as conversation:
        first = [conversation.ask(question, reduce=FASTV, max_new_tokens=STEPS) for question in QUESTIONS]
    for question, answered in zip(QUESTIONS, first, strict=True):
        with model.open(image) as fresh:
            again = fresh.ask(question, reduce=FASTV, max_new_tokens=STEPS)
        assert answered.token_ids == again.token_ids
        assert answered.stats.kv_slots == again.stats.kv_slots


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_scores_are_of_the_run_that_was_the_last(get: Get, count: int) -> None:
    """Both forms of the weights leave a query behind; that of the other one is of other tokens."""
    backend: Any = get("int4").backend
    number = next(n for n, spec in enumerate(get("int4").manifest.stages) if spec.query)
    rows = np.random.default_rng(3).standard_normal((40, 128)).astype(np.float32)
    whole, apart = backend.stage(number, 64), backend.stage(number, 64)
    whole.append(TokenStates(rows), np.arange(40), query=True)
    apart.append(TokenStates(rows[: 40 - count]), np.arange(40 - count), query=True)
    apart.append(TokenStates(rows[40 - count :]), np.arange(40 - count, 40), query=True)
    wanted, found = (cache.attention(last_only=True)[0] for cache in (whole, apart))
    assert found.shape == (40,)
    assert np.abs(found - wanted).max() < 0.1 * wanted.max()
    assert np.corrcoef(found, wanted)[0, 1] > 0.98


def compiled(weights: NDArray[np.int8], scales: Floats, change: Sequence[Callable[[Any], Any]]) -> Any:
    """Two products of the same hidden states, as `plain` graphs state them, changed and compiled."""
    from openvino import opset13 as ops

    hidden = ops.parameter([-1, weights.shape[1]], np.float32, name="hidden")
    outputs = []
    for sign in (1, -1):
        matrix = ops.multiply(ops.convert(ops.constant(sign * weights), "f32"), ops.constant(sign * scales[:, None]))
        outputs.append(ops.matmul(hidden, matrix, transpose_a=False, transpose_b=True))
        outputs[-1].output(0).get_tensor().set_names({f"y{sign}"})
    model = openvino.Model([ops.result(output) for output in outputs], [hidden])
    for one in change:
        one(model)
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def test_products_are_those_by_hand_and_of_integers(needs_arithmetic: Callable[[str], None]) -> None:
    needs_arithmetic("int8")
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (WIDTH, DEPTH)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, WIDTH).astype(np.float32)
    hidden = rng.standard_normal((ROWS, DEPTH)).astype(np.float32) * np.logspace(-3, 3, ROWS, dtype=np.float32)[:, None]
    hidden[2, 5] *= 1000  # as models have them
    request = compiled(weights, scales, [multiply_integers]).create_infer_request()
    request.infer({"hidden": hidden})
    want = by_hand(hidden.astype(np.float64), weights.astype(np.float64), scales)
    for name in ("y1", "y-1"):
        got = request.get_tensor(name).data
        np.testing.assert_allclose(got / np.abs(want).max(1, keepdims=True), want / np.abs(want).max(1, keepdims=True),
                                   atol=2e-6)  # fmt: skip
    request.infer({"hidden": np.zeros((1, DEPTH), np.float32)})
    assert not request.get_tensor("y1").data.any()


def test_the_engine_holds_the_integers_and_rounds_hidden_states_once() -> None:
    weights = np.random.default_rng(0).integers(-127, 128, (WIDTH, DEPTH)).astype(np.int8)
    scales = np.full(WIDTH, 0.01, np.float32)
    nodes = compiled(weights, scales, [multiply_integers]).get_runtime_model().get_ops()
    kinds = [(n.get_rt_info()["layerType"].astype(str), n) for n in nodes]
    products = [n for kind, n in kinds if kind == "FullyConnected"]
    entering = {n.input_value(side).get_node().get_rt_info()["outputPrecisions"].astype(str)
                for n, side in itertools.product(products, (0, 1))}  # fmt: skip
    assert len(products) == 2
    assert entering <= {"i8", "u8"}, entering
    assert len({n.input_value(0).get_node().get_friendly_name() for n in products}) == 1


@pytest.mark.parametrize("blocks", [1, 3])
def test_int4_becomes_the_nearest_int8(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    integers = rng.integers(-8, 8, (WIDTH, DEPTH)).astype(np.int8)
    integers[3] = 0
    scales = rng.uniform(0.001, 0.1, (WIDTH, blocks)).astype(np.float16)
    pairs = integers.reshape(WIDTH, -1, 2)
    octets = ((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).astype(np.uint8)
    got, wide = in_int8(octets, scales)
    exact = (integers.reshape(WIDTH, blocks, -1) * scales.astype(np.float64)[:, :, None]).reshape(WIDTH, -1)
    assert np.abs(got.astype(int)).max() == 127
    assert (np.abs(got * wide[:, None].astype(np.float64) - exact) <= wide[:, None] * 0.5001).all()
    assert not got[3].any()


def test_the_tower_computes_in_bfloat16_where_the_processor_has_it(get: Get) -> None:
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    fresh = load(get("int8").bundle.folder, device="openvino", compute="int8", threads=THREADS)
    backend: Any = fresh.backend
    assert backend.tower_settings == ({"INFERENCE_PRECISION_HINT": "bf16"} if "BF16" in able else {})
    assert all(check.passed for check in check_golden(fresh))
    assert (fresh.backend.compute, fresh.backend.device) == ("int8", "openvino")


def test_no_file_is_left_and_a_folder_without_room_is_named(
    get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = get("int4").bundle.folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with load(folder, device="openvino", compute="int8", threads=THREADS):
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(integers.np, "memmap", partial(_full, tmp_path))
    with pytest.raises(DeviceError, match=r"cannot take the weights in int8 .*No space left.*leave out --compute int8"):
        load(folder, device="openvino", compute="int8", threads=THREADS)
    assert not list(tmp_path.iterdir())


def _full(folder: Path, *_: Any) -> Any:
    raise OSError(28, "No space left on device", str(folder))


def test_floats_another_engine_and_a_lesser_processor_are_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp16 = bundles.export(tiny_checkpoint(), tmp_path / "fp16", KS, "fp16", dialects=("ort", "plain"))
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"avx512_vnni"}))
    with pytest.raises(DeviceError, match="multiplies weights of int8 and int4; this bundle's are fp16"):
        choose(fp16, "openvino", "int8")
    int8 = bundles.export(tiny_checkpoint(), tmp_path / "int8", KS, "int8", dialects=("ort", "plain"))
    with pytest.raises(DeviceError, match="cpu computes in f32, not int8; that has: openvino"):
        choose(int8, "cpu", "int8")
    assert choose(int8, "auto", "int8").device == "openvino"
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset({"avx2"}))
    lacking = r"int8 arithmetic needs one of .* avx512_vnni,.* this processor reports none; use --compute f32"
    for device in ("openvino", "auto"):
        with pytest.raises(DeviceError, match=lacking):
            choose(int8, device, "int8")
    with pytest.raises(DeviceError, match=r"bf16 arithmetic needs one of .* avx512_bf16, .* use --compute f32"):
        choose(fp16, "openvino", "bf16")
