"""Bundles answer under every reduction as the plain statement does: ids, logits, kept rows, slots of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from tests.exporter.graphs.test_merge import cosines
from tests.support.bundles import IGNORE
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS, Checkpoints
from tests.support.reduced import Found, Talk, dividing
from tests.support.reference import Inputs, Reference
from tests.support.statement import Method, Outcome, Statement
from tests.support.tiny import Message, Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.policies.methods.gate import Gate

STEPS = 8
TOLERANCE = 1e-4
KS = (4, 9, 12)
LAYERS = (3, 7, 11, 15)
WORDS = ("mustdrop", "mustdrop:192", "fastv:k=2,ratio=0.5", "lsm", "cls", "fastv:k=8")
MODELS = {
    "16-layers-gqa": Tiny(layers=16, image=126, context=768),
    "32-layers-mha": Tiny(layers=32, kv_heads=4, image=126, context=768),
}
QUESTIONS = ("What is the colour of the square in the picture?", "how many red shapes are there?", "left?")
SHARES = {"few": 0.1, "half": 0.5, "nearly-all": 0.93}


class Case(NamedTuple):
    """One checkpoint: its bundle, and its statement over transformers' modules."""

    model: Model
    reference: Reference
    statement: Statement


Cases = Callable[[Tiny], Case]


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints, reference: Callable[..., Reference]
) -> Cases:
    from vtx.exporter.bundling.export import plan_export, run_export
    from vtx.exporter.bundling.options import ExportOptions

    folder = tmp_path_factory.mktemp("reduce")

    @cache
    def case(tiny: Tiny) -> Case:
        words = WORDS if tiny.vision == "clip" else ("mustdrop:192,key=0", "lsm")
        options = ExportOptions(str(tiny_checkpoint(tiny)), KS, "fp32", reductions=words)
        bundle = run_export(plan_export(options), folder / str(hash(tiny)), force=False, report=IGNORE)
        judge = reference(tiny)
        return Case(load(bundle.folder, threads=THREADS), judge, Statement(judge))

    return case


# The deeper one, whose heads are not shared, repeats what the first shows: make test-all asks it too.
PARAMETERS = [
    pytest.param(MODELS["16-layers-gqa"], id="16-layers-gqa"),
    pytest.param(MODELS["32-layers-mha"], id="32-layers-mha", marks=pytest.mark.slow),
]


@pytest.fixture(params=PARAMETERS)
def case(request: pytest.FixtureRequest, cases: Cases) -> Case:
    return cases(request.param)


def inputs(case: Case, messages: list[Message], seeds: tuple[int, ...] = (4,)) -> Inputs:
    return case.reference.inputs(messages, [random_image(seed) for seed in seeds])


def some_merged(case: Case, seed: int = 4) -> float:
    """A threshold that about half of the windows reach."""
    pixels = inputs(case, prompt_messages("red?"), (seed,))["pixel_values"][0]
    order = sorted(cosines(case.reference, pixels))
    low, high = max(pairwise(order[2:-1]), key=lambda pair: pair[1] - pair[0])
    assert high - low > 1e-3
    return (low + high) / 2


def equal(found: Found, wanted: Outcome) -> None:
    assert wanted.margin > 2 * TOLERANCE, "two tokens are too close to prove anything"
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    assert list(found.done.slots) == wanted.slots
    assert [image.indices.tolist() for image in found.done.images] == [image.places for image in wanted.images]
    assert [image.merged.tolist() for image in found.done.images] == [image.merged for image in wanted.images]
    entered = sum(len(image.places) for image in wanted.images)
    last = list(range(entered))
    for layer, kept in sorted({**wanted.kept}.items()):
        assert found.kept.get(layer, last) == kept
        last = kept
    assert set(found.kept) <= {*wanted.kept, *(k - 1 for k in KS)}


