"""Prompt lookup changes how many passes an answer takes and nothing else: tokens, text and end are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.exported import QUESTIONS, THREADS, Models, greedy, policy
from tests.support.near import assert_near
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.lookup import PromptLookup
from vtx.runtime.session.generate import Decoding, generate
from vtx.runtime.session.session import Prompt, Session

pytestmark = pytest.mark.dialects("ort", "plain")

MUSTDROP = "mustdrop:gamma=0.05,alpha=1,tau=off,key=0.1,layers=2/4/6"
KS, TOKENS = (3, 5), 48
TOLERANCE = 5e-5  # one row and several run in different kernels
WAYS: dict[str, dict[str, Any]] = {
    "none": {"k": None},
    "3": {"k": 3},
    "5": {"k": 5},
    "fastv": {"k": None, "reduce": "fastv:k=3,ratio=0.5"},
    "mustdrop": {"k": None, "reduce": MUSTDROP},
    "mustdrop renumbering, then 5": {"k": 5, "reduce": f"{MUSTDROP},positions=renumber"},
}


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models(Tiny(kv_heads=request.param), ks=KS, reductions=(MUSTDROP, "fastv:k=3"))


def asked(model: Model, way: dict[str, Any], **options: Any) -> list[Any]:
    """Three questions about an image in one conversation."""
    with model.open(random_image(1)) as conversation:
        settings = {"max_new_tokens": TOKENS, "ignore_eos": True, "logprobs": True, **way, **options}
        return [conversation.ask(question, **settings) for question in QUESTIONS]


@pytest.mark.covering(1)
@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_it_at_the_first_second_and_third_question(model: Model, way: str) -> None:
    plain, drafted = asked(model, WAYS[way]), asked(model, WAYS[way], prompt_lookup=8)
    for without, found in zip(plain, drafted, strict=True):
        assert found.token_ids == without.token_ids
        assert (found.text, found.stopped) == (without.text, without.stopped)
        assert_near(found.logprobs, without.logprobs, TOLERANCE)
        assert found.stats.kv_slots == without.stats.kv_slots
        assert without.stats.drafted is None
        assert 0 <= found.stats.accepted <= found.stats.drafted
    assert sum(answer.stats.accepted for answer in drafted) > 0, "these answers repeat nothing and show nothing"


class Oracle(PromptLookup):
    """Drafts of `known` tokens, each `wrong`-th of them another one."""

    def __init__(self, known: Sequence[int], most: int, wrong: int) -> None:
        super().__init__((), most)
        self._known = [token + (1 if wrong and n % wrong == 0 else 0) for n, token in enumerate(known, 1)]

    def draft(self, most: int) -> list[int]:
        found = self._known[len(self._ids) :][: min(most, self._most)]
        self.drafted += len(found)
        self._running = len(found) or None
        return found


class Counting(Session):
    """Counts its passes; `filled`: the slots of each cache after each, less those of a draft."""

    passes = 0

    def decode(self, token: int, draft: Sequence[int] = ()) -> Any:
        self.passes += 1
        return super().decode(token, draft)


@pytest.mark.parametrize(("wrong", "passes"), [(0, 6), (1, 23), (3, 8)])
def test_a_draft_is_taken_as_far_as_it_is_right(model: Model, prompts: list[Prompt], wrong: int, passes: int) -> None:
    tokens = 24
    for k in (None, 3):
        known = greedy(model, prompts[0], k, tokens)
        session, lookup = Counting(model.backend, model.manifest), Oracle(known.ids, 3, wrong)
        done = session.prefill(prompts[0], policy(k))
        seen = []

        def sample(logits: Any, seen: list[Any] = seen) -> int:
            seen.append(logits.copy())
            return int(logits.argmax())

        found = list(
            generate(session, done.logits, sample, end_ids=(), max_new_tokens=tokens, decoding=Decoding(drafts=lookup))
        )
        assert found == known.ids
        assert_near(np.stack(seen), known.logits, TOLERANCE)
        assert session.passes == passes
        assert session.passes + lookup.accepted == tokens - 1
        suffix = len(prompts[0].ids) - prompts[0].prefix_length
        for cache, slots in zip(session.decoding_caches, stage_slots(session, done.slots), strict=True):
            assert cache.length == slots + tokens - 1, "rejected tokens stay"
        assert session.length == prompts[0].prefix_length + suffix + tokens - 1


def stage_slots(session: Session, per_layer: Sequence[int]) -> list[int]:
    return [per_layer[stage.first - 1] for stage in session.caches.stages]


def test_an_answer_that_is_left_in_the_middle_of_a_draft_leaves_no_trace(model: Model, prompts: list[Prompt]) -> None:
    session = Session(model.backend, model.manifest)
    for number in (0, 1, 2):
        done = session.prefill(prompts[number], policy(3))
        known = greedy(model, prompts[number], 3, 12)
        assert np.array_equal(done.logits, known.logits[0])
        wrong = Oracle(known.ids, 8, 3)
        tokens = generate(
            session,
            done.logits,
            lambda logits: int(logits.argmax()),
            end_ids=(),
            max_new_tokens=12,
            decoding=Decoding(drafts=wrong),
        )
        assert [next(tokens), next(tokens)] == known.ids[:2]
        tokens.close()


@pytest.mark.parametrize("k", [None, 3])
def test_the_context_is_filled_as_without_it(model: Model, prompts: list[Prompt], k: int | None) -> None:
    ends = []
    for lookup in (None, PromptLookup(prompts[0].ids, 16)):
        session = Session(model.backend, model.manifest)
        done = session.prefill(prompts[0], policy(k))
        tokens = generate(
            session, done.logits, lambda _: 40, end_ids=(), max_new_tokens=1000, decoding=Decoding(drafts=lookup)
        )
        ends.append((len(list(tokens)), session.length))
    assert ends[0] == ends[1]
    assert ends[0][1] == session.capacity - 1


def test_text_ends_at_the_same_stop_string_and_comes_in_the_same_pieces(model: Model) -> None:
    with model.open(random_image(1)) as conversation:
        whole = conversation.ask(QUESTIONS[0], max_new_tokens=TOKENS, ignore_eos=True).text
        stop = whole[len(whole) // 2 :][:3]
        options = {"max_new_tokens": TOKENS, "ignore_eos": True, "stop": stop}
        plain = list(conversation.stream(QUESTIONS[0], **options))
        stream = conversation.stream(QUESTIONS[0], prompt_lookup=8, **options)
        assert list(stream) == plain
        assert stream.answer.stopped == "stop"
        again = conversation.ask(QUESTIONS[0], max_new_tokens=TOKENS, ignore_eos=True, prompt_lookup=8)
    assert again.text == whole


def test_a_seed_draws_the_same_tokens_and_a_penalty_counts_them_alike(model: Model) -> None:
    with model.open(random_image(1)) as conversation:
        for drawn in ({"temperature": 0.2, "seed": 5}, {"repetition_penalty": 1.1}):
            options = {"max_new_tokens": TOKENS, "ignore_eos": True, **drawn}
            without = conversation.ask(QUESTIONS[1], **options)
            assert conversation.ask(QUESTIONS[1], prompt_lookup=8, **options).token_ids == without.token_ids


def test_a_chat_looks_its_earlier_turns_up(model: Model) -> None:
    answers = []
    for most in (0, 8):
        with model.open(random_image(1)) as conversation:
            turns = conversation.chat(3)
            asked = {"max_new_tokens": 12, "ignore_eos": True, "prompt_lookup": most}
            answers.append([turns.ask(question, **asked).token_ids for question in QUESTIONS])
    assert answers[0] == answers[1]


@pytest.mark.sampled(2)
def test_openvino_gives_the_same_answers(model: Model) -> None:
    pytest.importorskip("openvino")
    with load(model.bundle.folder, device="openvino", threads=THREADS) as other:
        for way in ("3", "mustdrop"):
            plain, drafted = asked(other, WAYS[way]), asked(other, WAYS[way], prompt_lookup=8)
            assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]


@pytest.mark.parametrize(("most", "message"), [(65, "at most 64"), (-1, "at least 0"), (True, "True")])
def test_a_length_that_is_none_is_refused(model: Model, most: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.ask("red?", prompt_lookup=most)
