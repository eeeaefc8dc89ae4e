"""Cancelling, deadlines, busy conversations: no answer is waited for without end, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.support.exported import QUESTIONS, Models
from tests.support.gated import WAIT, Gated, Hold
from tests.support.tiny import random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import MAX_PRIORITY, Options
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.api.turns import Request, Turns
from vtx.runtime.errors import ConversationBusyError, ModelClosedError, RequestError

OPTIONS = Options(max_new_tokens=12, ignore_eos=True)
LONG = Options(max_new_tokens=100, ignore_eos=True)
IMAGE = random_image(1)


@pytest.fixture(scope="module")
def plain(models: Models) -> Model:
    return models()


@pytest.fixture(scope="module")
def fresh(plain: Model) -> tuple[int, ...]:
    """The ids that the second question is answered with."""
    return plain.open(IMAGE).ask(QUESTIONS[1], 3, OPTIONS).token_ids


@pytest.fixture
def gated(plain: Model) -> Gated:
    return Gated(plain.backend)


@pytest.fixture
def model(plain: Model, gated: Gated) -> Model:
    return Model(plain.bundle, gated, 0.0)  # type: ignore[arg-type]


class Other:
    """Another thread that runs one call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(self._run(call)), daemon=True)
        self._thread.start()

    @staticmethod
    def _run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as e:
            return e

    def result(self) -> Any:
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the call never returned"
        return self._results[0]


def elsewhere(call: Callable[[], Any]) -> Any:
    return Other(call).result()


# --- cancelling -----------------------------------------------------------------------------------


def test_a_stream_is_cancelled_from_another_thread_within_one_token(
    model: Model, gated: Gated, fresh: tuple[int, ...]
) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, LONG)
    hold = gated.before = Hold("head", 4)
    reading = Other(stream.read)
    hold.wait()
    stream.cancel()
    hold.release()
    answer = reading.result()
    assert (answer.stopped, len(answer.token_ids)) == ("cancelled", 4)
    assert gated.calls.count("head") == 4
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == fresh


@pytest.mark.parametrize("at", ["vision", "stage 0", "stage 1", "stage 2"])
def test_a_prompt_is_cancelled_between_its_stages(model: Model, gated: Gated, fresh: tuple[int, ...], at: str) -> None:
    conversation = model.open([IMAGE, random_image(2)])
    stream = conversation.stream(QUESTIONS[2], 5, LONG)
    hold = gated.before = Hold(at)
    reading = Other(stream.read)
    hold.wait()
    stream.cancel()
    hold.release()
    answer = reading.result()
    assert (answer.stopped, answer.text, answer.token_ids, answer.stats.kv_slots) == ("cancelled", "", (), ())
    assert gated.calls[-1] == at
    assert gated.calls.count(at) == 1
    assert "head" not in gated.calls
    wanted = model.open([IMAGE, random_image(2)]).ask(QUESTIONS[1], 3, OPTIONS).token_ids
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == wanted


def test_a_paused_stream_is_cancelled_at_once_and_keeps_what_had_come(model: Model, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, LONG)
    piece = next(stream)
    elsewhere(stream.cancel)
    assert list(stream) == []
    assert (stream.answer.stopped, stream.answer.text) == ("cancelled", piece)
    assert elsewhere(lambda: conversation.ask(QUESTIONS[1], 3, OPTIONS)).token_ids == fresh


def test_a_step_during_which_the_stream_was_cancelled_ends_it(
    model: Model, gated: Gated, fresh: tuple[int, ...]
) -> None:
    """The answer is complete, and the conversation free for others, without a further step."""
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, LONG)
    stream.step()
    stream.step()
    hold = gated.before = Hold("head")
    stepping = Other(stream.step)
    hold.wait()
    stream.cancel()
    hold.release()
    stepping.result()
    assert stream.answer.stopped == "cancelled"
    assert elsewhere(lambda: conversation.ask(QUESTIONS[1], 3, OPTIONS)).token_ids == fresh


def test_a_stream_cancelled_before_it_is_read_runs_nothing(model: Model, gated: Gated) -> None:
    stream = model.open(IMAGE).stream(QUESTIONS[2], 5, LONG)
    stream.cancel()
    assert stream.read().stopped == "cancelled"
    assert gated.calls == []


def test_a_complete_answer_stays_complete_when_it_is_cancelled(model: Model) -> None:
    stream = model.open(IMAGE).stream(QUESTIONS[2], 5, OPTIONS)
    answer = stream.read()
    stream.cancel()
    assert stream.answer == answer
    assert answer.stopped == "length"


