"""K and reductions by the time that is left: the most accurate that makes it, by what answers took."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.json_files import write_json
from tests.support.serving import WAIT, until
from vtx.runtime.api.answer import Progress
from vtx.runtime.errors import RequestError
from vtx.runtime.scheduler.choosing import Allowed, Chooser, read_allowed
from vtx.runtime.scheduler.scheduler import Done, Event, Job, Scheduler, Terms, TooLateError

NONE, DEEP, EARLY = Allowed("none", None, "none", 0.84, 1000.0), Allowed("K = 5", 5, "none", 0.83, 600.0), Allowed(
    "K = 3", 3, "none", 0.81, 300.0
)  # fmt: skip


def answered(first_ms: float, tokens: int = 4, token_ms: float = 10.0) -> Any:
    stats = SimpleNamespace(timings_ms={"first_token": first_ms, "decode_per_token": token_ms})
    return SimpleNamespace(token_ids=(1,) * tokens, stats=stats)


def test_without_a_measurement_the_most_accurate_method_is_chosen() -> None:
    chosen = Chooser([EARLY, NONE, DEEP]).choose(600, 32, 0.4)
    assert chosen.method == NONE
    assert "nothing has been measured yet" in chosen.why


def test_the_most_accurate_method_that_makes_it_is_chosen_and_else_the_quickest() -> None:
    """Methods that have not run are judged by their FLOPs; answers are as long as recent ones."""
    chooser = Chooser([NONE, DEEP, EARLY])
    chooser.measured(NONE, 600, answered(600))  # the others: 360 and 180 ms; further tokens 30 ms
    for left, method in ((math.inf, NONE), (0.64, NONE), (0.62, DEEP), (0.38, EARLY), (0.21, EARLY), (0.1, EARLY)):
        assert chooser.choose(600, 256, left).method == method, left
    assert chooser.choose(600, 256, 0.4).why == "400 ms left; none takes about 630 ms, K = 5 about 390 ms"
    assert chooser.choose(600, 256, 0.1).why.endswith("K = 3 about 210 ms; none makes it, this is the quickest")
    assert chooser.choose(60, 256, 0.1).method == NONE, "the image is in the caches"
    assert chooser.choose(600, 1, 0.61).method == NONE, "no further token is asked for"
    chooser.measured(DEEP, 600, answered(200))
    assert chooser.choose(600, 256, 0.3).method == DEEP, "by its own time"
    for _ in range(30):
        chooser.measured(DEEP, 600, answered(900))
    assert chooser.choose(600, 256, 0.65).method == NONE, "times are those of recent answers"


def test_a_prompt_leaves_room_for_those_that_wait() -> None:
    chooser = Chooser([NONE, DEEP, EARLY])
    chooser.measured(NONE, 600, answered(600))
    chosen = chooser.choose(600, 256, 10.0, room=0.4)
    assert chosen.method == DEEP
    assert "400 ms of them for the prompt, as others wait" in chosen.why
    assert chooser.choose(600, 256, 10.0, room=0.0).method == EARLY


class Stream:
    """A stream of one token, whose prompt takes as long as the chosen method by the clock."""

    def __init__(self, seconds: float, clock: Clock, gate: threading.Event) -> None:
        self.answer: Any = answered(1000 * seconds, 1)
        self._seconds, self._clock, self._gate, self._stepped = seconds, clock, gate, False

    waiting = 0
    thought = ""

    def on_progress(self, beat: Any) -> None:
        pass

    def step(self) -> str:
        assert self._gate.wait(WAIT)
        if self._stepped:
            raise StopIteration
        self._stepped = True
        self._clock.now += self._seconds
        return "yes"

    def progress(self, start: int) -> Progress:
        return Progress((1,) * (1 - start))

    def cancel(self) -> None:
        self._stepped = True


SECONDS = {NONE: 1.0, DEEP: 0.6, EARLY: 0.3}


def loaded_queue(deadlines: list[float], allowed: list[Allowed]) -> tuple[list[str], int]:
    """The methods of requests that arrive together, and how many had their token in time."""
    clock, gate, chooser = Clock(), threading.Event(), Chooser(allowed)
    chooser.measured(allowed[0], 1000, answered(1000 * SECONDS[allowed[0]], 1))
    made, chosen, kept = Scheduler("test", 1, clock=clock), list[str](), list[bool]()
    ended = threading.Semaphore(0)

    def submit(ends_at: float) -> None:
        def begin() -> Any:
            method = chooser.choose(1000, 1, ends_at - job.begun, job.room).method
            chosen.append(method.name)
            return Stream(SECONDS[method], clock, gate)

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                kept.append(clock.now <= ends_at + 1e-6)
            if isinstance(event, Done | TooLateError):
                ended.release()

        job = Job(begin, lambda _: None, emit, Terms(ends_at, urgent=True))
        job.quickest = lambda: chooser.quickest(1000)
        made.submit(job)

    try:
        first = Job(lambda: Stream(0.0, clock, gate), lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
        made.submit(first)
        until(lambda: made.active == 1, "it holds the thread")
        for deadline in deadlines:
            submit(clock.now + deadline)
        gate.set()
        for _ in deadlines:
            assert ended.acquire(timeout=WAIT)
    finally:
        made.close()
    return chosen, sum(kept)


def test_k_rises_and_falls_with_the_queue_so_that_deadlines_are_kept() -> None:
    allowed = [NONE, DEEP, EARLY]
    assert loaded_queue([1.2], allowed) == (["none"], 1)
    assert loaded_queue([1.2, 1.2], allowed) == (["K = 5", "K = 5"], 2)
    assert loaded_queue([1.25] * 4, allowed) == (["K = 3"] * 4, 4)
    assert loaded_queue([1.2, 1.2, 9.0], allowed) == (["K = 5", "K = 5", "none"], 3)
    assert loaded_queue([1.2, 1.2], [NONE])[1] == 1, "without a choice the second comes too late"
    assert loaded_queue([1.2, 1.3, 1.4, 2.9, 3.9], [NONE]) == (["none"] * 3, 3), "two are refused and take no time"


def test_a_request_is_refused_only_if_the_quickest_method_does_not_make_it() -> None:
    """And not where nothing else is to be computed: what took long once need not do so again."""
    clock, chooser = Clock(), Chooser([NONE, EARLY])
    chooser.measured(NONE, 1000, answered(1000))
    made, gate, ended = Scheduler("test", 2, clock=clock), threading.Event(), threading.Semaphore(0)
    gate.set()

    def emit(event: Event) -> None:
        if isinstance(event, Done):
            ended.release()

    def job(seconds: float = 0.0, left: float = math.inf, *, adapts: bool = True) -> Job:
        stream: Any = Stream(seconds, clock, gate)
        made = Job(lambda: stream, lambda _: None, emit, Terms(clock.now + left, left < math.inf))
        if adapts:
            made.quickest = lambda: chooser.quickest(1000)
        return made

    try:
        made.submit(job(1.0))
        assert ended.acquire(timeout=WAIT)
        until(lambda: not made.active, "its time is known")
        made.submit(job(left=0.2, adapts=False))
        assert ended.acquire(timeout=WAIT)
        with pytest.raises(TooLateError):
            made.submit(job(left=0.0))
        gate.clear()
        made.submit(job())
        until(lambda: made.active == 1, "it holds the thread")
        with pytest.raises(TooLateError):
            made.submit(job(left=0.2))
        with pytest.raises(TooLateError):
            made.submit(job(left=0.5, adapts=False))
        made.submit(job(left=0.5))
        gate.set()
    finally:
        made.close()


def report(folder: Path, bundle: str, **changes: Any) -> Path:
    def method(allowed: Allowed) -> dict[str, Any]:
        figures = {"accuracy": {"value": allowed.figure, "low": None, "high": None}}
        return {
            "name": allowed.name, "k": allowed.k, "reduce": allowed.reduce, "flops": allowed.flops, "figures": figures,
        }  # fmt: skip

    content = {
        "format": "vtx-eval-1", "model": {"bundle": bundle}, "task": {"main": "accuracy", "shares": ["accuracy"]},
        "methods": [method(allowed) for allowed in (EARLY, NONE, DEEP)], **changes,
    }  # fmt: skip
    file = folder / "report.json"
    write_json(file, content)
    return file


def test_methods_of_a_report_within_the_drop_that_the_owner_allows(tmp_path: Path) -> None:
    file = report(tmp_path, "tiny")
    for drop, names in ((0.0, {NONE}), (1.0, {NONE, DEEP}), (3.1, {NONE, DEEP, EARLY})):
        bundle, allowed = read_allowed(file, drop + 1e-9)
        assert (bundle, {*allowed}) == ("tiny", names)
    other = report(tmp_path, "tiny", task={"main": "accuracy", "shares": []})  # a figure in units of its own
    assert len(read_allowed(other, 0.031 + 1e-9)[1]) == 3
    for changes, message in (
        ({"format": "x"}, "is not a report"),
        ({"methods": [{}]}, "damaged"),
        ({"methods": []}, "damaged"),
    ):
        with pytest.raises(RequestError, match=message):
            read_allowed(report(tmp_path, "tiny", **changes), 1.0)
    with pytest.raises(RequestError, match="not a report"):
        read_allowed(Path(__file__).with_name("absent") if False else _written(tmp_path, "[]"), 1.0)


def _written(folder: Path, text: str) -> Path:
    (folder / "other.json").write_text(text)
    return folder / "other.json"