def ask(
    case: Case, method: Method, seeds: tuple[int, ...] = (4,), *, share: float | None = None
) -> tuple[Found, Outcome]:
    """A fresh session's answer and the statement's, to the first question where no two tokens are too close.

    `share`: with thresholds that drop about so many of the rows at the first prune.
    """
    for words in QUESTIONS:
        messages, images = prompt_messages(words, len(seeds)), [random_image(seed) for seed in seeds]
        given = inputs(case, messages, seeds)
        tried = method if share is None else dividing(case.statement, given, method, share)
        wanted = case.statement.answer(given, tried, STEPS, words)
        if wanted.margin > 2 * TOLERANCE:
            return Talk(case.model).ask(messages, images, tried, STEPS), wanted
    raise AssertionError("two tokens are too close in every answer")


# ---- each method -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("order", ["raster", "merged-first"])
@pytest.mark.parametrize("positions", ["keep", "renumber"])
@pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))
def test_mustdrop(case: Case, share: float, positions: str, order: str) -> None:
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS, positions=positions, order=order)  # type: ignore[arg-type]
    found, wanted = ask(case, method, share=share)
    equal(found, wanted)
    merged = sum(wanted.images[0].merged)
    assert 0 < merged < 9
    left, entered = len(wanted.kept[LAYERS[0]]), 81 - 8 * merged
    assert left == pytest.approx((1 - share) * entered, abs=0.1 * entered), "the thresholds divide otherwise"
    assert wanted.slots[0] > wanted.slots[LAYERS[0] - 1] == wanted.slots[-1]


def released(case: Case) -> Method:
    """What the code that came with the paper does, but for its thresholds."""
    pixels = inputs(case, prompt_messages("red?"))["pixel_values"][0]
    order = sorted(cosines(case.reference, pixels))
    assert min(b - a for a, b in pairwise(order)) > 1e-4, "windows are too much alike for an order of theirs"
    tau = (order[2] + order[3]) / 2  # six of nine windows merge
    return Method(tau=tau, key=0.08, layers=LAYERS, positions="renumber", order="merged-first", keys="last-block")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))
@pytest.mark.parametrize("seeds", [(4,), (4, 7)], ids=["one-image", "two-images"])
def test_mustdrop_as_released(case: Case, seeds: tuple[int, ...], share: float) -> None:
    found, wanted = ask(case, released(case), seeds, share=share)
    equal(found, wanted)
    image = wanted.images[0]
    windows = [place for place, merged in zip(image.places, image.merged, strict=True) if merged]
    assert image.places[: len(windows)] == windows != sorted(windows), "raster order would pass, too"
    usual = ask(case, replace(released(case), keys="used-block"), seeds, share=share)[1]
    assert usual.images[0].attention != wanted.images[0].attention


def test_dual_attention_without_merging_and_keys(case: Case) -> None:
    equal(*ask(case, Method(layers=LAYERS), share=0.5))


def test_key_rows_outlive_thresholds_that_spare_nothing(case: Case) -> None:
    found, wanted = ask(case, Method(key=0.08, layers=LAYERS, gamma=1.0, alpha=1.0))
    equal(found, wanted)
    attention = np.array(wanted.images[0].attention)
    assert found.kept[15 if 15 in found.kept else 3] == sorted(np.argsort(-attention)[:7].tolist())


def test_all_rows_may_go(case: Case) -> None:
    found, wanted = ask(case, Method(layers=LAYERS, gamma=1.0, alpha=1.0))
    equal(found, wanted)
    assert wanted.kept[3] == []


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
def test_fastv(case: Case, ratio: float) -> None:
    found, wanted = ask(case, Method(fastv=(2, ratio)))
    equal(found, wanted)
    assert len(wanted.kept[2]) == 81 - int(81 * ratio)


@pytest.mark.parametrize("order", ["raster", "merged-first"])
def test_merging_alone(case: Case, order: str) -> None:
    equal(*ask(case, Method(tau=some_merged(case), order=order)))  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0.1, 0.25, 0.9])
def test_cls(case: Case, keep: float) -> None:
    found, wanted = ask(case, Method(cls_keep=keep))
    equal(found, wanted)
    assert found.done.vision_tokens == int(np.ceil(81 * keep))