def test_a_question_that_waits_for_its_turn_is_cancelled(model: Model, gated: Gated) -> None:
    conversation = model.open(IMAGE)
    hold = gated.before = Hold("head", 2)
    first = Other(lambda: conversation.ask(QUESTIONS[2], 5, OPTIONS))
    hold.wait()
    waiting = conversation.stream(QUESTIONS[1], 3, OPTIONS)
    second = Other(waiting.read)
    waiting.cancel()
    assert second.result().stopped == "cancelled"
    hold.release()
    assert first.result().stopped == "length"


def test_a_cancelled_turn_does_not_count(model: Model) -> None:
    chat = model.open(IMAGE).chat(3)
    turn = chat.stream(QUESTIONS[2], OPTIONS)
    next(turn)
    turn.cancel()
    assert chat.messages == []
    wanted = model.open(IMAGE).chat(3).ask(QUESTIONS[1], OPTIONS)
    assert chat.ask(QUESTIONS[1], OPTIONS).token_ids == wanted.token_ids
    assert len(chat.messages) == 2


# --- deadlines ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time in seconds that deadlines see."""
    now = [0.0]
    monkeypatch.setattr("vtx.runtime.api.turns.monotonic", lambda: now[0])
    return now


def test_an_answer_ends_at_its_deadline_with_what_had_come(
    model: Model, gated: Gated, fresh: tuple[int, ...], clock: list[float]
) -> None:
    gated.before = lambda name: clock.__setitem__(0, clock[0] + (name == "head"))
    conversation = model.open(IMAGE)
    answer = conversation.ask(QUESTIONS[1], 3, OPTIONS, timeout=5)
    assert answer.stopped == "timeout"
    assert answer.token_ids == fresh[:5]
    assert len(answer.stats.kv_slots) == 8
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == fresh


def test_a_deadline_during_the_prompt_gives_an_empty_answer(model: Model, gated: Gated, clock: list[float]) -> None:
    gated.before = lambda name: clock.__setitem__(0, clock[0] + (name == "stage 1"))
    answer = model.open(IMAGE).ask(QUESTIONS[1], 5, OPTIONS, timeout=0.5)
    assert (answer.stopped, answer.token_ids, answer.stats.kv_bytes) == ("timeout", (), 0)
    assert gated.calls[-1] == "stage 1"


def test_an_answer_that_is_complete_at_its_deadline_counts_as_complete(
    model: Model, gated: Gated, clock: list[float]
) -> None:
    gated.before = lambda name: clock.__setitem__(0, clock[0] + (name == "head"))
    assert model.open(IMAGE).ask(QUESTIONS[1], 3, OPTIONS, timeout=11.5).stopped == "length"


def test_waiting_for_a_turn_counts_towards_the_deadline(model: Model, gated: Gated) -> None:
    conversation = model.open(IMAGE)
    hold = gated.before = Hold("head", 2)
    first = Other(lambda: conversation.ask(QUESTIONS[2], 5, OPTIONS))
    hold.wait()
    answer = conversation.ask(QUESTIONS[1], 3, OPTIONS, timeout=0.01)
    assert (answer.stopped, answer.token_ids) == ("timeout", ())
    hold.release()
    assert first.result().stopped == "length"


# --- busy conversations ---------------------------------------------------------------------------


def test_another_thread_is_told_at_once_that_a_stream_is_read(model: Model) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, OPTIONS)
    next(stream)
    error = elsewhere(lambda: conversation.ask(QUESTIONS[1], 3, OPTIONS))
    assert isinstance(error, ConversationBusyError)
    assert stream.read().stopped == "length"


def test_what_its_reader_asks_next_ends_a_stream(model: Model, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, OPTIONS)
    next(stream)
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == fresh
    assert list(stream) == []
    assert stream.answer.stopped == "cancelled"


def test_a_stream_whose_thread_has_ended_is_no_obstacle(model: Model, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)
    stream = conversation.stream(QUESTIONS[2], 5, OPTIONS)
    elsewhere(lambda: next(stream))
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == fresh
    assert stream.answer.stopped == "cancelled"


def test_a_stream_that_nobody_holds_any_more_frees_its_conversation(model: Model, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)
    gc.disable()
    try:
        next(conversation.stream(QUESTIONS[2], 5, OPTIONS))
        answer = elsewhere(lambda: conversation.ask(QUESTIONS[1], 3, OPTIONS))
    finally:
        gc.enable()
    assert answer.token_ids == fresh


