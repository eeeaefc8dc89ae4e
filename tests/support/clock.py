"""Time that passes only when nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class Clock:
    """Seconds, as `time.monotonic` gives them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        assert ready or timeout is not None, "nothing will ever happen"
        if not ready and timeout:
            self._clock.now += timeout
        return ready


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop without waits: where all wait for a timer, its clock jumps there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._clock()


def run(main: Any, clock: Clock | None = None) -> Any:
    """Run a coroutine in such a loop."""
    loop = ClockLoop(clock or Clock())
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
