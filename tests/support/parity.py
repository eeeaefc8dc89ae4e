"""Statements of parity, for every family: transformers without withdrawal, plain VTW at K, and states that go back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.exact import ExactReference
from tests.support.exported import answer, greedy, policy, prompt
from tests.support.near import assert_near
from tests.support.reference import Greedy, Reference
from tests.support.tiny import prompt_messages
from vtx.runtime.api.images import Picture
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import MAX_DRAFT, Options
from vtx.runtime.backends.slots import RECENT
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.video import Video

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
    for question, told in zip(questions, later, strict=True):
        with model.open(pictures) as fresh:
            alone = fresh.ask(question, k, options)
        assert told.token_ids == alone.token_ids
        assert told.logprobs is not None
        assert_near(told.logprobs, alone.logprobs, tolerance)
    assert [told.stats.reused_image for told in later] == [number > 0 for number in range(len(questions))]


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
    ks: Sequence[int], tolerance: float, alike: bool = False, steps: int = STEPS,
) -> None:  # fmt: skip
    """The answer to a prompt is transformers', and at each K the statement's; each K gives another one but `alike`."""
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    answers, layers, of_images = [], judge.layers, int(asked.is_vision.sum())
    for k in (None, *ks):
        found = greedy(model, asked, k, steps)
        wanted = judge.greedy(inputs, k, steps, guess=found.ids)
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, tolerance)
        assert found.done.k == k
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        whole = k - 1 if k else layers
        assert list(found.done.vision_kept) == [of_images] * whole + [0] * (layers - whole)
        answers.append(wanted.logits)
    ids, logits = judge.generate_hf(inputs, steps)
    assert answers[0].argmax(-1).tolist() == ids
    assert_near(answers[0].numpy(), logits.numpy(), tolerance)
    changes = [float((a - b).abs().max()) for n, a in enumerate(answers) for b in answers[:n]]
    assert (max if alike else min)(changes) > 100 * tolerance, "two K that mean the same"


def assert_chat_as_reference(
    model: Model,
    judge: Reference,
    pictures: Sequence[Image.Image],
    k: int | None,
    tolerance: float = TOLERANCE,
    exact: ExactReference | None = None,
) -> None:
    """Three turns of a chat, each given `judge`'s answer to the whole of it, drafts of prompt lookup among them.

    Where two experts nearly tie, float32's rounding decides which one a router chooses, in the reference, too. An
    answer that is not `judge`'s has to be that of `exact`, if there is one, whose router tells them apart.
    """
    options, messages, most = Options(STEPS, ignore_eos=True, logprobs=True), list[dict[str, Any]](), 2 * tolerance
    with model.open(pictures) as conversation:
        chat = conversation.chat(k)
        for turn, question in enumerate(QUESTIONS):
            messages += prompt_messages(question, 0 if turn else len(pictures))
            found = chat.ask(question, options, prompt_lookup=8 * (turn % 2))
            ids, inputs = list(found.token_ids), judge.inputs(messages, list(pictures))
            wanted = judge.greedy(inputs, k, STEPS, guess=ids)
            alike = ids == wanted.ids and np.allclose(found.logprobs or (), chosen(wanted), rtol=0, atol=most)
            if exact and not alike:
                wanted = exact.greedy(inputs, k, STEPS)
            assert ids == wanted.ids or wanted.margin < most
            if ids == wanted.ids:
                assert_near(found.logprobs or (), chosen(wanted), most)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": found.text}]})


def chosen(answer: Greedy) -> list[float]:
    """The natural logarithms of the probabilities of an answer's tokens."""
    return [float(row[id]) for row, id in zip(answer.logits.log_softmax(-1), answer.ids, strict=True)]


def assert_near_reference(
    model: Model, judge: Reference, messages: list[dict[str, Any]], images: Sequence[Image.Image], most: float
) -> None:
    """Logits of `model`, exported for K = 3, are within `most` of those of `judge`, and its golden vectors hold."""
    assert all(check.passed for check in check_golden(model))
    for k in (None, 3):
        wanted = judge.greedy(judge.inputs(messages, images), k, STEPS)
        found = greedy(model, prompt(model, messages, images), k, STEPS, forced=wanted.ids)
        assert_near(found.logits, wanted.logits, most)


def assert_parity(model: Model, judge: Reference, inputs: Any, asked: Prompt, tolerance: float = TOLERANCE) -> None:
    """Ids, logits and slots of `model`, exported for K = 3 and 5, are those of `judge` for the same prompt."""
    ids, logits = judge.generate_hf(inputs, STEPS)
    for k in (None, 3, 5):
        found = greedy(model, asked, k, STEPS)
        wanted = judge.greedy(inputs, k, STEPS, guess=found.ids)
        assert wanted.margin > 2 * tolerance, "this prompt proves nothing: two tokens are too close"
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, tolerance)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        if k is None:
            assert found.ids == ids
            assert_near(found.logits, logits.numpy(), tolerance)


