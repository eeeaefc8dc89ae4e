"""Requests with a deadline and a priority: what begins first, what is refused at once, and what comes at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.serving import WAIT, asking, held, serving, until, user
from vtx.runtime.api.answer import Progress
from vtx.runtime.scheduler.scheduler import Done, Event, Job, Scheduler, Terms, TooLateError
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import refusal_of


class Stream:
    """A stream of one token that notes its name once `go` is set."""

    def __init__(self, name: str, order: list[str], go: threading.Event, seconds: float = 0.0) -> None:
        self.answer: Any = name
        self._name, self._order, self._go, self._seconds, self._stepped = name, order, go, seconds, False

    def step(self) -> str:
        assert self._go.wait(WAIT)
        if self._stepped:
            raise StopIteration
        time.sleep(self._seconds)
        self._stepped = True
        self._order.append(self._name)
        return self._name

    waiting = 0
    thought = ""

    def on_progress(self, beat: Any) -> None:
        pass

    def progress(self, start: int) -> Progress:
        return Progress((1,) * (1 - start))

    def cancel(self) -> None:
        self._stepped = True


@contextmanager
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler("test", 1)
    try:
        yield made
    finally:
        made.close()


def test_the_nearest_end_begins_first_and_a_priority_moves_it() -> None:
    order: list[str] = []
    go, ended = threading.Event(), threading.Semaphore(0)

    def job(name: str, ends_in: float, priority: int = 0) -> Job:
        stream: Any = Stream(name, order, go)

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                ended.release()

        ends_at = time.monotonic() + ends_in
        return Job(lambda: stream, lambda _: None, emit, Terms(ends_at, limit=400, priority=priority))

    with scheduler() as made:
        made.submit(job("running", 600))
        until(lambda: made.active == 1, "the first begins")
        for each in (
            job("late", 600), job("soon", 30), job("sooner", 20), job("privileged", 600, 10), job("later", 601),
            job("put off", 600, -6), job("privileged but late", 1300, 10), job("between", 510),
        ):  # fmt: skip
            made.submit(each)
        go.set()
        for _ in range(9):
            assert ended.acquire(timeout=WAIT)
    last = ["late", "later", "put off", "privileged but late"]
    assert order == ["running", "sooner", "soon", "privileged", "between", *last]


@pytest.mark.parametrize("urgent", [False, True])
def test_no_flood_of_privileged_requests_or_near_deadlines_keeps_another_waiting_to_its_end(urgent: bool) -> None:
    """Of one that is answered a second, two wait at all times: of the highest priority, or with a deadline in 5 s."""
    clock, begun, flood, ended = Clock(), list[float](), list[Job](), threading.Event()
    start = clock.now

    class Second(Stream):
        def step(self) -> str:
            clock.now += 1
            return super().step()

    go = threading.Event()
    go.set()

    def begin() -> Any:
        begun.append(clock.now - start)
        return Second("patient", [], go)

    def emit(event: Event) -> None:
        if isinstance(event, Done):
            ended.set()

    def more(event: Event | None = None) -> None:
        if isinstance(event, Done | None) and len(flood) < 300 and not ended.is_set():
            stream: Any = Second("flood", [], go)
            limit, priority = (5, 0) if urgent else (100, 10)
            ends_at = clock.now + limit
            flood.append(Job(lambda: stream, lambda _: None, more, Terms(ends_at, urgent, limit, priority)))
            made.submit(flood[-1])

    made = Scheduler("test", 1, clock=clock)
    try:
        go.clear()
        more()
        until(lambda: made.active == 1, "the flood begins")
        made.submit(Job(begin, lambda _: None, emit, Terms(clock.now + 100, limit=100)))
        more()
        more()
        go.set()
        assert ended.wait(WAIT)
    finally:
        made.close()
    assert 10 < begun[0] <= 60, "after those that passed it, and well before its end"


def test_an_urgent_request_that_cannot_make_it_is_refused_at_once() -> None:
    """By the time that recent answers took: 0.2 s each, three of which are ahead of it."""
    order: list[str] = []
    go, ended = threading.Event(), threading.Semaphore(0)

    def job(ends_in: float, *, urgent: bool = False) -> Job:
        stream: Any = Stream("a", order, go, 0.2)

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                ended.release()

        return Job(lambda: stream, lambda _: None, emit, Terms(time.monotonic() + ends_in, urgent))

    with scheduler() as made:
        made.submit(job(0.01, urgent=True))  # nothing is known yet
        go.set()
        assert ended.acquire(timeout=WAIT)
        go.clear()
        for _ in range(3):
            made.submit(job(1.0))
        with pytest.raises(TooLateError, match=r"the answer would end after about") as late:
            made.submit(_behind(job(0.3, urgent=True)))
        made.submit(_behind(job(600, urgent=True)))
        go.set()
    refused = refusal_of(late.value)
    assert refused.status == 429
    assert refused.retry_after
    assert refused.headers["x-should-retry"] == "false"


def test_admission_counts_the_whole_answer_by_its_expected_length() -> None:
    """Recent answers had 10 tokens of a second each: one with 5 s left is refused unless it may have few tokens."""
    clock, go, ended = Clock(), threading.Event(), threading.Event()

    class Tokens(Stream):
        def __init__(self, tokens: int) -> None:
            super().__init__("a", [], go)
            self.left, self.tokens = tokens, tokens

        def step(self) -> str:
            assert go.wait(WAIT)
            if not self.left:
                raise StopIteration
            self.left -= 1
            clock.now += 1
            return "a"

        def progress(self, start: int) -> Progress:
            return Progress((1,) * (self.tokens - self.left - start))

    def job(tokens: int, ends_in: float, *, urgent: bool) -> Job:
        stream: Any = Tokens(tokens)
        emit = lambda event: ended.set() if isinstance(event, Done) else None  # noqa: E731
        ends_at = clock.now + ends_in
        return Job(lambda: stream, lambda _: None, emit, Terms(ends_at, urgent, tokens=tokens))

    made = Scheduler("test", 2, clock=clock)
    try:
        made.submit(job(10, 1000, urgent=False))
        go.set()
        assert ended.wait(WAIT)
        until(lambda: made.active == 0, "it has ended")
        go.clear()
        made.submit(job(10, 1000, urgent=False))
        with pytest.raises(TooLateError, match="after about 10"):
            made.submit(job(10, 5, urgent=True))
        made.submit(job(2, 5, urgent=True))
        made.submit(job(10, 60, urgent=True))
        go.set()
    finally:
        made.close()


QUEUE = Limits(parallel=1, queue=2)


def test_a_full_queue_refuses_the_least_important_and_of_these_the_latest(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, QUEUE) as served:
        bodies = [asking(user("red?"), priority=priority, max_tokens=2) for priority in (-10, 0, 10)]
        with held(served):
            running = served.open_chat(asking(user("red?"), max_tokens=100))
            served.until_active(1, "the first is computed")
            least = served.open_chat(bodies[0], Connection="close")
            until(lambda: served.metrics()["vtx_requests_waiting"] == 1, "it waits")
            middle = served.open_chat(bodies[1], Connection="close")
            until(lambda: served.metrics()["vtx_requests_waiting"] == 2, "the queue is full")
            assert served.chat(bodies[0]).status == 429, "the latest of the least important"
            most = served.open_chat(bodies[2], Connection="close")
            reply = b""
            while part := least.recv(1 << 16):
                reply += part
            assert b" 429 " in reply
            assert b"queue_full" in reply
            assert served.chat(bodies[1]).status == 429, "the latest of equal ones"
        for connection in (middle, most):
            assert b" 200 " in connection.recv(20)
        for connection in (running, least, middle, most):
            connection.close()


def _behind(job: Job) -> Job:
    """As one that arrived after the others with the same end."""
    job.order += 10
    return job


def test_at_its_deadline_an_answer_ends_as_it_is(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        served.chat(asking(user("red?"), max_tokens=2))
        whole = served.chat(asking(user("red?"), max_tokens=200, ignore_eos=True)).json
        started = time.monotonic()
        year = served.chat(asking(user("red?"), max_tokens=2, deadline_ms=365 * 86_400_000, priority=10))
        assert year.status == 200
        for stream in (False, True):
            response = served.chat(
                asking(user("red?"), max_tokens=200, ignore_eos=True, deadline_ms=60, stream=stream,
                       **({"stream_options": {"include_usage": True}} if stream else {}))
            )  # fmt: skip
            if response.status != 200:  # a machine so busy that the first token did not come in time
                assert response.status in (408, 429)
                assert response.headers["x-should-retry"] == "false"
                continue
            last = response.events[-1] if stream else response.json
            choices = response.events[-2]["choices"] if stream else last["choices"]
            assert choices[0]["finish_reason"] == "length"
            if last["usage"]["vtx"]["stopped"] == "timeout":
                text = response.text if stream else choices[0]["message"]["content"]
                assert whole["choices"][0]["message"]["content"].startswith(text.rstrip("\ufffd"))
        assert time.monotonic() - started < WAIT


@pytest.mark.parametrize("value", [-1, 1.5, "soon", True])
def test_deadlines_and_priorities_that_are_none_are_refused_by_name(tiny_bundle: Path, value: Any) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        for field, wrong in (("deadline_ms", value), ("priority", 11 if value == -1 else value)):
            response = served.chat(asking(user("red?"), **{field: wrong}))
            assert response.status == 400
            assert response.json["error"]["param"] == field


def test_a_deadline_of_nothing_is_refused_at_once(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, Limits()) as served:
        response = served.chat(asking(user("red?"), deadline_ms=0))
        assert response.status in (408, 429)
        assert response.headers["x-should-retry"] == "false"
        assert served.chat(asking(user("red?"), max_tokens=2)).status == 200
