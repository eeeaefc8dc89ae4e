"""K with a rest at every precision and with K and V of 8 bits: the plain statement's, and the same in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.bundles import export_with
from tests.support.exported import DEVICES, THREADS, answer, prompt
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.quantised import SCHEMES, make_quantised
from tests.support.reference import Reference
from tests.support.rest import attention_to_image, chosen_rest, rest_answer
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.graphs.dialects import ort
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.openvino import backend
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import PolicySettings, make_policy, read_rest
from vtx.runtime.session.session import Session

KS = (2, 5, 8)
STEPS = 6
QUESTIONS = ("What is the colour of the square in the picture?", "red?")
SAME = 1e-5  # between answers that the same engine computes in another order
TINY = Tiny(hidden=128, ffn=384, dtype="float16")


class Precision(NamedTuple):
    """A checkpoint whose weights the bundle holds as they are, and the K and V of the bundle.

    `logits`: how far they may be from the statement's; `attention`: by which share a chosen token may have less than
    the last that the statement chooses, 0 if the choice must be the same.
    """

    tiny: Tiny
    weights: str | None
    kv: str
    logits: float
    attention: float = 0.0
    scheme: str | None = None


PRECISIONS = {
    "fp32": Precision(TINY, "fp32", "fp32", 1e-4),
    "fp16": Precision(TINY, "fp16", "fp16", 0.03, 0.02),
    "bf16": Precision(Tiny(hidden=128, ffn=384, dtype="bfloat16"), "bf16", "fp16", 0.03, 0.02),
    "int8": Precision(TINY, None, "fp32", 1e-4, 0.0, "packed-int8"),
    "int4": Precision(TINY, None, "fp32", 1e-4, 0.0, "awq-32"),
    "fp32, int8 caches": Precision(TINY, "fp32", "int8", 1.2, 0.05),
    "int4, int8 caches": Precision(TINY, None, "int8", 1.2, 0.05, "awq-32"),
}


class Opened(NamedTuple):
    folder: Path
    checkpoint: Path


@pytest.fixture(scope="module", autouse=True)
def _whole_activations() -> Iterator[None]:
    """Engines that multiply integers round no hidden states, so that a statement can be exact."""
    settings = backend.arithmetic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "INT8_ACTIVATIONS", 1)
        patch.setattr(backend, "arithmetic", lambda *how: {**settings(*how), "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0})
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Callable[..., Opened]:
    @cache
    def make(how: Precision) -> Opened:
        folder = tmp_path_factory.mktemp("precision")
        checkpoint = plain = tiny_checkpoint(how.tiny)
        if how.scheme is not None:
            checkpoint, plain = make_quantised(checkpoint, folder, SCHEMES[how.scheme])
        floats = {} if how.scheme is None else {"vision_precision": "fp32", "head_precision": "fp32"}
        options = ExportOptions(
            str(checkpoint), KS, how.weights, kv_precision=how.kv, dialects=("ort", "plain"), **floats
        )  # fmt: skip
        return Opened(export_with(options, folder / "bundle").folder, plain)

    return make


@pytest.fixture(scope="module")
def loaded(made: Callable[..., Opened]) -> Callable[..., Model]:
    return cache(lambda how, device: load(made(how).folder, device=device, compute="f32", threads=THREADS))


@pytest.fixture(scope="module")
def judge(made: Callable[..., Opened]) -> Callable[..., Reference]:
    return cache(lambda how: Reference(made(how).checkpoint))


def policy(model: Model, k: int | None, rest: str | None = None, reduce: str | None = None) -> Policy:
    number = None if rest is None else read_rest(rest)
    return make_policy(
        k, model.manifest, model.backend.gate, PolicySettings(rest=number, reduce=reduce), dialect=model.backend.dialect
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", PRECISIONS.values(), ids=list(PRECISIONS))
def test_the_rest_and_the_logits_are_the_statements_for_the_weights_that_are_stored(
    loaded: Callable[..., Model], judge: Callable[..., Reference], how: Precision, device: str
) -> None:
    """Where K and V are rounded, only tokens whose attention is alike may be swapped; given these, logits are near."""
    model, reference = loaded(how, device), judge(how)
    messages, picture = prompt_messages(QUESTIONS[0]), random_image(4)
    asked, inputs = prompt(model, messages, [picture]), reference.inputs(messages, [picture])
    for k, count in ((2, 4), (5, 4), (8, 2)):
        session = Session(model.backend, model.manifest)
        done = session.prefill(asked, policy(model, k, str(count)))
        rows = np.flatnonzero(done.cuts[0].kept).tolist()
        assert (done.k, done.rest, len(rows)) == (k, count, count)
        received = np.array(attention_to_image(reference, inputs, k))
        least = np.sort(received)[-count]
        assert received[rows].min() >= (1 - how.attention) * least
        if not how.attention:
            assert rows == chosen_rest(reference, inputs, k, count)
        wanted = rest_answer(reference, inputs, k, rows, STEPS)
        logits = [done.logits, *(session.decode(token) for token in wanted.ids[:-1])]
        assert_near(np.stack(logits), wanted.logits, how.logits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", PRECISIONS.values(), ids=list(PRECISIONS))
def test_questions_in_any_order_are_answered_as_afresh_and_the_ends_are_the_other_forms(
    loaded: Callable[..., Model], how: Precision, device: str
) -> None:
    model, picture = loaded(how, device), random_image(4)
    session = Session(model.backend, model.manifest)
    asked = [prompt(model, prompt_messages(question), [picture]) for question in QUESTIONS]

    def fresh(number: int, *depth: Any) -> np.ndarray:
        return answer(Session(model.backend, model.manifest), asked[number], policy(model, *depth), STEPS)

    order: list[tuple[Any, ...]] = [(5, "25%"), (8, "2"), (None,), (2, "40%"), (5, "3"), (5,), (5, "25%"), (8, "40%")]
    for number, depth in enumerate(order):
        found = answer(session, asked[number % 2], policy(model, *depth), STEPS)
        assert_near(found, fresh(number % 2, *depth), SAME)
    for k in KS:
        assert np.array_equal(fresh(0, k, "0"), fresh(0, k))
        assert np.array_equal(fresh(0, k, "100%"), fresh(0, None))
        assert np.array_equal(fresh(0, k, "10%"), fresh(0, None, None, f"fastv:k={k - 1},ratio=0.9"))
