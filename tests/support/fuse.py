"""A backend that is interrupted at one of its calls, to see what a session makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.exported import answer, policy
from tests.support.near import assert_near
from vtx.runtime.api.model import Model
from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, Scores, TokenStates

Logits = NDArray[np.float32]


class Fuse:
    """Counts calls into a backend and interrupts one of them: before it, within it, or after it."""

    def __init__(self, at: int = -1, moment: str = "before") -> None:
        self.calls, self._at, self._moment = 0, at, moment

    def run(self, call: Callable[[], Any], undo: Callable[[], None] = lambda: None) -> Any:
        due = self.calls == self._at
        self.calls += 1
        if due and self._moment == "before":
            raise KeyboardInterrupt
        found = call()
        if due:
            if self._moment == "within":
                undo()
            raise KeyboardInterrupt
        return found


class FusedCache:
    """A stage's cache behind its backend's fuse; "within" leaves slots written and not yet counted."""

    def __init__(self, backend: FusedBackend, cache: StageCache) -> None:
        self._backend, self._cache = backend, cache

    @property
    def length(self) -> int:
        return self._cache.length

    @length.setter
    def length(self, value: int) -> None:
        self._cache.length = value

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def resident(self) -> int:
        return self._cache.resident

    @property
    def selects_outputs(self) -> bool:
        return self._cache.selects_outputs

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        before = self._cache.length
        found: HiddenStates = self._backend.fuse.run(
            lambda: self._cache.append(tokens, positions, query=query, outputs=outputs),
            lambda: self._cache.keep(before),
        )
        return found

    def attention(self, *, last_only: bool = False) -> Scores:
        found: Scores = self._backend.fuse.run(lambda: self._cache.attention(last_only=last_only))
        return found

    def keys(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._backend.fuse.run(self._cache.keys)
        return found

    def read(self, slots: Ids) -> Any:
        return self._backend.fuse.run(lambda: self._cache.read(slots))

    def write(self, slots: Ids, kv: Any, *, length: int) -> None:
        before = self._cache.length
        self._backend.fuse.run(lambda: self._cache.write(slots, kv, length=length), lambda: self._uncount(before))

    def _uncount(self, length: int) -> None:
        self._cache.length = length

    def keep(self, length: int) -> None:
        self._cache.keep(length)

    def mark(self, length: int) -> None:
        self._cache.mark(length)

    def nearest(self, length: int) -> int:
        return self._cache.nearest(length)

    @property
    def tried(self) -> int:
        return self._cache.tried

    @property
    def state_bytes(self) -> int:
        return self._cache.state_bytes


class FusedBackend:
    """A backend whose every call goes through the fuse in place at that moment."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.device, self.dialect, self.fuse = backend, backend.device, backend.dialect, Fuse()
        self.compute, self.kv_slot_bytes = backend.compute, backend.kv_slot_bytes

    def embed(self, ids: NDArray[np.int64]) -> TokenStates:
        found: TokenStates = self.fuse.run(lambda: self._backend.embed(ids))
        return found

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        found: ImageTokens = self.fuse.run(lambda: self._backend.vision(pixels, extras))
        return found

    def head(self, rows: HiddenStates) -> Logits:
        found: Logits = self.fuse.run(lambda: self._backend.head(rows))
        return found

    def gate(self, k: int, rows: HiddenStates) -> Logits:
        found: Logits = self.fuse.run(lambda: self._backend.gate(k, rows))
        return found

    def text_tower(self, ids: Ids) -> Logits:
        found: Logits = self.fuse.run(lambda: self._backend.text_tower(ids))
        return found

    def stage(self, index: int, capacity: int) -> StageCache:
        return FusedCache(self, self.fuse.run(lambda: self._backend.stage(index, capacity)))


def fused(backend: FusedBackend, asked: Prompt) -> Prompt:
    """`asked` with pictures that are encoded through the fuse."""
    encoders = tuple((key, lambda e=encode: backend.fuse.run(e)) for key, encode in asked.encoders)
    return replace(asked, encoders=encoders)


def check_interrupts(
    model: Model,
    prompts: Sequence[Prompt],
    fresh: Mapping[tuple[int, int | None], Logits],
    moment: str,
    earlier: tuple[int, int | None] | None,
    tolerance: float,
) -> None:
    """Interrupt every call that the first prompt makes, in turn, then ask others at other depths.

    `fresh` has the logits of fresh sessions, `earlier` a prompt and a K that were answered before the interrupt.
    """
    for at in itertools.count():
        backend = FusedBackend(model.backend)
        session = Session(backend, model.manifest)
        if earlier is not None:
            answer(session, fused(backend, prompts[earlier[0]]), policy(earlier[1]), 2)
        backend.fuse = Fuse(at, moment)
        try:
            answer(session, fused(backend, prompts[0]), policy(5), 3)
        except KeyboardInterrupt:
            pass
        else:
            break
        backend.fuse = Fuse()
        for number, k in enumerate((5, 2, None)):
            # the first one goes on, as a chat's next turn does: it may reuse what the interrupted one had finished
            done = session.prefill(fused(backend, prompts[0]), policy(k), after=None if number else session.selection)
            assert_near(done.logits, fresh[0, k][0], tolerance)
            assert np.array_equal(answer(session, prompts[1], policy(k), 3), fresh[1, k][:3]), (at, k)
    assert at > 10, "the question made fewer calls than it has stages"
