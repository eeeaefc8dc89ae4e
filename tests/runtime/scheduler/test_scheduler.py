"""Answers computed in turn: what runs when, how many at a time, and how they end."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.clock import Clock
from tests.support.serving import WAIT, until
from vtx.runtime.api.answer import Progress
from vtx.runtime.scheduler.scheduler import JOINING, ClosedError, Done, Event, Job, Piece, Scheduler, Terms


class Script:
    """A stream that writes its name into `order` at each of its steps. It can wait before the first, or fail at one."""

    def __init__(
        self, name: str, tokens: int, order: list[str], gate: threading.Event | None = None, fails: int = 0
    ) -> None:
        self.name, self.answer = name, f"the answer of {name}"
        self._tokens, self._order, self._gate, self._fails = tokens, order, gate, fails
        self._steps = 0

    def step(self) -> str:
        if self._gate is not None:
            assert self._gate.wait(WAIT)
        if self._steps == self._tokens:
            raise StopIteration
        self._steps += 1
        self._order.append(self.name)
        if self._steps == self._fails:
            raise RuntimeError(self.name)
        return self.name

    waiting = 0
    thought = ""

    def on_progress(self, beat: Any) -> None:
        self._beat = beat

    def progress(self, start: int) -> Progress:
        return Progress(tuple(range(start, self._steps)))

    def cancel(self) -> None:
        self._tokens = self._steps


class Client:
    """A job and what it was told."""

    def __init__(self, script: Script) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.kept: list[bool] = []
        stream: Any = script
        self.job = Job(lambda: stream, self.kept.append, self.emit)

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Piece):
            self.ended.set()


@contextmanager
def scheduler(parallel: int) -> Iterator[Scheduler]:
    made = Scheduler("test", parallel)
    try:
        yield made
    finally:
        made.close()


def run(parallel: int, *lengths: int) -> list[str]:
    """The order of steps of jobs a, b, c, ... of these lengths that were all there at the beginning."""
    order, gate = list[str](), threading.Event()
    names = "abcdefgh"[: len(lengths)]
    clients = [Client(Script(name, n, order, gate)) for name, n in zip(names, lengths, strict=True)]
    with scheduler(parallel) as made:
        for client in clients:
            made.submit(client.job)
        gate.set()
        assert all(client.ended.wait(WAIT) for client in clients)
    assert [client.kept for client in clients] == [[True]] * len(clients)
    return order


def test_a_short_answer_is_not_blocked_by_a_long_one() -> None:
    order = run(2, 50, 3)
    assert order.index("b") <= 2
    assert order[:8].count("b") == 3, "a token of each in turn"


def test_one_prompt_begins_in_a_round() -> None:
    """Between two prompts, which take long, those that run get a token each."""
    assert "".join(run(4, 9, 9, 9, 9)).startswith("a" + "ab" + "abc" + "abcd" + "abcd")


def test_no_more_run_than_may_and_the_rest_follow_in_their_order() -> None:
    order = run(2, 4, 4, 4, 4)
    assert max(order.index("a"), order.index("b")) < order.index("c") < order.index("d")
    assert order.index("c") > min(len(order) - 1 - order[::-1].index(name) for name in "ab")


def test_an_urgent_request_is_tried_if_nothing_else_is_to_be_done() -> None:
    """Whatever earlier answers took: times that were once long would else refuse all that come."""
    stream: Any = Script("a", 2, [])
    client = Client(stream)
    client.job = Job(lambda: stream, client.kept.append, client.emit, Terms(time.monotonic() + WAIT, urgent=True))
    with scheduler(1) as made, patch.object(made, "_prompt_seconds", 10 * WAIT):
        made.submit(client.job)
        assert client.ended.wait(WAIT)
    assert isinstance(client.events[-1], Done)


def test_what_fails_ends_alone_and_is_not_kept() -> None:
    order: list[str] = []
    good, bad = Client(Script("a", 6, order)), Client(Script("b", 6, order, fails=2))
    with scheduler(2) as made:
        made.submit(good.job)
        made.submit(bad.job)
        assert good.ended.wait(WAIT)
        assert bad.ended.wait(WAIT)
    assert isinstance(good.events[-1], Done)
    assert isinstance(bad.events[-1], Exception)
    assert (good.kept, bad.kept) == ([True], [False])


@pytest.mark.parametrize("kept", [True, False])
def test_what_cannot_be_given_back_ends_its_own_request_only(kept: bool) -> None:
    """Whether the answer was complete or had failed."""
    order: list[str] = []
    bad, good = Client(Script("a", 2, order, fails=0 if kept else 1)), Client(Script("b", 4, order))
    given: list[bool] = []

    def end(keep: bool) -> None:
        given.append(keep)
        raise RuntimeError("no room")

    stream: Any = Script("a", 2, order, fails=0 if kept else 1)
    bad.job = Job(lambda: stream, end, bad.emit)
    with scheduler(2) as made:
        for client in (bad, good):
            made.submit(client.job)
            assert client.ended.wait(WAIT)
        assert isinstance(bad.events[-1], Exception)
        assert str(bad.events[-1]) == ("no room" if kept else "a")
        assert given == [kept], "given back once"
        assert isinstance(good.events[-1], Done)
        assert made.silence < WAIT


def test_an_answer_whose_tokens_cannot_be_told_ends_alone() -> None:
    order: list[str] = []
    bad, good = Client(Script("a", 3, order)), Client(Script("b", 3, order))
    failing: Any = Script("a", 3, order)
    failing.progress = lambda _: 1 / 0
    bad.job = Job(lambda: failing, bad.kept.append, bad.emit)
    with scheduler(2) as made:
        for client in (bad, good):
            made.submit(client.job)
            assert client.ended.wait(WAIT)
    assert (bad.kept, good.kept) == ([False], [True])
    assert isinstance(bad.events[-1], Exception)


def test_a_client_that_cannot_be_told_anything_harms_nobody() -> None:
    order: list[str] = []
    stream: Any = Script("a", 3, order)
    given: list[bool] = []
    deaf = Job(lambda: stream, given.append, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    good = Client(Script("b", 3, order))
    with scheduler(2) as made:
        made.submit(deaf)
        made.submit(good.job)
        assert good.ended.wait(WAIT)
    assert given == [False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_fails_what_waits_and_is_known_to_be_dead() -> None:
    order, gate = list[str](), threading.Event()
    killed: Any = Script("a", 3, order, gate)
    killed.progress = lambda _: sys.exit()
    first, waiting = Client(killed), Client(Script("b", 3, order))
    with scheduler(1) as made:
        assert made.silence < WAIT
        made.submit(first.job)
        made.submit(waiting.job)
        gate.set()
        assert waiting.ended.wait(WAIT)
        assert isinstance(waiting.events[-1], Exception)
        assert made.silence == math.inf
        with pytest.raises(ClosedError):
            made.submit(waiting.job)


def test_a_thread_without_work_gives_signs_of_life() -> None:
    with scheduler(1) as made:
        clock = Clock()
        made.heartbeat.clock, made.heartbeat.last = clock, clock.now - 1000
        until(lambda: made.silence == 0, "an idle thread beats")


def test_closing_does_not_wait_for_ever_for_a_run_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtx.runtime.scheduler.scheduler.CLOSE_SECONDS", 0.05)
    gate = threading.Event()
    client = Client(Script("a", 1, [], gate))
    made = Scheduler("test", 1)
    made.submit(client.job)
    until(lambda: made.waiting == 0, "it runs")
    assert not made.close()
    gate.set()
    assert client.ended.wait(WAIT)
    assert made.close()


def test_a_job_that_cannot_begin_ends_with_its_error() -> None:
    told: list[Event] = []
    ended = threading.Event()

    def emit(event: Event) -> None:
        told.append(event)
        ended.set()

    def begin() -> Any:
        raise ValueError("no")

    with scheduler(1) as made:
        made.submit(Job(begin, lambda _: None, emit))
        assert ended.wait(WAIT)
    assert isinstance(told[0], Exception)
    assert str(told[0]) == "no"


def test_a_cancelled_job_is_given_back_after_at_most_one_step() -> None:
    order, gate = list[str](), threading.Event()
    client = Client(Script("a", 1000, order, gate))
    with scheduler(1) as made:
        made.submit(client.job)
        client.job.cancel()
        gate.set()
        other = Client(Script("b", 1, order))
        made.submit(other.job)
        assert other.ended.wait(WAIT)
    assert order.count("a") <= 1


def test_a_job_that_is_cancelled_while_it_waits_does_not_begin() -> None:
    order, gate, begun = list[str](), threading.Event(), list[str]()
    first, last = Client(Script("a", 2, order, gate)), Client(Script("c", 1, order))
    waiting: Any = Script("b", 2, order)
    job = Job(lambda: begun.append("b") or waiting, lambda _: None, lambda _: None)  # type: ignore[func-returns-value]
    with scheduler(1) as made:
        for one in (first.job, job, last.job):
            made.submit(one)
        job.cancel()
        gate.set()
        assert last.ended.wait(WAIT)
    assert (begun, order) == ([], ["a", "a", "c"])


def test_closing_ends_what_runs_and_what_waits() -> None:
    order, gate = list[str](), threading.Event()
    running, waiting = Client(Script("a", 10**9, order, gate)), Client(Script("b", 1, order))
    made = Scheduler("test", 1)
    made.submit(running.job)
    gate.set()
    made.submit(waiting.job)
    made.close()
    for client in (running, waiting):
        assert client.ended.is_set()
    assert isinstance(waiting.events[-1], Exception)
    with pytest.raises(ClosedError, match="is ending"):
        made.submit(waiting.job)


class Chunks(Script):
    """A stream whose prompt has chunks, written into `order` in capitals; before each of them its scheduler is called.

    `during` is done within the first chunk, by which the clock goes forward as by every chunk and token.
    """

    def __init__(self, name: str, chunks: int, tokens: int, order: list[str], clock: Clock, **more: Any) -> None:
        super().__init__(name, tokens, order, more.get("gate"))
        self._chunks, self._clock, self._during = chunks, clock, more.get("during", lambda: None)
        self._seconds = more.get("seconds", 1.0)

    def step(self) -> str:
        for number in range(self._chunks if not self._steps else 0):
            self._beat()
            self._order.append(self.name.upper())
            self._clock.now += self._seconds
            if not number:
                self._during()
        self._clock.now += 1
        return super().step()


def chunked(parallel: int, *streams: tuple[str, int, int, float, float], late: tuple[Any, ...] = ()) -> str:
    """The order of chunks and tokens of streams: name, chunks, tokens, seconds of a chunk, end. `late` comes last.

    That one is submitted within the first chunk of the one before it.
    """
    order, gate, clock, clients = list[str](), threading.Event(), Clock(), list[Client]()
    made = Scheduler("test", parallel, clock=clock)
    for name, chunks, tokens, seconds, end in reversed((*streams, *late)):
        during = (lambda: made.submit(clients[0].job)) if late and len(clients) == 1 else lambda: None
        client = Client(Chunks(name, chunks, tokens, order, clock, gate=gate, seconds=seconds, during=during))
        client.job.terms = Terms(end)
        client.job.order = end
        clients.append(client)
    try:
        for client in reversed(clients[len(late) :]):
            made.submit(client.job)
        gate.set()
        assert all(client.ended.wait(WAIT) for client in clients)
        assert all(isinstance(client.events[-1], Done) for client in clients)
    finally:
        made.close()
    return "".join(order)


def test_no_answer_waits_for_more_than_one_chunk_of_a_prompt() -> None:
    order = chunked(3, ("a", 0, 9, 1, 1), ("b", 0, 9, 1, 2), ("c", 4, 2, 5, 3))
    assert "CabCabCabC" in order, "a token of each before the next chunk"
    assert "CC" not in order


def test_chunks_that_are_quicker_than_a_round_do_not_have_one_each() -> None:
    """Else a prompt of many small chunks would wait for more tokens than it takes itself."""
    order = chunked(3, ("a", 0, 20, 1, 1), ("b", 0, 20, 1, 2), ("c", 8, 2, 0.5, 3))
    assert "CCCCabCCCC" in order


class Timed(Chunks):
    """A stream whose steps take these seconds."""

    def __init__(self, name: str, order: list[str], clock: Clock, gate: threading.Event, *seconds: float) -> None:
        super().__init__(name, 0, len(seconds) - 1, order, clock, gate=gate)
        self._left = [*seconds]

    def step(self) -> str:
        after = self._clock.now + self._left.pop(0)
        try:
            return super().step()
        finally:
            self._clock.now = after


def test_a_first_token_that_takes_no_time_is_no_measure_of_a_round() -> None:
    """Its logits are the prompt's. Else it would be decoded alone before each chunk of the next prompts."""
    order, gate, clock = list[str](), threading.Event(), Clock()
    a, b = Timed("a", order, clock, gate, 1, 1, 0), Timed("b", order, clock, gate, 1, 0, 1, 1, 1)
    clients = [Client(stream) for stream in (a, b, Chunks("c", 3, 2, order, clock, gate=gate, seconds=0.1))]
    made = Scheduler("test", 3, clock=clock)
    try:
        for client in clients:
            made.submit(client.job)
        gate.set()
        assert all(client.ended.wait(WAIT) for client in clients)
    finally:
        made.close()
    assert "".join(order) == "aabbCCCcbcb"


