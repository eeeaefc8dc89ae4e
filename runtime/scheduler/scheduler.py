"""One thread for each model computes its answers in rounds of one token, so that no long answer blocks a short one.

A prompt is computed in chunks, a view of an image or a stage, between which the other answers get their tokens.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from vtx.runtime.api.answer import Answer, Progress
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.errors import VtxError

PRIORITIES = 40  # steps of priority that are worth a request's whole time
JOINING = 256  # tokens of prompts that wait for the next round; once there are more, no further prompt begins
CLOSE_SECONDS = 10.0  # for a run of a graph to end before the server does
IDLE_SECONDS = 1.0  # between two beats of a thread that waits for work
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """The text and the thought that became certain with one more token, and the tokens since the last piece."""

    text: str
    progress: Progress
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The end: the complete answer."""

    answer: Answer


Event: TypeAlias = Piece | Done | Exception  # an error is an end, too


class ClosedError(VtxError):
    """The scheduler is closing or has ended; it computes no more."""

    def __init__(self) -> None:
        super().__init__("the thread that computes answers is ending")


class TooLateError(VtxError):
    """A job's answer would end `needed` seconds from now, and its deadline is in `left`."""

    def __init__(self, needed: float, left: float) -> None:
        super().__init__(
            f"the answer would end after about {needed:.1f} s, the deadline is in {max(left, 0):.1f} s; "
            "ask again later, or allow more time"
        )
        self.needed = needed
        self.left = left


class Heartbeat:
    """The sign of life of a thread, which beats it; any may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.beat()

    def beat(self) -> None:
        self.last = self.clock()

    @property
    def silence(self) -> float:
        """Seconds since the last beat."""
        return self.clock() - self.last


@dataclass(frozen=True, slots=True)
class Terms:
    """The time by which an answer must end, and its length.

    `ends_at`: of the monotonic clock; of waiting jobs the one whose end is nearest begins first. `urgent`: it is
    refused if it cannot end by then; others count as if they ended after half of their `limit` of seconds, so that none
    waits for its whole time behind urgent ones. A step of `priority` is worth a `PRIORITIES`th of the limit. The answer
    has at most `tokens`.
    """

    ends_at: float = math.inf
    urgent: bool = False
    limit: float = 0.0
    priority: int = 0
    tokens: int = 1

    @property
    def order(self) -> float:
        """The time by which it has its turn: of those that wait, the one with the earliest begins first."""
        return self.ends_at - self.limit * (self.priority / PRIORITIES + (0 if self.urgent else 0.5))


ANY_TERMS = Terms()


class Job:
    """One request. `begin` returns its stream, `end` releases the stream's conversation, `emit` gets each event.

    All three are called in the thread that computes. `fits`: False while it must wait for others to end.
    """

    def __init__(
        self,
        begin: Callable[[], AnswerStream],
        end: Callable[[bool], None],
        emit: Callable[[Event], None],
        terms: Terms = ANY_TERMS,
        fits: Callable[[], bool] = lambda: True,
    ) -> None:
        self.terms = terms
        self.order = terms.order
        self._begin = begin
        self._end = end
        self._emit = emit
        self.fits = fits
        self.lacks_memory = False  # it waits for others to end
        self.begun = self.first = math.nan  # and the time of its first token, by the scheduler's clock
        self.quickest: Callable[[], float | None] = lambda: None  # seconds of its prompt, if it can choose how it runs
        self.room = math.inf  # seconds that its prompt may take, so that urgent ones that wait make theirs
        self.stream: AnswerStream | None = None  # of its answer, once it has begun
        self.emitted = 0  # tokens
        self._emitted_thought = 0  # characters
        self.cancelled = False

    @property
    def waiting(self) -> int:
        """The tokens of its prompt that wait for a pass with other answers'."""
        return 0 if self.stream is None else self.stream.waiting

    def cancel(self) -> None:
        """End it, from any thread: within one token, or before the prompt's next stage."""
        self.cancelled = True
        stream = self.stream
        if stream is not None:
            stream.cancel()

    def begin(self, between: Callable[[], None], now: float) -> bool:
        """Begin its stream, which calls `between` before each chunk; False if that fails, or it was cancelled."""
        if self.cancelled:
            return False
        self.begun = now
        try:
            self.stream = self._begin()
            self.stream.on_progress(between)
        except Exception as e:
            self._fail(e)
            return False
        return True

    def step(self) -> bool:
        """Compute the prompt and its first token, or one token more; False at the end."""
        stream = self.stream
        ended = False
        assert stream is not None
        try:
            if self.cancelled:  # maybe while it began
                stream.cancel()
            try:
                text = stream.step()
            except StopIteration:
                answer = stream.answer
                ended = True
                self._end(True)
                if thought := self._grown_thought(stream):
                    self._emit(Piece("", Progress(()), thought))
                self._emit(Done(answer))
                return False
            progress = stream.progress(self.emitted)
            self.emitted += len(progress.token_ids)
            if text or progress.token_ids:
                self._emit(Piece(text, progress, self._grown_thought(stream)))
        except Exception as e:
            self._fail(e, None if ended else stream)
            return False
        return True

    def _grown_thought(self, stream: AnswerStream) -> str:
        """The part of the thought since the last piece."""
        grown = stream.thought[self._emitted_thought :]
        self._emitted_thought += len(grown)
        return grown

    def abandon(self) -> None:
        """End it because the thread that computes ends."""
        stream = self.stream
        self.stream = None
        self._fail(ClosedError(), stream)

    def refuse(self, error: VtxError) -> None:
        """End it with an error before it has begun."""
        self._fail(error)

    def _fail(self, error: Exception, stream: AnswerStream | None = None) -> None:
        """End it with an error. The conversation of its `stream` is released and not kept."""
        if not isinstance(error, VtxError):
            log.error("a request failed", exc_info=error)
        try:
            if stream is not None:
                stream.cancel()
                self._end(False)
        except Exception:
            log.exception("the conversation of a request could not be released")
        try:
            self._emit(error)
        except Exception:
            log.exception("the error of a request could not be sent")