def test_a_call_that_returns_by_itself_is_waited_for(model: Model, gated: Gated, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)
    hold = gated.before = Hold("head", 2)
    first = Other(lambda: conversation.ask(QUESTIONS[2], 5, OPTIONS))
    hold.wait()
    second = Other(lambda: conversation.ask(QUESTIONS[1], 3, OPTIONS))
    hold.release()
    assert first.result().stopped == "length"
    assert second.result().token_ids == fresh


def order_of(priorities: list[int]) -> list[int]:
    """The order in which calls of these priorities, which came one after the other, have the turn of an answer."""
    turns, order, arrived = Turns(), list[int](), threading.Semaphore(0)

    class Call(Request):
        def wait(self, condition: threading.Condition) -> None:
            arrived.release()
            super().wait(condition)

    def call(number: int) -> None:
        with turns.hold(Call(priority=priorities[number])):
            order.append(number)

    first, waiting = Request(), list[Other]()
    first.returns_by_itself = True
    with turns.hold(first):
        for number in range(len(priorities)):
            waiting.append(Other(lambda number=number: call(number)))
            assert arrived.acquire(timeout=WAIT)
    assert not any(each.result() for each in waiting)
    return order


def test_calls_that_wait_go_in_their_order_and_a_step_of_priority_is_worth_a_place() -> None:
    assert order_of([0] * 5) == [0, 1, 2, 3, 4]
    assert order_of([0, 0, 0, 0, 2]) == [0, 1, 2, 4, 3]
    assert order_of([-3, 0, 0, 0, 0]) == [1, 2, 0, 3, 4]
    assert order_of([0, 0, 10, 9]) == [2, 3, 0, 1]


def test_no_flood_of_high_priorities_keeps_a_call_waiting_for_more_than_twice_the_highest() -> None:
    order = order_of([-MAX_PRIORITY, *[MAX_PRIORITY] * 30])
    assert order.index(0) == 2 * MAX_PRIORITY - 1


def test_a_question_of_a_higher_priority_is_answered_before_an_earlier_one(
    model: Model, gated: Gated, monkeypatch: pytest.MonkeyPatch, fresh: tuple[int, ...]
) -> None:
    conversation, arrived, wait = model.open(IMAGE), threading.Semaphore(0), Request.wait
    monkeypatch.setattr(Request, "wait", lambda *given: (arrived.release(), wait(*given)))
    hold = gated.before = Hold("head", 2)
    first = Other(lambda: conversation.ask(QUESTIONS[2], 5, OPTIONS))
    hold.wait()
    computing, waiting = list[int](), list[Other]()

    def ask(priority: int) -> Answer:
        monkeypatch.setattr(threading.current_thread(), "priority", priority, raising=False)
        return conversation.ask(QUESTIONS[1], 3, OPTIONS, priority=priority)

    for priority in (0, 1, 9):
        waiting.append(Other(lambda priority=priority: ask(priority)))
        assert arrived.acquire(timeout=WAIT)
    gated.before = lambda _: computing.append(getattr(threading.current_thread(), "priority", -1))
    hold.release()
    assert first.result().stopped == "length"
    assert [other.result().token_ids for other in waiting] == [fresh] * 3
    assert [priority for priority, _ in groupby(computing)] == [-1, 9, 0, 1]


@pytest.mark.parametrize("wrong", [11, -11, 1.5, True, "high"])
def test_a_priority_that_is_none_is_refused(model: Model, wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"priority is .* it must be"):
        model.open().ask(QUESTIONS[1], priority=wrong)


def test_a_question_within_an_answer_of_the_same_thread_is_refused(model: Model, gated: Gated) -> None:
    conversation = model.open(IMAGE)
    errors = []

    def ask_within(name: str) -> None:
        if name == "head" and not errors:
            with pytest.raises(ConversationBusyError) as raised:
                conversation.ask(QUESTIONS[1], 3, OPTIONS)
            errors.append(raised)

    gated.before = ask_within
    assert conversation.ask(QUESTIONS[2], 5, OPTIONS).stopped == "length"
    assert len(errors) == 1


def test_closing_a_conversation_ends_the_answer_of_another_thread(
    model: Model, gated: Gated, fresh: tuple[int, ...]
) -> None:
    conversation = model.open(IMAGE)
    hold = gated.before = Hold("head", 3)
    first = Other(lambda: conversation.ask(QUESTIONS[2], 5, LONG))
    hold.wait()
    closing = Other(conversation.close)
    while not conversation._turns._holder.cancelled:  # type: ignore[union-attr]
        time.sleep(0)  # lets the closing thread come to its wait
    hold.release()
    assert first.result().stopped == "cancelled"
    assert closing.result() is None
    answer = conversation.ask(QUESTIONS[1], 3, OPTIONS)
    assert answer.token_ids == fresh
    assert not answer.stats.reused_image


