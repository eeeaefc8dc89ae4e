"""PaliGemma: the whole prompt sees itself both ways, the answer what is before it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.exported import Models, greedy, policy, prompt
from tests.support.families.paligemma import PALIGEMMA
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS, STEPS
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.session.session import Session

pytestmark = pytest.mark.dialects(*DIALECTS)

KS = (3, 5, 8)
TOLERANCE = 1e-4
QUESTION = QUESTIONS[1]


@pytest.mark.parametrize("k", [None, 5])
def test_a_further_question_runs_the_image_through_the_decoder_again(models: Models, k: int | None) -> None:
    model, images, options = models(PALIGEMMA, KS), [random_image(0)], Options(STEPS, ignore_eos=True, logprobs=True)
    with model.open(images) as conversation:
        asked = [conversation.ask(question, k, options) for question in ("red?", QUESTION, QUESTION)]
    for question, answer in zip(("red?", QUESTION, QUESTION), asked, strict=True):
        with model.open(images) as fresh:
            alone = fresh.ask(question, k, options)
        assert answer.token_ids == alone.token_ids
        assert_near(answer.logprobs or (), alone.logprobs or (), 2e-5)
    assert [answer.stats.reused_image for answer in asked] == [False, False, True]


def test_an_image_in_the_caches_of_another_question_is_another_image(models: Models) -> None:
    model = models(PALIGEMMA, KS)
    session, first, second = (
        Session(model.backend, model.manifest),
        *(prompt(model, prompt_messages(question), [random_image(0)]) for question in ("red?", QUESTION)),
    )
    wanted, slots = greedy(model, second, None, 1).logits[0], second.prefix_length
    session.prefill(first, policy(None))
    of_first = np.stack(session.caches.segments[0, True].cache.read(np.arange(slots)))
    assert_near(session.prefill(second, policy(None)).logits, wanted, 2e-5)
    assert np.abs(np.stack(session.caches.segments[0, True].cache.read(np.arange(slots))) - of_first).max() > 1e-2
