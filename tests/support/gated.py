"""A backend whose calls a test can hold up, to act while an answer is being computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

WAIT = 300.0  # seconds until a test that hangs fails; far more than any takes on a busy machine


class Gated:
    """A backend that calls `before(name)` ahead of each of its calls, with the number of calls so far in `calls`."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.calls = backend, list[str]()
        self.before: Callable[[str], None] = lambda _: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _call(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            self.before(name)
            self.calls.append(name)
            return call(*args, **keywords)

        return run

    def head(self, *args: Any) -> Any:
        return self._call("head", self._backend.head)(*args)

    def vision(self, *args: Any) -> Any:
        return self._call("vision", self._backend.vision)(*args)

    def stage(self, index: int, capacity: int) -> Any:
        cache = self._backend.stage(index, capacity)
        cache.append = self._call(f"stage {index}", cache.append)
        return cache


class Hold:
    """Stops the thread that comes to `name` for the `nth` time, until it is released."""

    def __init__(self, name: str, nth: int = 1) -> None:
        self._name, self._left = name, nth
        self._arrived, self._released = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        self._left -= name == self._name
        if name == self._name and self._left == 0:
            self._arrived.set()
            assert self._released.wait(WAIT), "never released"

    def wait(self) -> None:
        assert self._arrived.wait(WAIT), f"{self._name} was never called"

    def release(self) -> None:
        self._released.set()
