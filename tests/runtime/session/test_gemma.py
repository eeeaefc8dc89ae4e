"""Gemma 4: sliding windows, layers that share keys and values, inputs to each layer, and its tower."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.exported import Models, greedy, prompt
from tests.support.families.gemma import GEMMA4
from tests.support.parity import QUESTIONS, STEPS, assert_chat_as_reference, assert_later_equal_fresh
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.model import Model

KS = (2, 4, 5, 6)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(GEMMA4, KS)


@pytest.mark.parametrize("images", [1, 2])
def test_answers_are_those_of_transformers_and_at_k_of_the_statement(
    model: Model, reference: Callable[[Tiny], Reference], images: int
) -> None:
    judge, messages = reference(GEMMA4), prompt_messages(QUESTIONS[1], images)
    pictures = [random_image(number, (90 + 50 * number, 70)) for number in range(images)]
    inputs, asked = judge.inputs(messages, pictures), prompt(model, messages, pictures)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    answers = []
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        answers.append(wanted.logits)
    ids, logits = judge.generate_hf(inputs, STEPS)
    np.testing.assert_allclose(
        greedy(model, asked, None, STEPS, forced=ids).logits, logits.numpy(), atol=TOLERANCE, rtol=0
    )
    changes = [float((a - b).abs().max()) for n, a in enumerate(answers) for b in answers[:n]]
    assert min(changes) > 100 * TOLERANCE, "two K that mean the same"


@pytest.mark.parametrize("k", [None, 4, 6])
def test_later_questions_and_chats_are_answered_as_alone(
    model: Model, reference: Callable[[Tiny], Reference], k: int | None
) -> None:
    assert_later_equal_fresh(model, [random_image(3)], k)
    assert_chat_as_reference(model, reference(GEMMA4), [random_image(4), random_image(5, (60, 90))], k)
