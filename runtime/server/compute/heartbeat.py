"""The sign of life of a thread."""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE_SECONDS = 1.0  # between two beats of a thread that waits for work


class Heartbeat:
    """Beaten by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last = clock()

    def beat(self) -> None:
        self.last = self.clock()

    @property
    def silence(self) -> float:
        """Seconds since the last beat."""
        return self.clock() - self.last
