"""One statement of parity, for every family: transformers without withdrawal, and plain VTW at two K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.support.exported import greedy, prompt
from tests.support.reference import Reference
from tests.support.tiny import prompt_messages
from vtx.runtime.api.loaded import Picture
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Prompt

STEPS = 6
TOLERANCE = 2e-5
CLOSE = 2 * TOLERANCE  # two tokens with logits that near to each other


QUESTIONS = ("red?", "How many circle shapes are there?", "red?")


def assert_later_equal_fresh(
    model: Model, pictures: Sequence[Picture], k: int | None, questions: Sequence[str] = QUESTIONS,
    tolerance: float = TOLERANCE,
) -> None:  # fmt: skip
    """Further questions in one conversation get the answers, and their probabilities, of fresh ones."""
    options = Options(STEPS, ignore_eos=True, logprobs=True)
    with model.open(pictures) as conversation:
        later = [conversation.ask(question, k, options) for question in questions]
    for question, answer in zip(questions, later, strict=True):
        with model.open(pictures) as fresh:
            alone = fresh.ask(question, k, options)
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs is not None
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=tolerance, rtol=0)
    assert [answer.stats.reused_image for answer in later] == [number > 0 for number in range(len(questions))]


def assert_answers_as_reference(
    model: Model, judge: Reference, messages: list[dict[str, Any]], images: Sequence[Image.Image],
    tolerance: float = TOLERANCE,
) -> None:  # fmt: skip
    """The prompt's ids are the reference's, and so is what `assert_parity` compares."""
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    assert_parity(model, judge, inputs, asked, tolerance)


def assert_every_k(
    model: Model, judge: Reference, messages: list[dict[str, Any]], images: Sequence[Image.Image],
    ks: Sequence[int], tolerance: float,
) -> None:  # fmt: skip
    """The answer to a prompt is transformers', and at each K the statement's; each K gives another one."""
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    answers = []
    for k in (None, *ks):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=tolerance, rtol=0)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        answers.append(wanted.logits)
    ids, logits = judge.generate_hf(inputs, STEPS)
    assert answers[0].argmax(-1).tolist() == ids
    np.testing.assert_allclose(answers[0].numpy(), logits.numpy(), atol=tolerance, rtol=0)
    changes = [float((a - b).abs().max()) for n, a in enumerate(answers) for b in answers[:n]]
    assert min(changes) > 100 * tolerance, "two K that mean the same"


def assert_chat_as_reference(
    model: Model, judge: Reference, pictures: Sequence[Image.Image], k: int | None, tolerance: float = TOLERANCE
) -> None:
    """Three turns of a chat, each given `judge`'s answer to the whole of it, drafts of prompt lookup among them."""
    options, messages = Options(STEPS, ignore_eos=True, logprobs=True), list[dict[str, Any]]()
    with model.open(pictures) as conversation:
        chat = conversation.chat(k)
        for turn, question in enumerate(QUESTIONS):
            messages += prompt_messages(question, 0 if turn else len(pictures))
            found = chat.ask(question, options, prompt_lookup=8 * (turn % 2))
            wanted = judge.greedy(judge.inputs(messages, list(pictures)), k, STEPS, guess=found.token_ids)
            assert list(found.token_ids) == wanted.ids or wanted.margin < 2 * tolerance
            if list(found.token_ids) == wanted.ids:
                chosen = [float(row[id]) for row, id in zip(wanted.logits.log_softmax(-1), wanted.ids, strict=True)]
                np.testing.assert_allclose(found.logprobs or (), chosen, atol=2 * tolerance, rtol=0)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": found.text}]})


def assert_near_reference(
    model: Model, judge: Reference, messages: list[dict[str, Any]], images: Sequence[Image.Image], most: float
) -> None:
    """Logits of `model`, exported for K = 3, are within `most` of those of `judge`, and its golden vectors hold."""
    assert all(check.passed for check in check_golden(model))
    for k in (None, 3):
        wanted = judge.greedy(judge.inputs(messages, images), k, STEPS)
        found = greedy(model, prompt(model, messages, images), k, STEPS, forced=wanted.ids)
        np.testing.assert_allclose(found.logits, wanted.logits, atol=most, rtol=0)


def assert_parity(model: Model, judge: Reference, inputs: Any, asked: Prompt, tolerance: float = TOLERANCE) -> None:
    """Ids, logits and slots of `model`, exported for K = 3 and 5, are those of `judge` for the same prompt."""
    ids, logits = judge.generate_hf(inputs, STEPS)
    for k in (None, 3, 5):
        found = greedy(model, asked, k, STEPS)
        wanted = judge.greedy(inputs, k, STEPS, guess=found.ids)
        assert wanted.margin > 2 * tolerance, "this prompt proves nothing: two tokens are too close"
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=tolerance, rtol=0)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        if k is None:
            assert found.ids == ids
            np.testing.assert_allclose(found.logits, logits.numpy(), atol=tolerance, rtol=0)