class Scheduler:
    """Steps the answers of one model: in each round a token of every answer, and at most one new prompt.

    At most `parallel` answers are computed at a time; other requests wait, the one with the nearest end first, else in
    their order. `together` gets the answers before each round, to compute their tokens in one pass if it can, and with
    them the ends of prompts, as those of questions about one image: so several of these begin between two rounds.
    Between two chunks of a prompt, once they took as long as a round, there is a round of the other answers, and a
    request whose end is nearer has its prompt computed first.

    An urgent request that waits and can no longer make its end is refused and not computed. A failure in a round ends
    one answer, and the rounds go on. `heartbeat` beats between any two runs of a graph, and while there is nothing to
    do.
    """

    def __init__(
        self,
        name: str,
        parallel: int,
        together: Callable[[Sequence[AnswerStream]], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parallel = parallel
        self._together = together
        self._clock = clock
        self._waiting = list[Job]()
        # Of recent answers: seconds to the first token and of each further one, and their tokens.
        self._prompt_seconds = self._token_seconds = self._tokens = 0.0
        self._active: list[Job] = []
        self._prompts: list[Job] = []  # those whose prompts are being computed, each inside of the one before it
        self._round_seconds = 0.0
        self._round_ended = -math.inf
        self._changed = threading.Condition()
        self._closing = self._dead = False
        self.heartbeat = Heartbeat()
        self._thread = threading.Thread(target=self._rounds, name=f"vtx-scheduler {name}", daemon=True)
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
        """Seconds since the thread's last sign of life; infinite once the thread itself has ended."""
        return math.inf if self._dead else self.heartbeat.silence

    def submit(self, job: Job) -> None:
        """Have a job computed. Raises ClosedError while it closes, TooLateError for an urgent one that cannot make it.

        What it would take is known by what recent answers took.
        """
        with self._changed:
            if self._closing:
                raise ClosedError
            left = job.terms.ends_at - self._clock()
            needed = self._expected(job)
            # With nothing else to do it is tried: else times that were once long would refuse all that come, for ever.
            busy = bool(self._active or self._waiting)
            if job.terms.urgent and (left <= 0 or (busy and needed > left)):
                raise TooLateError(needed, left)
            self._waiting.append(job)
            self._changed.notify()

    def _expected(self, job: Job) -> float:
        """Seconds until its end, by what recent answers took."""
        ahead = [other for other in self._waiting if other.order <= job.order]
        others = [*ahead, *self._active]
        turns = max(0, len(others) + 1 - self._parallel)
        lengths = [self._prompt_seconds + self._further(other) for other in others]
        wait = turns * sum(lengths) / max(1, len(lengths)) / self._parallel
        return wait + min(len(ahead), self._parallel) * self._prompt_seconds + self._needed(job)

    def _further(self, job: Job) -> float:
        """Seconds from its first token to its end, if it is as long as recent answers but for its limit."""
        return self._token_seconds * max(0.0, min(job.terms.tokens, self._tokens) - 1)

    def _needed(self, job: Job) -> float:
        """Seconds of its answer once it begins."""
        return (job.quickest() or self._prompt_seconds) + self._further(job)

    def _first_token(self, job: Job) -> None:
        """A prompt has been computed."""
        job.first = self._clock()
        self._prompt_seconds = recent(self._prompt_seconds, job.first - job.begun)

    def _ended(self, job: Job) -> None:
        """An answer has ended; one that was cancelled says nothing about lengths."""
        if job.emitted > 1 and not job.cancelled:
            self._token_seconds = recent(self._token_seconds, (self._clock() - job.first) / (job.emitted - 1))
        if job.emitted and not job.cancelled:
            self._tokens = recent(self._tokens, job.emitted)

    def _room(self, now: float) -> float:
        """Seconds that a prompt may take until an urgent request that waits, and can make its end, no longer does."""
        room = math.inf
        needed = 0.0
        for job in sorted(self._waiting, key=lambda job: job.order):
            needed += job.quickest() or self._prompt_seconds
            end = now + needed + self._further(job)
            if job.terms.urgent and end < job.terms.ends_at:
                room = min(room, job.terms.ends_at - end)
        return room

    def close(self) -> bool:
        """End all jobs and the thread; False if it still computes after `CLOSE_SECONDS`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        for job in list(self._active):
            job.cancel()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _rounds(self) -> None:
        try:
            while True:
                with self._changed:
                    self.heartbeat.beat()
                    while not (self._active or self._waiting or self._closing):
                        self._changed.wait(IDLE_SECONDS)
                        self.heartbeat.beat()
                    if self._closing:
                        return
                self._decode()
                self._begin()
        finally:
            with self._changed:
                self._dead = not self._closing
                self._closing = True
            for job in (*self._active, *self._waiting):
                job.abandon()
            self._active = []
            self._waiting = []

    def _decode(self) -> None:
        """A round: a token of every answer whose prompt has been computed."""
        started = self._clock()
        jobs = [job for job in self._active if job not in self._prompts]
        joined = [job for job in jobs if job.waiting]
        try:
            self._together([job.stream for job in jobs if job.stream is not None])
        except Exception:  # each answer meets it again by itself, and ends alone
            log.exception("answers could not be computed together")
        ended = [job for job in jobs if not job.step()]
        for job in joined:
            self._first_token(job)
        for job in ended:
            self._ended(job)
        self._active = [job for job in self._active if job not in ended]
        self._round_ended = self._clock()
        # A round may compute nothing, as at the ends of answers.
        self._round_seconds = max(self._round_ended - started, self._round_seconds / 2)

    def _begin(self, before: Job | None = None) -> None:
        """Compute the prompt of the request whose turn it is, if that is nearer than the end of `before`.

        Where its end waits for the next round, other prompts begin beside it.
        """
        while (job := self._begin_next(before)) is not None and job.waiting:
            if sum(each.waiting for each in self._active) > JOINING:
                return

    def _begin_next(self, before: Job | None) -> Job | None:
        """Compute the next prompt that may begin. None if there is none."""
        self._refuse_late()
        with self._changed:
            job = min(self._waiting, key=lambda job: job.order, default=None)
            if job is None or self.active >= self._parallel or (before is not None and job.order >= before.order):
                return None
            job.lacks_memory = bool(self._active) and not job.fits()
            if job.lacks_memory:
                return None
            self._waiting.remove(job)
            now = self._clock()
            job.room = self._room(now)
            self._active = [*self._active, job]  # from here on it is abandoned if the thread ends
        self._prompts.append(job)
        try:
            going = job.begin(partial(self._between, job), now) and job.step()
        finally:
            self._prompts.pop()
        if not going:
            self._active = [other for other in self._active if other is not job]
        elif not job.waiting:
            self._first_token(job)
        return job

    def _refuse_late(self) -> None:
        """Refuse the urgent requests that wait and cannot end in time any more.

        Their prompts would only take the time of those that can. As at `submit`, the last one is tried.
        """
        with self._changed:
            if not self._waiting or self.active >= self._parallel:
                return
            now = self._clock()
            late = list[tuple[Job, TooLateError]]()
            kept = list[Job]()
            others = len(self._active) + len(self._waiting) - 1
            for job in self._waiting:
                left = job.terms.ends_at - now
                needed = self._needed(job)
                if job.terms.urgent and not job.lacks_memory and needed > left and others > len(late):
                    late.append((job, TooLateError(needed, left)))
                else:
                    kept.append(job)
            self._waiting = kept
        for job, error in late:
            job.refuse(error)

    def _between(self, job: Job) -> None:
        """Before each chunk of a job: let others have their turn if it is a chunk of its prompt."""
        self.heartbeat.beat()
        if self._prompts and self._prompts[-1] is job and not self._closing:
            if self._clock() - self._round_ended >= self._round_seconds:
                self._decode()
            self._begin(job)


def recent(mean: float | None, value: float) -> float:
    """A mean in which each new value counts a quarter; `mean` is None or 0 before the first."""
    return value if not mean else 0.75 * mean + 0.25 * value
