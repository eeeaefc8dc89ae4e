"""PaliGemma: the whole prompt sees itself both ways, the answer what is before it.

`VTX_CONFIGURATIONS=30` sets how many random configurations are compared with transformers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS, Models, greedy, policy, prompt
from tests.support.families.paligemma import PALIGEMMA
from tests.support.parity import QUESTIONS, STEPS, assert_answers_as_reference, assert_near_reference
from tests.support.reference import Reference
from tests.support.tiny import make, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import RequestError, TemplateError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Session

pytestmark = pytest.mark.dialects(*DIALECTS)

KS = (3, 5, 8)
TOLERANCE = 1e-4
QUESTION = QUESTIONS[1]


@pytest.mark.parametrize("count", [1, 2])
def test_answers_are_those_of_transformers_and_of_the_statement(
    models: Models, reference: Callable[..., Reference], count: int
) -> None:
    images = [random_image(number) for number in range(count)]
    judge = reference(PALIGEMMA)
    assert_answers_as_reference(models(PALIGEMMA, KS), judge, prompt_messages(QUESTION, count), images)


def test_the_golden_vectors_hold(models: Models) -> None:
    checks = list(check_golden(models(PALIGEMMA, KS)))
    assert len(checks) == 4 + len(KS)
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("k", [None, 5])
def test_a_further_question_runs_the_image_through_the_decoder_again(models: Models, k: int | None) -> None:
    model, images, options = models(PALIGEMMA, KS), [random_image(0)], Options(STEPS, ignore_eos=True, logprobs=True)
    with model.open(images) as conversation:
        asked = [conversation.ask(question, k, options) for question in ("red?", QUESTION, QUESTION)]
    for question, answer in zip(("red?", QUESTION, QUESTION), asked, strict=True):
        with model.open(images) as fresh:
            alone = fresh.ask(question, k, options)
        assert answer.token_ids == alone.token_ids
        np.testing.assert_allclose(answer.logprobs or (), alone.logprobs or (), atol=2e-5, rtol=0)
    assert [answer.stats.reused_image for answer in asked] == [False, False, True]


def test_an_image_in_the_caches_of_another_question_is_another_image(models: Models) -> None:
    model = models(PALIGEMMA, KS)
    session, first, second = (
        Session(model.backend, model.manifest),
        *(prompt(model, prompt_messages(question), [random_image(0)]) for question in ("red?", QUESTION)),
    )
    wanted, slots = greedy(model, second, None, 1).logits[0], second.prefix_length
    session.prefill(first, policy(None))
    of_first = np.stack(session.caches.full[0].read(np.arange(slots)))
    np.testing.assert_allclose(session.prefill(second, policy(None)).logits, wanted, atol=2e-5, rtol=0)
    assert np.abs(np.stack(session.caches.full[0].read(np.arange(slots))) - of_first).max() > 1e-2


@pytest.mark.parametrize("dialect", ["ort-cuda", "plain", "trt", "trt10"])
def test_graphs_of_other_dialects_compute_the_same(models: Models, dialect: str) -> None:
    model, images = models(PALIGEMMA, KS), [random_image(0), random_image(1)]
    other, messages = Model(model.bundle, DialectBackend(model.bundle, dialect), 0), prompt_messages(QUESTION, 2)
    for k in (None, 5):
        wanted, found = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (model, other))
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.1), ("bf16", 0.3), ("int8", 0.8)])
def test_logits_are_near_those_of_transformers_at_every_precision(
    models: Models, reference: Callable[..., Reference], precision: str, most: float
) -> None:
    tiny = replace(PALIGEMMA, dtype="bfloat16")
    model, messages = models(tiny, (3,), precision), prompt_messages(QUESTION)
    assert_near_reference(model, reference(tiny), messages, [random_image(0)], most)


def test_a_second_turn_is_refused(models: Models) -> None:
    with models(PALIGEMMA, KS).open([random_image(0)]) as conversation:
        chat = conversation.chat(None)
        chat.ask("red?", Options(1))
        with pytest.raises((RequestError, TemplateError), match="one question"):
            chat.ask("red?", Options(1))


def test_methods_that_go_by_the_questions_attention_are_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="fastv ranks tokens by the question's attention"):
        export(tiny_checkpoint(PALIGEMMA), tmp_path / "bundle", reductions=("fastv:k=3",))


def test_openvino_gives_the_same_answers(models: Models) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    model, options, images = models(PALIGEMMA, KS), Options(STEPS, ignore_eos=True), [random_image(0), random_image(1)]
    with load(model.bundle.folder, device="openvino", threads=1) as other:
        for k in (None, 5):
            answers = [m.open(images).ask(QUESTION, k, options) for m in (model, other)]
            assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "4"))))
def test_random_configurations_answer_as_transformers_and_the_statement(tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    layers, head = chance.randint(3, 8), chance.choice([8, 16, 24, 32])
    heads, patch, grid = chance.choice([2, 4, 6]), chance.choice([8, 14, 16]), chance.randint(2, 5)
    tiny = replace(
        PALIGEMMA, layers=layers, head_dim=head, heads=heads, kv_heads=chance.choice([1, 2]),
        ffn=chance.choice([64, 160]), hidden=chance.choice([32, 64, 96]), vision_hidden=chance.choice([16, 32]),
        vision_layers=chance.randint(1, 4), patch=patch, image=grid * patch, tied=chance.random() < 0.7,
        names=chance.choice(["hub", "saved", "new"]), theta=chance.choice([1e4, 1e5]),
        tokenizer=chance.choice(["bytes", "metaspace"]),
    )  # fmt: skip
    ks, count = sorted(chance.sample(range(2, layers + 1), min(3, layers - 1))), chance.randint(1, 3)
    images = [random_image(number + n, (chance.randint(20, 150), chance.randint(20, 90))) for n in range(count)]
    checkpoint = make(tmp_path / "checkpoint", tiny, number)
    bundle, judge = export(checkpoint, tmp_path / "bundle", tuple(ks), dialects=ORT), Reference(checkpoint)
    with load(bundle.folder, device="cpu", threads=THREADS) as model:
        for question in QUESTIONS[:2]:
            messages = prompt_messages(question, count)
            inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
            assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
            ids, logits = judge.generate_hf(inputs, STEPS)
            found = greedy(model, asked, None, STEPS, forced=ids)
            np.testing.assert_allclose(found.logits, logits.numpy(), atol=TOLERANCE, rtol=0)
            for k in ks:
                wanted = judge.greedy(inputs, k, STEPS)
                found = greedy(model, asked, k, STEPS, forced=wanted.ids)
                np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
                assert list(found.done.slots) == judge.kv_slots(inputs, k)
