"""Lines on their way to where they are read: events, logs. Nobody who sends them ever waits for who reads them."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)
QUEUE = 1000  # lines that wait for stdout, stderr or a file
CLOSE_SECONDS = 5.0  # for lines that wait to be delivered at the end


class Output:
    """Events on their way to one place, in a thread of its own. If `most` wait, further ones are dropped.

    `deliver` gets one line of JSON at a time and raises if it fails, which is counted in `failed`; nothing is sent
    twice. `gone`: nobody reads the other end of a pipe any more; what comes then is dropped.
    """

    def __init__(
        self, name: str, deliver: Callable[[bytes], None], most: int = QUEUE, end: Callable[[], None] = lambda: None
    ) -> None:
        """`end` is called after the last event."""
        self.name = name
        self._deliver = deliver
        self._end = end
        self.sent = self.dropped = self.failed = 0
        self.gone = False
        self._waiting = queue.Queue[bytes | None](most)
        self._failing = self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"vtx to {name}", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Send an event; never waits."""
        if self.gone:
            self.dropped += 1
            return
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("%s is read too slowly; lines are dropped and counted", self.name)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Deliver what waits, for this long at most; the rest counts as dropped."""
        ends = time.monotonic() + seconds
        with suppress(queue.Full):
            self._waiting.put(None, timeout=seconds)
            self._thread.join(max(0.0, ends - time.monotonic()))
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self.dropped += self._waiting.get_nowait() is not None

    def _run(self) -> None:
        while not self._closed and (line := self._waiting.get()) is not None:
            try:
                self._deliver(line)
            except BrokenPipeError:
                self.failed += 1
                if not self.gone:
                    self.gone = True
                    log.warning("nobody reads %s any more", self.name)
            except Exception as e:  # whatever a server answers, or a disk
                self.failed += 1
                if not self._failing:
                    log.warning("an event did not reach %s (%s)", self.name, getattr(e, "strerror", None) or e)
                self._failing = True
            else:
                self.sent += 1
                self._failing = False
        self._end()


def writer(descriptor: int) -> Callable[[bytes], None]:
    """A function that writes whole lines to a file descriptor. It raises OSError."""

    def write(line: bytes) -> None:
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    return write


class QueuedLog(logging.Handler):
    """Log records on their way to an output."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.put(self.format(record).encode(errors="backslashreplace"))
