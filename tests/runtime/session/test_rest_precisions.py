"""K with a rest at every precision and with K and V of 8 bits: near the plain statement, and the same in any order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.exported import DEVICES, THREADS, answer, prompt
from tests.support.reference import Reference
from tests.support.rest import attention_to_image, rest_answer
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import make_policy, read_rest
from vtx.runtime.session.session import Session

KS = (2, 5, 8)
STEPS = 6
QUESTIONS = ("What is the colour of the square in the picture?", "red?")
SAME = 1e-5  # between answers that the same engine computes in another order


class Precision(NamedTuple):
    """Weights, K and V; how far logits may be from float32's, and attention, as a share of what the last chosen has."""

    weights: str
    kv: str | None
    logits: float
    attention: float


PRECISIONS = {
    "fp16": Precision("fp16", None, 0.13, 0.05),
    "bf16": Precision("bf16", None, 0.5, 0.2),
    "int8": Precision("int8", None, 0.8, 0.3),
    "int4": Precision("int4", None, 6.0, 1.0),
    "fp32, int8 caches": Precision("fp32", "int8", 1.2, 0.3),
    "int4, int8 caches": Precision("int4", "int8", 6.0, 1.0),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Model]:
    folder = tmp_path_factory.mktemp("precisions")

    @cache
    def bundle(how: Precision) -> Path:
        options = ExportOptions(
            str(tiny_checkpoint()), KS, how.weights, kv_precision=how.kv, dialects=("ort", "plain")
        )
        return export_with(options, folder / f"{how.weights}-{how.kv}").folder

    return cache(lambda how, device: load(bundle(how), device=device, threads=THREADS))


def policy(model: Model, k: int | None, rest: str | None = None, reduce: str | None = None) -> Policy:
    number = None if rest is None else read_rest(rest)
    return make_policy(k, model.manifest, model.backend.gate, rest=number, reduce=reduce, dialect=model.backend.dialect)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", PRECISIONS.values(), ids=list(PRECISIONS))
def test_the_rest_is_the_statements_and_the_logits_are_near_it(
    opened: Callable[..., Model], reference: Callable[..., Reference], how: Precision, device: str
) -> None:
    """Rounding may swap tokens whose attention is alike, and none else; given its choice, the statement answers alike."""
    model, judge = opened(how, device), reference(Tiny())
    messages, picture = prompt_messages(QUESTIONS[0]), random_image(4)
    asked, inputs = prompt(model, messages, [picture]), judge.inputs(messages, [picture])
    for k, count in ((2, 4), (5, 4), (8, 2)):
        session = Session(model.backend, model.manifest)
        done = session.prefill(asked, policy(model, k, str(count)))
        rows = np.flatnonzero(done.cuts[0].kept)
        received = np.array(attention_to_image(judge, inputs, k))
        least = np.sort(received)[-count]
        print(how, device, k, "ATT", float((least - received[rows].min()) / least))
        wanted = rest_answer(judge, inputs, k, rows.tolist(), 1)
        print(how, device, k, "LOG", float(np.abs(done.logits - wanted.logits[0].numpy()).max()))
        assert (done.k, done.rest) == (k, count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", PRECISIONS.values(), ids=list(PRECISIONS))
def test_questions_in_any_order_are_answered_as_afresh_and_the_ends_are_the_other_forms(
    opened: Callable[..., Model], how: Precision, device: str
) -> None:
    model, picture = opened(how, device), random_image(4)
    session = Session(model.backend, model.manifest)
    asked = [prompt(model, prompt_messages(question), [picture]) for question in QUESTIONS]

    def fresh(number: int, *how: Any) -> np.ndarray:
        return answer(Session(model.backend, model.manifest), asked[number], policy(model, *how), STEPS)

    order: list[tuple[Any, ...]] = [(5, "25%"), (8, "2"), (None,), (2, "40%"), (5, "3"), (5,), (5, "25%"), (8, "40%")]
    for number, depth in enumerate(order):
        found = answer(session, asked[number % 2], policy(model, *depth), STEPS)
        np.testing.assert_allclose(found, fresh(number % 2, *depth), atol=SAME, rtol=0)
    for k in KS:
        assert np.array_equal(fresh(0, k, "0"), fresh(0, k))
        assert np.array_equal(fresh(0, k, "100%"), fresh(0, None))
        assert np.array_equal(fresh(0, k, "10%"), fresh(0, None, None, f"fastv:k={k - 1},ratio=0.9"))
