"""Questions, streams and turns over one loaded bundle: each as if it had been the only one."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.support.exported import KS, QUESTIONS, Models
from tests.support.fixtures import References
from tests.support.gated import WAIT
from tests.support.near import assert_near
from tests.support.tiny import Message, Tiny, prompt_messages, random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options

TOLERANCE = 1e-4
STEPS = 12
OPTIONS = Options(max_new_tokens=STEPS, ignore_eos=True)
DEPTHS = (None, *KS)
IMAGE, OTHER = random_image(1), random_image(2, (40, 90))


class Recorder:
    """A backend that keeps the logits of every row it has given."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.logits: list[NDArray[np.float32]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def head(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        self.logits.append(self._backend.head(rows)[0])
        return self.logits[-1][None]

    def take(self) -> NDArray[np.float32]:
        """The logits since the last call, [tokens, vocab]."""
        taken = np.stack(self.logits)
        self.logits = []
        return taken


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


@pytest.fixture(scope="module")
def recorded(model: Model) -> tuple[Model, Recorder]:
    recorder = Recorder(model.backend)
    return Model(model.bundle, recorder, 0.0), recorder


@pytest.fixture(scope="module")
def fresh(recorded: tuple[Model, Recorder]) -> dict[tuple[str, int | None], tuple[Answer, NDArray[np.float32]]]:
    """Answer and logits of a fresh run for each question and K."""
    model, recorder = recorded
    found = {}
    for question in QUESTIONS:
        for k in DEPTHS:
            with model.open(IMAGE) as conversation:
                found[question, k] = conversation.ask(question, k, OPTIONS), recorder.take()
    return found


# --- questions one after another ------------------------------------------------------------------


def test_later_questions_reuse_the_image_and_equal_fresh_runs(
    recorded: tuple[Model, Recorder], fresh: dict[Any, Any]
) -> None:
    model, recorder = recorded
    with model.open(IMAGE) as conversation:
        for number, (question, k) in enumerate([(q, k) for k in (None, 8, 2, 5, None, 3) for q in QUESTIONS]):
            answer = conversation.ask(question, k, OPTIONS)
            wanted, logits = fresh[question, k]
            assert answer.stats.reused_image == (number > 0)
            assert (answer.stats.timings_ms["vision"] == 0) == (number > 0)
            assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
            assert (answer.stats.kv_slots, answer.stats.kv_bytes) == (wanted.stats.kv_slots, wanted.stats.kv_bytes)
            assert np.array_equal(recorder.take(), logits)


@pytest.mark.sampled
@pytest.mark.parametrize("k", DEPTHS)
def test_one_image_and_two_in_turn_answer_as_the_reference(model: Model, reference: References, k: int | None) -> None:
    judge = reference(Tiny())
    with model.open([IMAGE, OTHER]) as both, model.open(IMAGE) as one:
        for _ in range(2):
            for conversation, images in ((both, [IMAGE, OTHER]), (one, [IMAGE])):
                inputs = judge.inputs(prompt_messages(QUESTIONS[1], len(images)), images)
                answer = conversation.ask(QUESTIONS[1], k, OPTIONS)
                assert list(answer.token_ids) == judge.greedy(inputs, k, STEPS, guess=answer.token_ids).ids
                assert list(answer.stats.kv_slots) == judge.kv_slots(inputs, k)


def test_the_order_of_two_images_matters(model: Model) -> None:
    orders = ([IMAGE, OTHER], [OTHER, IMAGE])
    one, other = (model.open(images).ask(QUESTIONS[1], None, OPTIONS).token_ids for images in orders)
    assert one != other


def test_closing_frees_the_caches_and_starts_afresh(model: Model, fresh: dict[Any, Any]) -> None:
    conversation = model.open(IMAGE)
    conversation.ask(QUESTIONS[0], 3, OPTIONS)
    session = conversation._session
    caches = [weakref.ref(segment.cache) for segment in session.caches.segments.values()]
    del session
    assert len(caches) == 5
    conversation.close()
    gc.collect()
    assert not any(cache() for cache in caches)
    answer = conversation.ask(QUESTIONS[0], 3, OPTIONS)
    assert not answer.stats.reused_image
    assert answer.token_ids == fresh[QUESTIONS[0], 3][0].token_ids


# --- streams --------------------------------------------------------------------------------------


def test_streamed_pieces_make_up_the_text(model: Model, fresh: dict[Any, Any]) -> None:
    counts = []
    with model.open(IMAGE) as conversation:
        for (question, k), (wanted, _) in fresh.items():
            stream = conversation.stream(question, k, OPTIONS)
            pieces = list(stream)
            assert "".join(pieces) == stream.answer.text == wanted.text
            assert all(pieces)
            counts.append(len(pieces))
    assert max(counts) > 5


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("tokenizer", ["metaspace", "bytes"])
@pytest.mark.parametrize("k", DEPTHS)
def test_turns_equal_one_prompt_with_the_whole_history(
    models: Models, reference: References, k: int | None, tokenizer: Any
) -> None:
    tiny = Tiny(tokenizer=tokenizer)
    loaded, judge = models(tiny), reference(tiny)
    recorder = Recorder(loaded.backend)
    with Model(loaded.bundle, recorder, 0.0).open(IMAGE) as conversation:
        chat = conversation.chat(k)
        for number, question in enumerate(QUESTIONS):
            turns: list[Message] = [*chat.messages, *prompt_messages(question, int(not number))]  # type: ignore[list-item]
            inputs = judge.inputs(turns, [IMAGE])
            answer = chat.ask(question, OPTIONS)
            wanted = judge.greedy(inputs, k, STEPS, guess=answer.token_ids)
            assert wanted.margin > 2 * TOLERANCE
            assert list(answer.token_ids) == wanted.ids
            assert_near(recorder.take(), wanted.logits, TOLERANCE)
            assert list(answer.stats.kv_slots) == judge.kv_slots(inputs, k)
            assert answer.stats.prompt_tokens == inputs["input_ids"].shape[1]
            assert answer.stats.reused_image == (number > 0)
            assert answer.stats.k == k


# --- threads and endurance ------------------------------------------------------------------------


@pytest.mark.slow
def test_many_threads_over_one_model_answer_as_one(model: Model, fresh: dict[Any, Any]) -> None:
    start = threading.Barrier(8)

    def talk(number: int) -> list[bool]:
        start.wait(WAIT)
        with model.open(IMAGE) as conversation:
            asked = [(QUESTIONS[(number + i) % 3], DEPTHS[(number * i) % 5]) for i in range(8)]
            return [conversation.ask(q, k, OPTIONS).token_ids == fresh[q, k][0].token_ids for q, k in asked]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(right) for right in pool.map(talk, range(8)))


@pytest.mark.slow
def test_a_thousand_questions_leave_memory_flat_and_ids_the_same(model: Model) -> None:
    process, options = psutil.Process(), Options(max_new_tokens=6, ignore_eos=True)
    seen: dict[Any, tuple[int, ...]] = {}
    resident = 0
    lasting = model.open(IMAGE)
    for number in range(1000):
        question, k = QUESTIONS[number % 3], DEPTHS[number // 3 % 5]
        if number % 4:
            answer = lasting.ask(question, k, options)
        else:
            with model.open(IMAGE) as conversation:
                answer = conversation.ask(question, k, options)
        assert seen.setdefault((question, k), answer.token_ids) == answer.token_ids
        if number == 100:
            gc.collect()
            resident = process.memory_info().rss
    gc.collect()
    assert process.memory_info().rss - resident < 4 << 20
