"""What vtx-eval and vtx-bench count is what fresh single answers give, in any order and interrupted anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.support.exported import Models
from tests.support.families.llava_onevision import ONEVISION
from tests.support.families.qwen import QWEN25
from tests.support.fresh import NAMES, FreshAnswers, Setting, shuffled
from tests.support.tiny import random_image

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError
from vtx.tools.bench.measure import Bench, BenchOptions
from vtx.tools.bench.methods import Method
from vtx.tools.evaluation import ask
from vtx.tools.evaluation.ask import Asked, CostedAnswer, Evaluated, Inquiry, ask_all, make_methods
from vtx.tools.evaluation.questions import QuestionSet, TaskQuestion

TOKENS = 8
OPTIONS = Options(max_new_tokens=TOKENS)
QUESTIONS = ("what is there?", "how many?", "which one is it?", "What else is in the picture?")
FASTV = "fastv:k=3,ratio=0.5"
METHODS = make_methods((None, 3, 5), ("none", FASTV))
ONE: Setting = (None, "none")


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(reductions=(FASTV,))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Method, Answer]]:
    """Every answer that is asked for: the question, its method, what came."""
    asked: list[tuple[str, Method, Answer]] = []
    original: Callable[..., Answer] = Conversation.ask

    def noting(self: Conversation, question: str, k: Any, options: Options, *, reduce: str | None) -> Answer:
        answer = original(self, question, k, options, reduce=reduce)
        asked.append((question, Method(k, reduce or "none"), answer))
        return answer

    monkeypatch.setattr(Conversation, "ask", noting)
    return asked


def mean_tokens(kept: Sequence[int]) -> float:
    """Image tokens that leave each layer, the mean of all layers."""
    return fmean((*kept[1:], kept[-1]))


@pytest.mark.slow
def test_the_texts_of_these_tests_can_be_told_apart(fresh: FreshAnswers) -> None:
    texts = [fresh([name], question, ONE).text for name in NAMES for question in QUESTIONS]
    assert len(set(texts)) == len(texts)


# --- vtx-eval -------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def evaluated(
    model: Model, asked: Sequence[tuple[Sequence[str], str, Setting]], methods: Sequence[Method], folder: Path,
    tokens: int = TOKENS,
) -> Asked:  # fmt: skip
    questions = [TaskQuestion(tuple(folder / n for n in names), q, ("yes",), "image") for names, q, _ in asked]
    data = QuestionSet("questions", tuple(questions))
    by = Evaluated.of(model, methods)
    return ask_all(
        by, Inquiry(data, methods, tokens), folder / "answers", report=lambda *_: None, predict=lambda _: None
    )


def check(fresh: FreshAnswers, asked: Sequence[Any], found: Asked) -> None:
    assert len(found.replies) == len(asked)
    for (names, question, _), replies in zip(asked, found.replies, strict=True):
        for method, reply in zip(found.methods, replies, strict=True):
            wanted = fresh(names, question, (method.k, method.reduce))
            kept = wanted.stats.vision_tokens_kept
            assert (reply.text, reply.new_tokens) == (wanted.text, len(wanted.token_ids))
            assert reply.kv_bytes == wanted.stats.kv_bytes
            assert reply.full_layers == sum(tokens > 0 for tokens in kept)
            assert reply.vision_tokens == mean_tokens(kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(9))
def test_an_evaluation_interrupted_anywhere_counts_fresh_answers(
    model: Model, folder: Path, fresh: FreshAnswers, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, original = random.Random(seed), ask.Asker.__call__
    asked = [
        (names or [NAMES[0]], question, setting) for names, question, setting in shuffled(seed, 6, NAMES, QUESTIONS)
    ]
    for _ in range(3):
        left = [rng.randint(0, 2)]

        def dying(*given: Any, left: list[int] = left) -> dict[Method, CostedAnswer]:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return original(*given)

        methods = rng.sample(METHODS, rng.randint(1, 3))
        with monkeypatch.context() as patch:
            patch.setattr(ask.Asker, "__call__", dying)
            try:
                check(fresh, asked, evaluated(model, asked, methods, folder))
            except Killed:
                continue
    rng.shuffle(asked)
    check(fresh, asked, evaluated(model, asked, rng.sample(METHODS, len(METHODS)), folder))


def test_an_evaluation_asks_again_about_an_image_that_was_replaced(
    model: Model, folder: Path, fresh: FreshAnswers
) -> None:
    asked = [([name], QUESTIONS[0], ONE) for name in NAMES]
    check(fresh, asked, evaluated(model, asked, METHODS[:1], folder))
    random_image(9, (90, 60)).save(folder / NAMES[1])
    fresh = FreshAnswers(model, {name: folder / name for name in NAMES}, OPTIONS)
    check(fresh, asked, evaluated(model, asked, METHODS[:1], folder))
    with pytest.raises(RequestError, match="another --max-new-tokens;"):
        evaluated(model, asked, METHODS[:1], folder, TOKENS + 1)


# --- vtx-bench ------------------------------------------------------------------------------------


def test_a_bench_times_fresh_answers(model: Model, folder: Path, answers: list[Any]) -> None:
    options = Options(max_new_tokens=4, ignore_eos=True)
    fresh = FreshAnswers(model, {name: folder / name for name in NAMES}, options)
    first = FreshAnswers(model, fresh.images, Options(max_new_tokens=1))
    ks = (None, 3, 5)
    bench = Bench(model, BenchOptions(folder / NAMES[2], "red?", new_tokens=4, repeats=3, warmup=1), ks)
    answers.clear()
    result = bench.run(None, lambda *_: None)
    assert len(answers) == 4 * 3 * 3
    made = list(zip(*[iter(answers)] * 3, strict=True))
    for number, (opening, again, switched) in enumerate(made):
        k, other = ks[(number // 3 + number) % 3], ks[(number // 3 + number + 1) % 3]
        for (question, method, answer), asked_k, wanted in (
            (opening, k, fresh), (again, k, first), (switched, other, first),
        ):  # fmt: skip
            assert (question, method) == ("red?", Method(asked_k))
            assert answer.token_ids == wanted([NAMES[2]], "red?", (asked_k, "none")).token_ids
    for k in ks:
        wanted_stats = fresh([NAMES[2]], "red?", (k, "none")).stats
        for turn in result.turns[k]:
            assert turn.stats.kv_slots == wanted_stats.kv_slots
            assert turn.stats.vision_tokens_kept == wanted_stats.vision_tokens_kept
            assert not turn.stats.reused_image


SPECS = ("none", FASTV, "cdpruner:keep=4", "random:keep=5")


@pytest.mark.parametrize("tiny", [None, ONEVISION, QWEN25], ids=["llava", "tiles", "native"])
def test_answers_side_by_side_cost_what_they_cost_alone_and_an_image_is_encoded_once(
    models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any
) -> None:
    """Also where a picture stands in several sets of images, and a question twice in the data."""
    chosen = models(reductions=(FASTV,)) if tiny is None else models(tiny, (3, 5), reductions=(FASTV,))
    sets = [NAMES[:1], NAMES[1:2], NAMES[:1], NAMES[:2] if tiny is not QWEN25 else NAMES[1:2], NAMES[:1]]
    words = [*QUESTIONS, QUESTIONS[0]]
    questions = [
        TaskQuestion(tuple(folder / name for name in names), text, ("yes",), "image", about="the dog")
        for names, text in zip(sets, words, strict=True)
    ]
    methods = make_methods((None, 3, 5), SPECS if tiny is not QWEN25 else SPECS[:2])
    encoded = list[Any]()
    original = type(chosen.backend).vision

    def vision(self: Any, *given: Any) -> Any:
        encoded.append(given)
        return original(self, *given)

    def evaluated(name: str, **more: Any) -> Asked:
        encoded.clear()
        return ask_all(
            Evaluated.of(chosen, methods),
            Inquiry(QuestionSet("questions", tuple(questions)), methods, TOKENS, **more), folder / name,
            report=lambda *_: None, predict=lambda _: None,
        )  # fmt: skip

    monkeypatch.setattr(type(chosen.backend), "vision", vision)
    together, passes = evaluated("together", timed=0), len(encoded)
    assert all(reply.first_token_ms is None for replies in together.replies for reply in replies)
    one_by_one = evaluated("alone", timed=len(questions))
    assert len(encoded) >= 3 * passes
    untimed = [tuple(replace(reply, first_token_ms=None) for reply in replies) for replies in one_by_one.replies]
    assert untimed == [*together.replies]
    both = evaluated("together", timed=2)
    assert [reply[0].first_token_ms is not None for reply in both.replies] == [True, False, False, True, True]
    evaluated("together", timed=2)
    assert not encoded, "what was timed is not asked again"