def test_text_alone_is_as_without_reduction(case: Case) -> None:
    method = Method(tau=0.5, key=0.08, layers=LAYERS, gamma=1.0, alpha=1.0)
    found, wanted = ask(case, method, seeds=())
    equal(found, wanted)
    assert np.array_equal(found.logits, ask(case, Method(), seeds=())[0].logits)


def test_two_images(case: Case) -> None:
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS)
    found, wanted = ask(case, method, (4, 7), share=0.5)
    equal(found, wanted)
    assert len({len(image.places) for image in wanted.images}) == 2, "both images merge alike and prove little"


# ---- composition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("positions", ["keep", "renumber"])
def test_mustdrop_with_withdrawal(case: Case, k: int, positions: str) -> None:
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS, positions=positions)  # type: ignore[arg-type]
    found, wanted = ask(case, replace(method, k=k), share=0.4)
    equal(found, wanted)
    assert found.done.k == k


@pytest.mark.parametrize("k", KS)
def test_fastv_with_withdrawal(case: Case, k: int) -> None:
    found, wanted = ask(case, Method(fastv=(2, 0.5), k=k))
    equal(found, wanted)
    assert wanted.slots[k - 1] < wanted.slots[2] < wanted.slots[1]


def test_merging_then_cls_then_fastv(case: Case) -> None:
    equal(*ask(case, Method(tau=some_merged(case), cls_keep=0.5, fastv=(2, 0.5))))


def test_cls_then_mustdrop(case: Case) -> None:
    equal(*ask(case, Method(cls_keep=0.5, key=0.1, layers=LAYERS), share=0.3))


def test_fastv_between_the_prunes_of_mustdrop(case: Case) -> None:
    found, wanted = ask(case, Method(key=0.08, layers=LAYERS, fastv=(8, 0.5)), share=0.3)
    equal(found, wanted)
    assert set(wanted.kept) == {3, 7, 8, 11, 15}


@pytest.mark.parametrize("fires", [4, 12, None])
def test_a_gate_that_fires_equals_withdrawal_there(case: Case, fires: int | None) -> None:
    def odds(layer: int, _: np.ndarray) -> np.ndarray:
        return np.array([0.1, 0.9] if layer == fires else [0.9, 0.1])

    method = Method(key=0.08, layers=LAYERS, fastv=(2, 0.5))
    for words in QUESTIONS:
        messages = prompt_messages(words)
        given = inputs(case, messages)
        divided = replace(dividing(case.statement, given, method, 0.3), k=fires)
        found = Talk(case.model).ask(messages, [random_image(4)], divided, STEPS, exits=Gate(odds, KS))
        wanted = case.statement.answer(given, divided, STEPS)
        if wanted.margin > 2 * TOLERANCE:
            equal(found, wanted)
            assert found.done.k == fires
            return
    raise AssertionError("two tokens are too close in every answer")


# ---- one session, many questions -------------------------------------------------------------------------------------


def test_questions_on_the_same_image_equal_fresh_runs(case: Case) -> None:
    """Reuse, changes of K, of thresholds and of method, back and forth, leave no trace in later answers."""
    talk, image = Talk(case.model), random_image(4)
    merging = Method(tau=some_merged(case), key=0.08, layers=LAYERS)
    half = dividing(case.statement, inputs(case, prompt_messages(QUESTIONS[0])), merging, 0.5)
    plain = Method()
    asked = [
        half, half, half, replace(half, k=9), half, replace(half, k=4), Method(fastv=(2, 0.5)), plain,
        replace(half, positions="renumber"), replace(plain, k=9), Method(fastv=(2, 0.5), k=9), half,
    ]  # fmt: skip
    for number, method in enumerate(asked):
        messages = prompt_messages(QUESTIONS[number % len(QUESTIONS)])
        found = talk.ask(messages, [image], method, STEPS)
        equal(found, case.statement.answer(inputs(case, messages), method, STEPS))


