"""K with a rest on random models of five families: the plain statement's ids and logits, in both runtimes.

`VTX_CONFIGURATIONS=6 pytest tests/runtime/session/test_random_rests.py` compares six of each family on every engine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from PIL.Image import Image

from tests.support.bundles import export
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import needs_abi, needs_cpp
from tests.support.drawn import any_text, qwen_vl, smolvlm
from tests.support.exported import DEVICES, answer, prompt
from tests.support.families.internvl import INTERNVL
from tests.support.families.llava_next import LLAVA_NEXT
from tests.support.reference import Greedy, Reference
from tests.support.rest import chosen_rest, rest_answer
from tests.support.tiny import Message, Tiny, make, prompt_messages, random_image
from vtx.runtime.api.conversation import Chat
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.policies.make import PolicySettings, make_policy, read_rest
from vtx.runtime.session.session import PrefillResult, Session

COUNT = int(os.environ.get("VTX_CONFIGURATIONS", "1"))
QUESTIONS = "red?", "How many circle shapes are there?", "left?"
RESTS = "1", "10%", "40%"
STEPS = 4
TOLERANCE = 1e-4
LEAST_CONTEXT = 768  # of three turns, whose words take many tokens
OPTIONS = Options(STEPS, ignore_eos=True, logprobs=True)


def llava(draw: random.Random) -> Tiny:
    return replace(any_text(draw, Tiny()), text=draw.choice(["llama", "qwen2", "mistral"]), context=768)


def llava_next(draw: random.Random) -> Tiny:
    return replace(any_text(draw, LLAVA_NEXT), context=1024)


def internvl(draw: random.Random) -> Tiny:
    return replace(any_text(draw, INTERNVL), rope="default", context=1024)


FAMILIES = llava, llava_next, internvl, qwen_vl, smolvlm


class Asked(NamedTuple):
    """A question of a conversation, or with `turn` the next one of its chat."""

    question: str
    k: int
    rest: str
    turn: bool


class Told(NamedTuple):
    """What a runtime answers: the patches of the image's tokens that stayed, and the answer's tokens."""

    patches: list[list[int]]
    ids: list[int]
    logprobs: list[float]
    text: str


class Stated(NamedTuple):
    kept: list[int]
    answer: Greedy


Ask = Callable[[Asked], Told]


def steps(draw: random.Random, ks: Sequence[int]) -> Iterator[Asked]:
    """Every K with every rest, one question after the other, and three turns of a chat at one K."""
    for number, (k, rest) in enumerate(product(ks, RESTS)):
        yield Asked(QUESTIONS[number % len(QUESTIONS)], k, rest, turn=False)
    k = draw.choice(ks)
    for question, rest in zip(QUESTIONS, RESTS, strict=True):
        yield Asked(question, k, rest, turn=True)


class Statement:
    """The plain statement's answers of a model about one image, each computed once."""

    def __init__(self, checkpoint: Path, image: Image) -> None:
        self.judge, self.image, self.answers = Reference(checkpoint), image, dict[str, Stated]()

    def answer(self, messages: list[Message], k: int, rest: str) -> Stated:
        key = repr((messages, k, rest))
        if key not in self.answers:
            inputs = self.judge.inputs(messages, [self.image])
            tokens = int((inputs["input_ids"] == self.judge.image_token).sum())
            count = int(rest) if "%" not in rest else -(-tokens * int(rest[:-1]) // 100)
            kept = chosen_rest(self.judge, inputs, k, count)
            self.answers[key] = Stated(kept, rest_answer(self.judge, inputs, k, kept, STEPS))
        return self.answers[key]


@contextmanager
def python(folder: Path, device: str, image: Image) -> Iterator[Ask]:
    with load(folder, device=device, threads=1) as model, model.open(image) as conversation:
        chats = dict[int, Chat]()

        def ask(asked: Asked) -> Told:
            if asked.turn:
                chat = chats.setdefault(asked.k, conversation.chat(asked.k))
                answer = chat.ask(asked.question, OPTIONS, rest=asked.rest)
            else:
                answer = conversation.ask(asked.question, asked.k, OPTIONS, rest=asked.rest)
            assert answer.stats.reduced is not None
            patches = [[*places] for places in answer.stats.reduced.kept[-1].patches]
            return Told(patches, [*answer.token_ids], list(answer.logprobs or ()), answer.text)

        yield ask


@contextmanager
def libvtx(folder: Path, device: str, image: Image) -> Iterator[Ask]:
    with closing(Loaded(folder, device)) as loaded, closing(Frames(loaded, [np.asarray(image)])) as frames:

        def ask(asked: Asked) -> Told:
            answer = frames.ask(
                asked.question, turn=asked.turn, k=str(asked.k).encode(), rest=asked.rest.encode(),
                max_new_tokens=STEPS, ignore_eos=1, logprobs=1,
            )  # fmt: skip
            patches = answer["kept"][-1]["patches"]
            return Told(patches, answer["token_ids"], answer["logprobs"], answer["text"])

        yield ask


def difference(told: Told, stated: Stated) -> float:
    """The largest one of a log-probability; tokens are the statement's where none of them is too close to call."""
    assert sum(map(len, told.patches)) == len(stated.kept)
    wanted = stated.answer
    if told.ids != wanted.ids:
        assert wanted.margin < 2 * TOLERANCE
        return 0.0
    rows = wanted.logits.log_softmax(-1)
    chosen = [float(row[token]) for row, token in zip(rows, wanted.ids, strict=True)]
    return float(np.abs(np.array(told.logprobs) - chosen).max())


def largest_of_logits(folder: Path, device: str, statement: Statement, ks: Sequence[int]) -> float:
    """The largest difference of any logit at every K and rest, in one session, up to a token too close to call."""
    differences = list[float]()
    with load(folder, device=device, threads=1) as model:
        session = Session(model.backend, model.manifest)
        for number, (k, rest) in enumerate(product(ks, RESTS)):
            messages = prompt_messages(QUESTIONS[number % len(QUESTIONS)])
            kept, wanted = statement.answer(messages, k, rest)
            policy = make_policy(
                k,
                model.manifest,
                model.backend.gate,
                PolicySettings(rest=read_rest(rest)),
                dialect=model.backend.dialect,
            )
            results, prefill = list[PrefillResult](), session.prefill

            def noted(
                *args: Any, results: list[PrefillResult] = results, prefill: Any = prefill, **keywords: Any
            ) -> PrefillResult:
                results.append(prefill(*args, **keywords))
                return results[0]

            with patch.object(session, "prefill", noted):
                logits = answer(session, prompt(model, messages, [statement.image]), policy, STEPS)
            assert np.flatnonzero(results[0].cuts[0].kept).tolist() == kept
            rows = STEPS if wanted.margin > 2 * TOLERANCE else 1
            differences.append(float(np.abs(logits[:rows] - wanted.logits.numpy()[:rows]).max()))
    return max(differences)


@needs_cpp
@needs_abi
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_keeps_the_statements_rest_and_answers_as_it(
    tmp_path: Path, family: Callable[[random.Random], Tiny], seed: int
) -> None:
    draw = random.Random(f"rest {family.__name__} {seed}")
    tiny = family(draw)
    tiny = replace(tiny, context=max(tiny.context, LEAST_CONTEXT))
    ks = sorted(draw.sample(range(2, tiny.layers + 1), 3))
    image = random_image(seed, (draw.randint(60, 160), draw.randint(60, 160)))
    checkpoint = make(tmp_path / "checkpoint", tiny, seed)
    folder = export(checkpoint, tmp_path / "bundle", ks, dialects=("ort", "plain")).folder
    statement, worst = Statement(checkpoint, image), 0.0
    sequence = [*steps(draw, ks)]
    for device in DEVICES:
        worst = max(worst, largest_of_logits(folder, device, statement, ks))
        patches = list[list[list[list[int]]]]()
        for runtime in (python, libvtx):
            messages = list[Message]()
            patches.append([])
            with runtime(folder, device, image) as ask:
                for asked in sequence:
                    told = ask(asked)
                    patches[-1].append(told.patches)
                    if asked.turn:
                        messages += prompt_messages(asked.question, 0 if messages else 1)
                        stated = statement.answer(messages, asked.k, asked.rest)
                        messages.append({"role": "assistant", "content": [{"type": "text", "text": told.text}]})
                    else:
                        stated = statement.answer(prompt_messages(asked.question), asked.k, asked.rest)
                    worst = max(worst, difference(told, stated))
        assert patches[0] == patches[1]
    assert worst < TOLERANCE
    sure = sum(stated.answer.margin > 2 * TOLERANCE for stated in statement.answers.values())
    print(f"{family.__name__} {seed}: K {ks}, largest difference {worst:.1e}, {sure} of {len(statement.answers)} sure")