def test_a_prompt_whose_end_is_nearer_is_computed_between_the_chunks_of_another() -> None:
    streams = (("a", 0, 9, 1.0, 1.0), ("b", 3, 2, 5.0, 9.0))
    sooner = chunked(3, *streams, late=(("c", 2, 3, 5.0, 5.0),))
    assert sooner.replace("a", "").startswith("BCC")
    assert "CC" not in sooner, "within the other prompt, a still has its tokens"
    later = chunked(3, *streams, late=(("c", 2, 3, 5.0, 9.5),))
    assert later.replace("a", "").startswith("BBBbbCC")
    assert chunked(2, *streams, late=(("c", 2, 3, 5.0, 5.0),)).replace("a", "").startswith("BBBb"), "there is no room"


def test_a_job_waits_until_it_fits_unless_nothing_else_runs() -> None:
    order, gate = list[str](), threading.Event()
    first, second = Client(Script("a", 4, order, gate)), Client(Script("b", 4, order))
    with scheduler(2) as made:
        for client in (first, second):
            client.job.fits = lambda: False
            made.submit(client.job)
        gate.set()
        assert all(client.ended.wait(WAIT) for client in (first, second))
    assert order == [*"aaaabbbb"]


def test_a_prompt_that_fails_or_is_cancelled_inside_of_another_ends_alone() -> None:
    order, clock, ended = list[str](), Clock(), list[Client]()
    made = Scheduler("test", 3, clock=clock)
    bad, left = Client(Script("c", 2, order, fails=1)), Client(Script("d", 2, order))

    def arrive() -> None:
        for client in (bad, left):
            client.job.order = 0
            made.submit(client.job)
        left.job.cancel()

    good = Client(Chunks("b", 3, 2, order, clock, during=arrive))
    good.job.order = 1
    try:
        made.submit(good.job)
        for client in (good, bad):
            assert client.ended.wait(WAIT)
            ended.append(client)
    finally:
        made.close()
    assert isinstance(good.events[-1], Done)
    assert isinstance(bad.events[-1], RuntimeError)
    assert "".join(order) == "BcBBbb"


class Waiting(Script):
    """A stream whose prompt's end waits after the first step: two of them fill a round."""

    @property
    def waiting(self) -> int:  # type: ignore[override]
        return JOINING // 2 + 1 if self._steps == 1 else 0


def test_prompts_whose_ends_wait_begin_beside_each_other_until_the_round_is_full() -> None:
    order, gate = list[str](), threading.Event()
    clients = [Client(Script("a", 3, order, gate)), *(Client(Waiting(name, 3, order, gate)) for name in "bcde")]
    with scheduler(8) as made:
        for client in clients:
            made.submit(client.job)
        gate.set()
        for client in clients:
            assert client.ended.wait(WAIT)
    assert "".join(order) == "aabcabcdebcdede"
