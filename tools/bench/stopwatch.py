"""A wrapper of any backend that times its calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from vtx.runtime.backends.backend import Backend


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a backend, or of the cache of stage number `stage` (from 0).

    `append` ran `tokens` on top of `filled` KV slots, `spared` of them not through the last layer's MLP; `vision`
    computed `tokens` image tokens, `video` those of a frame; `text_tower` read `tokens` of a question.
    """

    name: str
    ms: float
    stage: int | None = None
    tokens: int = 0
    filled: int = 0
    spared: int = 0


class Stopwatch:
    """Wraps a backend or one of its stage caches. Attributes that are not callable pass through."""

    __slots__ = ("_caches", "_calls", "_stage", "inner")

    def __init__(self, inner: Any, calls: list[Call], stage: int | None = None, *, caches: bool = True) -> None:
        self.inner = inner
        self._calls = calls
        self._stage = stage
        self._caches = caches

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        return partial(self._run, name, attribute) if callable(attribute) else attribute

    def _run(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if name == "step":
            return self._step(call, *args, **named)
        sized = name in ("append", "text_tower", "project")
        tokens, filled = (len(args[0]), getattr(self.inner, "length", 0)) if sized else (0, 0)
        start = time.perf_counter()
        result = call(*args, **named)
        ms = 1000 * (time.perf_counter() - start)
        tokens = len(result) + result.idle if name in ("vision", "video") else tokens
        spared = tokens - len(result) if name == "append" and self.inner.selects_outputs else 0
        self._calls.append(Call(name, ms, self._stage, tokens, filled, spared))
        return Stopwatch(result, self._calls, args[0]) if name == "stage" and self._caches else result

    def _step(self, call: Callable[..., Any], caches: Sequence[Any], *args: Any, **named: Any) -> Any:
        """A token through all graphs in one call, listed as `append` of each stage and `head`, which has its time."""
        inner = [cache.inner if isinstance(cache, Stopwatch) else cache for cache in caches]
        filled = [cache.length for cache in inner]
        start = time.perf_counter()
        result = call(inner, *args, **named)
        ms = 1000 * (time.perf_counter() - start)
        self._calls += [Call("append", 0.0, number, 1, before) for number, before in enumerate(filled)]
        self._calls.append(Call("head", ms))
        return result


def timed(backend: Backend, *, caches: bool = True) -> tuple[Backend, list[Call]]:
    """A backend with the behaviour of `backend`, and the growing list of its calls.

    Without `caches` those of its caches are not in it, and the backend takes them for its own.
    """
    calls = list[Call]()
    return cast(Backend, Stopwatch(backend, calls, caches=caches)), calls


def split(calls: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
    """The calls of one question: up to its first logits, the vision tower included, and those of decoding."""
    first = 1 + next(number for number, call in enumerate(calls) if call.name == "head")
    return tuple(calls[:first]), tuple(calls[first:])
