"""The turns of a conversation: one answer at a time, and when it must end.

The next question of an answer's reader ends it: a stream that was left unread blocks nothing. Another thread (or task)
gets an error at once while somebody reads a stream, for a reader can pause for as long as it likes; it waits for a call
that returns by itself, such as `ask`.

Calls that wait go in the order in which they came, and each step of their priority is worth one place. So no flood of
calls of a high priority keeps another one waiting for ever: at most twice `MAX_PRIORITY` later ones go before it.
"""

from __future__ import annotations

import math
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


class Ended(Exception):
    """The question ended early; `stopped` is "cancelled" or "timeout"."""

    def __init__(self, stopped: str) -> None:
        super().__init__(stopped)
        self.stopped = stopped


class Stream(Protocol):
    """The stream that is read, as a turn sees it."""

    @property
    def running(self) -> bool:
        """True while some thread computes the next piece."""

    def cancel(self) -> None:
        """End it: at once if it is paused, else at its next check."""


class Request:
    """One question on its way: who reads its answer, and until when it may run. Any thread may cancel it."""

    def __init__(self, timeout: float | None = None, priority: int = 0) -> None:
        self.timeout = timeout
        self.priority = priority
        self.reader: Reader = threading.current_thread()
        self.returns_by_itself = False  # nobody pauses it between two tokens
        self.cancelled = False
        self.stream: weakref.ref[Stream] | None = None
        self.beat: Callable[[], None] | None = None  # called at every check
        self._deadline: float | None = None
        self._waiting_at: threading.Condition | None = None

    def start(self) -> None:
        """Start the timeout."""
        self._deadline = None if self.timeout is None else monotonic() + self.timeout

    def check(self) -> None:
        """Raise `Ended` if the question was cancelled or its time is over."""
        if self.beat is not None:
            self.beat()
        if self.cancelled:
            raise Ended("cancelled")
        if self._deadline is not None and monotonic() >= self._deadline:
            raise Ended("timeout")

    def cancel(self) -> None:
        """Make the next check raise, and wake up a request that waits for its turn."""
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
        self._calls = 0
        self._waiting: list[tuple[float, int]] = []  # the least is next

    @contextmanager
    def hold(self, request: Request, *, closing: bool = False) -> Iterator[None]:
        """Hold the turn; when `closing`, cancel the answer that is being computed, whoever reads it.

        Raises ConversationBusyError: another thread or task reads a stream, or this thread computes one; Ended:
        cancelled or out of time while it waited.
        """
        with self._changed:
            self._calls += 1
            place = (-math.inf if closing else self._calls - request.priority, self._calls)
            self._waiting.append(place)
            try:
                while self._holder is not None or place != min(self._waiting):
                    if self._holder is not None:
                        self._interrupt(self._holder, request, closing=closing)
                    if self._holder is not None or place != min(self._waiting):
                        request.wait(self._changed)
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()
            self._holder = request
        try:
            yield
        finally:
            with self._changed:
                self._holder = None
                self._changed.notify_all()

    def _interrupt(self, holder: Request, request: Request, *, closing: bool) -> None:
        """Cancel the answer of the holder if `request` may; nothing if it is worth waiting for.

        Raises ConversationBusyError as `hold` does.
        """
        reader = holder.reader
        alive = reader.is_alive() if isinstance(reader, threading.Thread) else not reader.done()
        if closing or holder.cancelled or reader is request.reader or not alive:
            stream = holder.stream() if holder.stream is not None else None  # None: being collected
            if stream is not None and stream.running and reader is request.reader:
                raise ConversationBusyError(
                    "this conversation is computing an answer in this very thread; ask when the call returns"
                )
            if stream is not None:
                stream.cancel()
        elif not holder.returns_by_itself:
            raise ConversationBusyError(
                "another thread reads an answer of this conversation; let it end, cancel it, "
                "or open the image again for a conversation of your own"
            )
