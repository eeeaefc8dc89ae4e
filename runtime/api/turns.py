"""Whose turn it is in a conversation, and when that turn must end.

One answer is computed at a time. What its reader asks next ends it: a stream that was left unread does not block it.
Another thread (or task) is told at once that the conversation is busy while somebody reads a stream, for a reader can
pause for as long as it likes; it waits for a call that returns by itself, such as `ask`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from vtx.runtime.errors import ConversationBusyError

if TYPE_CHECKING:
    from asyncio import Task

Reader: TypeAlias = "threading.Thread | Task[object]"


def _nothing() -> None:
    """Nobody wants to know."""


class Ended(Exception):
    """The question was cancelled or ran out of time, as `stopped` says."""

    def __init__(self, stopped: str) -> None:
        super().__init__(stopped)
        self.stopped = stopped


class Stream(Protocol):
    """What a turn knows of the stream that is read."""

    @property
    def running(self) -> bool:
        """Whether some thread computes the next piece just now."""
        ...

    def cancel(self) -> None:
        """End it: now where it is paused, else at its next check."""
        ...


class Request:
    """One question on its way: who reads its answer, and until when it may run. Any thread may cancel it."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.reader: Reader = threading.current_thread()
        self.returns_by_itself = False  # nobody pauses it between two tokens
        self.cancelled = False
        self.stream: weakref.ref[Stream] | None = None
        self.beat: Callable[[], None] = _nothing  # called at every check
        self._deadline: float | None = None
        self._waiting_at: threading.Condition | None = None

    def start(self) -> None:
        """From here on the timeout counts."""
        self._deadline = None if self.timeout is None else monotonic() + self.timeout

    def check(self) -> None:
        """Raise `Ended` where the question was cancelled or its time is over."""
        self.beat()
        if self.cancelled:
            raise Ended("cancelled")
        if self._deadline is not None and monotonic() >= self._deadline:
            raise Ended("timeout")

    def cancel(self) -> None:
        """Have the next check raise, and one that waits for its turn wake up."""
        self.cancelled = True
        condition = self._waiting_at
        if condition is not None:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition) -> None:
        """Wait at a condition whose lock is held, until it is notified, or this question must end."""
        self._waiting_at = condition
        try:
            self.check()
            remaining = None if self._deadline is None else self._deadline - monotonic()
            condition.wait(remaining)
            self.check()
        finally:
            self._waiting_at = None


class Turns:
    """At most one request holds the turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant: a collected stream may release within it
        self._holder: Request | None = None

    @contextmanager
    def hold(self, request: Request) -> Iterator[None]:
        """Hold the turn.

        Raises:
            ConversationBusyError: another thread or task reads a stream.
            Ended: cancelled or out of time while it waited.

        """
        with self._changed:
            while self._holder is not None:
                self._make_way(self._holder, request)
                if self._holder is not None:
                    request.wait(self._changed)
            self._holder = request
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def close(self) -> Iterator[None]:
        """Cancel the answer that is being computed, and hold the turn once it has ended."""
        closing = Request()
        closing.returns_by_itself = True
        with self._changed:
            while self._holder is not None:
                _end(self._holder, closing)
                if self._holder is not None:
                    self._changed.wait()
            self._holder = closing
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @staticmethod
    def _make_way(holder: Request, request: Request) -> None:
        """End the holder's stream where nobody else reads it."""
        if holder.cancelled or holder.reader is request.reader or not _alive(holder.reader):
            _end(holder, request)
        elif not holder.returns_by_itself:
            raise ConversationBusyError(
                "another thread reads an answer of this conversation; read it to its end, end it with cancel(), "
                "or open the image again for a conversation of your own"
            )


def _end(holder: Request, request: Request) -> None:
    stream = holder.stream() if holder.stream is not None else None
    if stream is None:
        return  # being collected, which releases the turn
    if stream.running and holder.reader is request.reader:
        raise ConversationBusyError(
            "this conversation is computing an answer in this very thread; ask when the call has returned"
        )
    stream.cancel()


def _alive(reader: Reader) -> bool:
    return reader.is_alive() if isinstance(reader, threading.Thread) else not reader.done()