def test_another_image_in_the_same_session_leaves_no_trace(case: Case) -> None:
    talk = Talk(case.model)
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS)
    method = dividing(case.statement, inputs(case, prompt_messages(QUESTIONS[0])), method, 0.5)
    for seed in (4, 7, 4):
        messages = prompt_messages(QUESTIONS[0])
        found = talk.ask(messages, [random_image(seed)], method, STEPS)
        equal(found, case.statement.answer(inputs(case, messages, (seed,)), method, STEPS))


@pytest.mark.parametrize(
    "method",
    [Method(layers=LAYERS), Method(tau=2.0 / 2), Method(fastv=(2, 0.0)), Method(cls_keep=1.0)],
    ids=["mustdrop", "lsm", "fastv", "cls"],
)
def test_with_everything_kept_the_answer_is_that_without_a_reduction(case: Case, method: Method) -> None:
    found, plain = ask(case, method)[0], ask(case, Method())[0]
    assert found.ids == plain.ids
    np.testing.assert_allclose(found.logits, plain.logits, atol=TOLERANCE / 10, rtol=0)
    assert found.done.slots == plain.done.slots


def test_dual_attention_and_merging_work_for_siglip(cases: Cases) -> None:
    case = cases(Tiny(layers=16, image=126, context=768, vision="siglip", select="full"))
    method = Method(tau=some_merged(case), layers=LAYERS)
    equal(*ask(case, method, share=0.5))


# ---- the other dialects ----------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name in DIALECTS if name != "ort"])
def other(request: pytest.FixtureRequest, cases: Cases) -> Case:
    """The bundle of 16 layers, its graphs of another dialect run by onnxruntime."""
    case = cases(MODELS["16-layers-gqa"])
    return case._replace(model=Model(case.model.bundle, DialectBackend(case.model.bundle, request.param), 0))


def test_prunes_in_every_dialect(other: Case) -> None:
    equal(*ask(other, Method(layers=LAYERS), share=0.5))
    equal(*ask(other, Method(fastv=(2, 0.5), k=9)))


def test_merging_and_key_rows_in_every_dialect(other: Case) -> None:
    tau = some_merged(other)
    equal(*ask(other, Method(tau=tau, key=0.08, layers=LAYERS), share=0.5))
    equal(*ask(other, Method(tau=tau, cls_keep=0.5, fastv=(2, 0.5), k=9)))
    equal(*ask(other, Method(tau=tau, order="merged-first"), (4, 7)))


def test_mustdrop_as_released_in_every_dialect(other: Case) -> None:
    equal(*ask(other, released(other), share=0.5))
    equal(*ask(other, replace(released(other), k=9), (4, 7), share=0.5))


def leaves_at_9(layer: int, _: np.ndarray) -> np.ndarray:
    return np.array([0.1, 0.9] if layer == 9 else [0.9, 0.1])


WAYS = {
    "none": (Method(), None, None),
    "withdrawal": (Method(k=9), None, None),
    "gate": (Method(k=9), None, Gate(leaves_at_9, KS)),
    "mustdrop": (Method(layers=LAYERS), 0.5, None),
}
"""The statement's method, the share its thresholds drop, and the gate that takes the K's place."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_dialect_with_either_kind_of_heads(case: Case, dialect: str, way: str) -> None:
    """`pytest -s -k either_kind` prints the table of docs/how-to/tensorrt.md: the largest difference of the logits."""
    if dialect != "ort":
        case = case._replace(model=Model(case.model.bundle, DialectBackend(case.model.bundle, dialect), 0))
    method, share, gate = WAYS[way]
    found, wanted = ask(case, method, share=share)
    if gate is not None:
        messages = prompt_messages(QUESTIONS[0])
        wanted = case.statement.answer(inputs(case, messages), method, STEPS)
        found = Talk(case.model).ask(messages, [random_image(4)], Method(), STEPS, exits=gate)
    equal(found, wanted)
    layers = case.model.manifest.model.layers
    print(f"\n{dialect} {way} {layers} layers: {np.abs(found.logits - wanted.logits.numpy()).max():.1e}")