def test_many_threads_that_ask_read_and_cancel_leave_a_sound_conversation(model: Model, fresh: tuple[int, ...]) -> None:
    conversation = model.open(IMAGE)

    def live(number: int) -> list[Answer | BaseException]:
        results: list[Answer | BaseException] = []
        for step in range(12):
            try:
                if (number + step) % 3:
                    results.append(conversation.ask(QUESTIONS[1], 3, OPTIONS))
                    continue
                stream = conversation.stream(QUESTIONS[2], 5, OPTIONS)
                next(stream)
                stream.cancel()
                results.append(stream.answer)
            except ConversationBusyError as e:
                results.append(e)
        return results

    threads = [Other(lambda number=number: live(number)) for number in range(6)]
    results = [result for thread in threads for result in thread.result()]
    assert len(results) == 72
    asked = [r for r in results if isinstance(r, Answer) and r.stopped != "cancelled"]
    assert all(r.token_ids == fresh for r in asked)
    assert asked
    assert conversation.ask(QUESTIONS[1], 3, OPTIONS).token_ids == fresh


# --- closing a model ------------------------------------------------------------------------------


def test_a_closed_model_says_so(model: Model, gated: Gated) -> None:
    closed = []
    gated.close = lambda: closed.append(True)  # type: ignore[attr-defined]
    with model:
        conversation = model.open(IMAGE)
        stream = conversation.stream(QUESTIONS[2], 5, LONG)
        next(stream)
    assert closed == [True]
    assert stream.answer.stopped == "cancelled"
    model.close()
    assert closed == [True]
    for call in (
        lambda: model.open(IMAGE),
        lambda: model.ask("Who?"),
        lambda: conversation.ask(QUESTIONS[1]),
        lambda: conversation.chat().ask(QUESTIONS[1]),
    ):
        with pytest.raises(ModelClosedError, match="load it again"):
            call()
    assert "closed" in repr(model)


# --- asyncio --------------------------------------------------------------------------------------


def test_an_answer_is_awaited_and_streamed(plain: Model, fresh: tuple[int, ...]) -> None:
    async def story() -> None:
        conversation = plain.open(IMAGE)
        stream = conversation.astream(QUESTIONS[1], 3, OPTIONS)
        with pytest.raises(RequestError, match="not complete"):
            _ = stream.answer
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.answer.text
        assert stream.answer.token_ids == fresh
        assert (await conversation.aask(QUESTIONS[1], 3, OPTIONS)).token_ids == fresh
        answers = await asyncio.gather(*(conversation.aask(QUESTIONS[1], 3, OPTIONS) for _ in range(4)))
        assert {answer.token_ids for answer in answers} == {fresh}
        chat = conversation.chat(3)
        assert (await chat.aask(QUESTIONS[1], OPTIONS)).token_ids == fresh
        turn = chat.astream(QUESTIONS[0], OPTIONS)
        assert "".join([piece async for piece in turn]) == turn.answer.text
        assert len(chat.messages) == 4

    asyncio.run(story())


def test_cancelling_the_task_cancels_the_answer(model: Model, gated: Gated, fresh: tuple[int, ...]) -> None:
    async def story() -> None:
        conversation = model.open(IMAGE)
        hold = gated.before = Hold("head", 3)
        task = asyncio.create_task(conversation.aask(QUESTIONS[2], 5, LONG))
        await asyncio.to_thread(hold.wait)
        task.cancel()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gated.calls.count("head") == 3
        assert (await conversation.aask(QUESTIONS[1], 3, OPTIONS)).token_ids == fresh

    asyncio.run(story())


def test_another_task_is_told_that_a_stream_is_read_until_its_task_is_done(
    plain: Model, fresh: tuple[int, ...]
) -> None:
    async def story() -> None:
        conversation = plain.open(IMAGE)
        stream = conversation.astream(QUESTIONS[2], 5, OPTIONS)
        await anext(stream)
        with pytest.raises(ConversationBusyError):
            await asyncio.create_task(conversation.aask(QUESTIONS[1], 3, OPTIONS))
        assert (await conversation.aask(QUESTIONS[1], 3, OPTIONS)).token_ids == fresh  # its own reader's next question
        assert stream.answer.stopped == "cancelled"

    asyncio.run(story())


def test_a_repr_says_what_a_stream_has_come_to(plain: Model) -> None:
    stream = plain.open(IMAGE).stream(QUESTIONS[1], 3, OPTIONS)
    assert isinstance(stream, AnswerStream)
    assert "not read to its end" in repr(stream)
    stream.read()
    assert "stopped: length" in repr(stream)
