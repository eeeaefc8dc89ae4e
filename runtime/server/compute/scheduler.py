"""One thread a model that computes its answers by rounds, a token each, so that no long answer blocks a short one."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.errors import VtxError
from vtx.runtime.server.compute.heartbeat import IDLE_SECONDS, Heartbeat
from vtx.runtime.server.refusal import Refusal

CLOSE_SECONDS = 10.0  # for a run of a graph to end before the server does
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with one more token, and the tokens since the last piece."""

    text: str
    progress: Progress


@dataclass(frozen=True, slots=True)
class Done:
    """The end: the complete answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end: what went wrong."""

    error: Exception


def shutting_down() -> Refusal:
    return Refusal(503, "the server is shutting down", kind="server_error", retry_after=5)


Event: TypeAlias = Piece | Done | Failed


class Job:
    """One request. `begin` gives its stream, `end` takes back what that was computed with; both in the thread that
    computes, as `emit`, which gets each event.
    """

    def __init__(
        self, begin: Callable[[], AnswerStream], end: Callable[[bool], None], emit: Callable[[Event], None]
    ) -> None:
        self._begin, self._end, self._emit = begin, end, emit
        self._stream: AnswerStream | None = None
        self._told = 0
        self.cancelled = False

    @property
    def stream(self) -> AnswerStream | None:
        """Its answer, from its beginning on."""
        return self._stream

    def cancel(self) -> None:
        """End it, from any thread: within one token, or before the prompt's next stage."""
        self.cancelled = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def begin(self) -> bool:
        """Take what it is computed with; False where that fails or it was cancelled while it waited."""
        if self.cancelled:
            return False
        try:
            self._stream = self._begin()
        except Exception as e:
            self._fail(e)
            return False
        return True

    def step(self) -> bool:
        """Compute the prompt, or one token more; False at the end."""
        stream, ended = self._stream, False
        assert stream is not None
        try:
            if self.cancelled:  # maybe while it began
                stream.cancel()
            try:
                text = stream.step()
            except StopIteration:
                answer, ended = stream.answer, True
                self._end(True)
                self._emit(Done(answer))
                return False
            self._tell(text, stream)
        except Exception as e:
            self._fail(e, None if ended else stream)
            return False
        return True

    def abandon(self) -> None:
        """End it because the server does."""
        stream, self._stream = self._stream, None
        self._fail(shutting_down(), stream)

    def _tell(self, text: str, stream: AnswerStream) -> None:
        progress = stream.progress(self._told)
        self._told += len(progress.token_ids)
        if text or progress.token_ids:
            self._emit(Piece(text, progress))

    def _fail(self, error: Exception, stream: AnswerStream | None = None) -> None:
        """End it with an error. What its `stream` was computed with is given back and not kept."""
        if not isinstance(error, VtxError):
            log.error("a request failed", exc_info=error)
        try:
            if stream is not None:
                stream.cancel()
                self._end(False)
        except Exception:
            log.exception("what a request was computed with could not be given back")
        try:
            self._emit(Failed(error))
        except Exception:
            log.exception("a request that failed could not be told so")


def _alone(_: Sequence[AnswerStream]) -> None:
    """Every answer computes its own tokens."""


class Scheduler:
    """Steps the answers of one model: in each round a token of every answer, and at most one new prompt.

    At most `parallel` answers are computed at a time; other requests wait, in their order. `together` is given the
    answers before each round, to compute ahead what they can in one pass.

    Whatever fails in a round ends one answer, and the rounds go on. `heartbeat` is beaten between any two runs of a
    graph, and while there is nothing to do.
    """

    def __init__(self, name: str, parallel: int, together: Callable[[Sequence[AnswerStream]], None] = _alone) -> None:
        self._parallel, self._together = parallel, together
        self._waiting = deque[Job]()
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._closing = self._dead = False
        self.heartbeat = Heartbeat()
        self._thread = threading.Thread(target=self._run, name=f"vtx-serve {name}", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Answers that are being computed."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def silence(self) -> float:
        """Seconds since the thread's last sign of life; without an end where the thread itself has ended."""
        return math.inf if self._dead else self.heartbeat.silence

    def submit(self, job: Job) -> None:
        """Have a job computed. Raises Refusal where the server shuts down."""
        with self._changed:
            if self._closing:
                raise shutting_down()
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> bool:
        """End all jobs and the thread; False where it still computes after `CLOSE_SECONDS`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        for job in list(self._active):
            job.cancel()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait():
                self._compute_ahead()
                self._active = [job for job in self._active if job.step()]
                job = self._admit()
                if job is not None:
                    self._active = [*self._active, job]  # from here on it is told where the thread ends
                    if not (job.begin() and job.step()):
                        self._active = self._active[:-1]
        finally:
            with self._changed:
                self._dead, self._closing = not self._closing, True
            for job in (*self._active, *self._waiting):
                job.abandon()
            self._active, self._waiting = [], deque()

    def _compute_ahead(self) -> None:
        """What fails here, each answer meets again by itself, and ends alone."""
        try:
            self._together([job.stream for job in self._active if job.stream is not None])
        except Exception:
            log.exception("answers could not be computed together")

    def _wait(self) -> bool:
        """Wait while there is nothing to do; False where the server ends."""
        with self._changed:
            self.heartbeat.beat()
            while not (self._active or self._waiting or self._closing):
                self._changed.wait(IDLE_SECONDS)
                self.heartbeat.beat()
            return not self._closing

    def _admit(self) -> Job | None:
        """The job that begins in this round, if there is room for one."""
        with self._changed:
            return self._waiting.popleft() if self._waiting and self.active < self._parallel else None
