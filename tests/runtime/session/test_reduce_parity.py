"""Bundles answer under every reduction as the plain statement does: ids, logits, kept rows, slots of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.reduced import (
    KS,
    MODELS,
    PARAMETERS,
    QUESTIONS,
    STEPS,
    TOLERANCE,
    Case,
    Talk,
    ask_both,
    assert_equal,
    dividing,
    inputs,
    some_merged,
    window_cosines,
)
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.policies.methods.gate import Gate

LAYERS = (3, 7, 11, 15)
WORDS = ("mustdrop", "mustdrop:192", "fastv:k=2,ratio=0.5", "lsm", "cls", "fastv:k=8")
SHARES = {"few": 0.1, "half": 0.5, "nearly-all": 0.93}


Cases = Callable[[Tiny], Case]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints, reference: References) -> Cases:
    from vtx.exporter.bundling.options import ExportOptions

    folder = tmp_path_factory.mktemp("reduce")

    @cache
    def case(tiny: Tiny) -> Case:
        words = WORDS if tiny.vision == "clip" else ("mustdrop:192,key=0", "lsm")
        options = ExportOptions(str(tiny_checkpoint(tiny)), KS, "fp32", reductions=words)
        bundle = export_with(options, folder / str(hash(tiny)))
        judge = reference(tiny)
        return Case(load(bundle.folder, threads=THREADS), judge, Statement(judge))

    return case


@pytest.fixture(params=PARAMETERS)
def case(request: pytest.FixtureRequest, cases: Cases) -> Case:
    return cases(request.param)


# ---- each method -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["raster", "merged-first"])
@pytest.mark.parametrize("positions", ["keep", "renumber"])
@pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))
def test_mustdrop(case: Case, share: float, positions: str, order: str) -> None:
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS, positions=positions, order=order)  # type: ignore[arg-type]
    found, wanted = ask_both(case, method, share=share)
    assert_equal(found, wanted)
    merged = sum(wanted.images[0].merged)
    assert 0 < merged < 9
    left, entered = len(wanted.kept[LAYERS[0]]), 81 - 8 * merged
    assert left == pytest.approx((1 - share) * entered, abs=0.1 * entered), "the thresholds divide otherwise"
    assert wanted.slots[0] > wanted.slots[LAYERS[0] - 1] == wanted.slots[-1]


def released(case: Case) -> Method:
    """What the code that came with the paper does, but for its thresholds."""
    pixels = inputs(case, prompt_messages("red?"))["pixel_values"][0]
    order = sorted(window_cosines(case.reference, pixels))
    assert min(b - a for a, b in pairwise(order)) > 1e-4, "windows are too much alike for an order of theirs"
    tau = (order[2] + order[3]) / 2  # six of nine windows merge
    return Method(tau=tau, key=0.08, layers=LAYERS, positions="renumber", order="merged-first", keys="last-block")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))
@pytest.mark.parametrize("seeds", [(4,), (4, 7)], ids=["one-image", "two-images"])
def test_mustdrop_as_released(case: Case, seeds: tuple[int, ...], share: float) -> None:
    found, wanted = ask_both(case, released(case), seeds, share=share)
    assert_equal(found, wanted)
    image = wanted.images[0]
    windows = [place for place, merged in zip(image.places, image.merged, strict=True) if merged]
    assert image.places[: len(windows)] == windows != sorted(windows), "raster order would pass, too"
    usual = ask_both(case, replace(released(case), keys="used-block"), seeds, share=share)[1]
    assert usual.images[0].attention != wanted.images[0].attention


def test_key_rows_outlive_thresholds_that_spare_nothing(case: Case) -> None:
    found, wanted = ask_both(case, Method(key=0.08, layers=LAYERS, gamma=1.0, alpha=1.0))
    assert_equal(found, wanted)
    attention = np.array(wanted.images[0].attention)
    assert found.kept[15 if 15 in found.kept else 3] == sorted(np.argsort(-attention)[:7].tolist())


def test_all_rows_may_go(case: Case) -> None:
    found, wanted = ask_both(case, Method(layers=LAYERS, gamma=1.0, alpha=1.0))
    assert_equal(found, wanted)
    assert wanted.kept[3] == []


def test_text_alone_is_as_without_reduction(case: Case) -> None:
    method = Method(tau=0.5, key=0.08, layers=LAYERS, gamma=1.0, alpha=1.0)
    found, wanted = ask_both(case, method, seeds=())
    assert_equal(found, wanted)
    assert np.array_equal(found.logits, ask_both(case, Method(), seeds=())[0].logits)


# ---- composition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("positions", ["keep", "renumber"])
def test_mustdrop_with_withdrawal(case: Case, k: int, positions: str) -> None:
    method = Method(tau=some_merged(case), key=0.08, layers=LAYERS, positions=positions)  # type: ignore[arg-type]
    found, wanted = ask_both(case, replace(method, k=k), share=0.4)
    assert_equal(found, wanted)
    assert found.done.k == k


def test_methods_in_one_prompt(case: Case) -> None:
    assert_equal(*ask_both(case, Method(tau=some_merged(case), cls_keep=0.5, fastv=(2, 0.5))))
    assert_equal(*ask_both(case, Method(cls_keep=0.5, key=0.1, layers=LAYERS), share=0.3))


def test_fastv_between_the_prunes_of_mustdrop(case: Case) -> None:
    found, wanted = ask_both(case, Method(key=0.08, layers=LAYERS, fastv=(8, 0.5)), share=0.3)
    assert_equal(found, wanted)
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
            assert_equal(found, wanted)
            assert found.done.k == fires
            return
    raise AssertionError("two tokens are too close in every answer")


# ---- one session, many questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [Method(layers=LAYERS), Method(tau=2.0 / 2), Method(fastv=(2, 0.0)), Method(cls_keep=1.0)],
    ids=["mustdrop", "lsm", "fastv", "cls"],
)
def test_with_everything_kept_the_answer_is_that_without_a_reduction(case: Case, method: Method) -> None:
    found, plain = ask_both(case, method)[0], ask_both(case, Method())[0]
    assert found.ids == plain.ids
    assert_near(found.logits, plain.logits, TOLERANCE / 10)
    assert found.done.slots == plain.done.slots


def test_dual_attention_and_merging_work_for_siglip(cases: Cases) -> None:
    case = cases(Tiny(layers=16, image=126, context=768, vision="siglip", select="full"))
    method = Method(tau=some_merged(case), layers=LAYERS)
    assert_equal(*ask_both(case, method, share=0.5))


# ---- the other dialects ----------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name in DIALECTS if name != "ort"])
def other(request: pytest.FixtureRequest, cases: Cases) -> Case:
    """The bundle of 16 layers, its graphs of another dialect run by onnxruntime."""
    case = cases(MODELS["16-layers-gqa"])
    return case._replace(model=Model(case.model.bundle, DialectBackend(case.model.bundle, request.param), 0))


def test_prunes_in_every_dialect(other: Case) -> None:
    assert_equal(*ask_both(other, Method(layers=LAYERS), share=0.5))
    assert_equal(*ask_both(other, Method(fastv=(2, 0.5), k=9)))


def test_merging_and_key_rows_in_every_dialect(other: Case) -> None:
    tau = some_merged(other)
    assert_equal(*ask_both(other, Method(tau=tau, key=0.08, layers=LAYERS), share=0.5))
    assert_equal(*ask_both(other, Method(tau=tau, cls_keep=0.5, fastv=(2, 0.5), k=9)))
    assert_equal(*ask_both(other, Method(tau=tau, order="merged-first"), (4, 7)))


def test_mustdrop_as_released_in_every_dialect(other: Case) -> None:
    assert_equal(*ask_both(other, released(other), share=0.5))
    assert_equal(*ask_both(other, replace(released(other), k=9), (4, 7), share=0.5))


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
    found, wanted = ask_both(case, method, share=share)
    if gate is not None:
        messages = prompt_messages(QUESTIONS[0])
        wanted = case.statement.answer(inputs(case, messages), method, STEPS)
        found = Talk(case.model).ask(messages, [random_image(4)], Method(), STEPS, exits=gate)
    assert_equal(found, wanted)
    layers = case.model.manifest.model.layers
    print(f"\n{dialect} {way} {layers} layers: {np.abs(found.logits - wanted.logits.numpy()).max():.1e}")