def assert_rejected_tokens_leave_states(model: Model, asked: Prompt, k: int | None, right: int) -> None:
    """A draft of which `right` tokens are right, and tokens that are only tried, leave states as they were."""
    wanted = answer(Session(model.backend, model.manifest), asked, policy(k), MAX_DRAFT + 4)
    ids, session = wanted.argmax(-1).tolist(), Session(model.backend, model.manifest)
    session.prefill(asked, policy(k))
    assert session.draft_room == MAX_DRAFT
    wrong = [(id + 1) % model.manifest.model.vocab for id in ids[1 + right : 1 + MAX_DRAFT]]
    found = [session.decode(ids[0], [*ids[1 : 1 + right], *wrong])]
    while (logits := session.accept(ids[len(found)])) is not None:
        found.append(logits)
    assert len(found) == 1 + right
    session.try_tokens([5, 6, 7] * MAX_DRAFT)
    found += [session.decode(ids[number]) for number in range(len(found), len(found) + 2)]
    assert_near(found, wanted[1 : 1 + len(found)], 1e-4)


def assert_changed_turns_go_back(model: Model, asked: Prompt, back: int) -> None:
    """The suffix's ids agree up to `back` tokens before the end of a long answer: recent, and forgotten since."""
    session = Session(model.backend, model.manifest)
    done = session.prefill(asked, policy(3))
    ids, rows = list[int](), [done.logits]
    for _ in range(4 * RECENT):
        ids.append(int(rows[-1].argmax()))
        rows.append(session.decode(ids[-1]))
    changed = [*ids[:-back], 7, 8, 9]
    is_vision = np.pad(asked.is_vision, (0, len(changed)))
    longer = replace(asked, ids=np.concatenate([asked.ids, changed]), is_vision=is_vision)
    found = session.prefill(longer, policy(3), after=done.selection)
    alone = Session(model.backend, model.manifest).prefill(longer, policy(3))
    assert_near(found.logits, alone.logits, 1e-4)
    assert (found.reused_tokens > len(asked.ids)) == (back <= RECENT)


def assert_as_drawn(
    model: Model, judge: Reference, inputs: Any, asked: Prompt, ks: Sequence[int], tolerance: float
) -> float:
    """The largest difference of logits from `judge`'s at each K and transformers', of a model that nobody chose."""
    (ids, logits), worst, sure = judge.generate_hf(inputs, STEPS), 0.0, 0
    for k in (None, *ks):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        worst = max(worst, float(np.abs(found.logits - wanted.logits.numpy()).max()))
        assert found.ids == wanted.ids or wanted.margin < tolerance
        if k is None and ids == wanted.ids:
            worst, sure = max(worst, float(np.abs(found.logits - logits.numpy()).max())), sure + 1
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
    assert sure or wanted.margin < tolerance
    assert worst < tolerance
    return worst


def video_prompts(
    model: Model, judge: Reference, pictures: Sequence[Picture], question: str, taken: Callable[[Any], Any]
) -> tuple[Any, Prompt]:
    """The same prompt for transformers and for a session, images before videos; `taken`: as `judge` takes one."""
    videos = [taken(each) for each in pictures if isinstance(each, Video | np.ndarray)]
    images: list[Any] = [each for each in pictures if not isinstance(each, Video | np.ndarray)]
    messages = prompt_messages(question, len(images), len(videos))
    inputs, asked = judge.inputs(messages, images, videos), prompt(model, messages, pictures)
    ids = inputs["input_ids"][0]
    assert asked.ids.tolist() == torch.where(ids == judge.video_token, judge.image_token, ids).tolist()
    return inputs, asked


def assert_same_on_openvino(
    model: Model, pictures: Sequence[Picture], question: str, ks: Sequence[int | None] = (None, 5)
) -> None:
    """OpenVINO gives the ids, probabilities and slots that onnxruntime gives."""
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    options = Options(STEPS, ignore_eos=True, logprobs=True)
    with load(model.bundle.folder, device="openvino", threads=1) as other:
        for k in ks:
            ours, theirs = (each.open(pictures).ask(question, k, options) for each in (model, other))
            assert ours.token_ids == theirs.token_ids
            assert_near(ours.logprobs or (), theirs.logprobs or (), 2e-4)
            assert ours.stats.kv_slots == theirs.stats.kv_slots
            assert ours.stats.vision_tokens == theirs.stats.vision_tokens > 0
