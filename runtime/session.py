"""Caches and rows of one conversation: prefill in two chunks, withdrawal between stages, decode.

A prompt is cut after its last vision row. What stands before the cut, the *front* (system text and
images), does not depend on the question: its rows and KV slots are computed once and stay. What stands
after it, the *tail*, is the question, and later the answer.

Every stage may be needed in two roles, with different caches: with the vision rows (`_full`) and without
them (`_text`). Slots are not positions: a row keeps its position when rows before it leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backend import Backend, Rows, StageCache
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.manifest import Manifest
from vtx.runtime.policy import Boundary, Policy

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids [n]; those equal to the image token stand for the rows of `pictures`, in order.

    A picture is (key, encode): equal keys mean equal pixels, and `encode` gives its rows
    [vision_tokens, hidden] and is called only where they are not cached.
    """

    ids: Ids
    is_vision: NDArray[np.bool_]
    pictures: tuple[tuple[str, Callable[[], Rows]], ...] = ()

    @property
    def front(self) -> int:
        """Rows up to and with the last vision row; 0 without an image."""
        return int(np.flatnonzero(self.is_vision)[-1]) + 1 if self.is_vision.any() else 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill did. Per-layer lists start with layer 1; `slots` count right after the prompt."""

    logits: NDArray[np.float32]
    k: int | None
    reused_image: bool
    vision_tokens: int
    slots: tuple[int, ...]
    vision_kept: tuple[int, ...]


Key = tuple[bytes, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Front:
    """The part of the prompt up to the last image, and how deep into the decoder it has come.

    Replaced as a whole at every step, so that an interrupt leaves either the old one or the new one.
    """

    key: Key
    is_vision: NDArray[np.bool_]
    rows: Rows  # at the boundary after `depth` stages
    text_rows: tuple[Rows, ...]  # its text rows at each boundary reached, [0] the embeddings

    @property
    def depth(self) -> int:
        return len(self.text_rows) - 1

    @property
    def size(self) -> int:
        return len(self.is_vision)

    @property
    def text_size(self) -> int:
        return int((~self.is_vision).sum())

    @property
    def positions(self) -> Ids:
        return np.arange(self.size, dtype=np.int64)


class Session:
    """One conversation over a shared backend. Not safe for two threads at once; its owner locks it."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend, self._manifest = backend, manifest
        self._stages = manifest.dialects["ort"].stages
        self._full: dict[int, StageCache] = {}
        self._text: dict[int, StageCache] = {}
        self._text_from: int | None = None  # the stage at which the front's text rows entered `_text`
        self._front = self._new_front(Prompt(np.zeros(0, np.int64), np.zeros(0, bool)), (b"", ()))
        self._tail: list[int] = []  # ids after the front that the caches hold
        self._policy: Policy | None = None
        self._cut = len(self._stages)  # the stage from which on the tail runs without vision rows

    @property
    def capacity(self) -> int:
        return self._manifest.max_context

    @property
    def length(self) -> int:
        """Rows of the conversation so far: the position of the next token."""
        return self._front.size + len(self._tail)

    def prefill(self, prompt: Prompt, policy: Policy, *, go_on: bool = False) -> Prefilled:
        """Run a prompt and return the logits [vocab] at its last row.

        The front's slots are reused where it is the same as before. With `go_on` the tail's are too, as far
        as the ids agree, and the withdrawal depth stays what it was: a chat's next turn.

        Raises:
            ContextError: the prompt and one new token do not fit.
            RequestError: no text stands after the last image.

        """
        self._check_room(len(prompt.ids), int(prompt.is_vision.sum()))
        front = prompt.front
        if front == len(prompt.ids):
            raise RequestError(
                "the prompt ends with an image and leaves no row to answer from; "
                "export with a --chat-template that prints the question, or ASSISTANT:, after the images"
            )
        key = (prompt.ids[:front].tobytes(), tuple(key for key, _ in prompt.pictures))
        known = key == self._front.key
        reused = known and front > 0 and self._front.depth > 0
        if not known:
            self._take_front(prompt, key)
        tail = prompt.ids[front:].tolist()
        agreed = _common_prefix(self._tail, tail) if go_on and known and policy == self._policy else 0
        self._tail, self._policy = self._tail[:agreed], policy
        rows = self._run_tail(prompt.ids[front + agreed :], None if agreed else policy)
        self._tail = tail
        vision = self._front.size - self._front.text_size
        cut = self._cut if vision else len(self._stages)
        return Prefilled(
            logits=self._backend.head(rows[-1:])[0],
            k=self._stages[cut].first if cut < len(self._stages) else None,
            reused_image=reused,
            vision_tokens=vision,
            slots=self._per_layer([self._cache(i).length for i in range(len(self._stages))]),
            vision_kept=self._per_layer([vision if i < cut else 0 for i in range(len(self._stages))]),
        )

    def decode(self, token: int) -> NDArray[np.float32]:
        """Run one more token and return the logits [vocab] after it."""
        self._check_room(self.length)
        position = np.array([self.length], np.int64)
        rows = self._backend.embed(np.array([token], np.int64))
        for number in range(len(self._stages)):
            rows = self._cache(number).append(rows, position)
        self._tail.append(token)
        logits: NDArray[np.float32] = self._backend.head(rows)[0]
        return logits

    def _check_room(self, rows: int, vision: int = 0) -> None:
        if rows + 1 > self.capacity:
            images = f" ({vision} of them for images)" if vision else ""
            raise ContextError(
                f"the prompt takes {rows} tokens{images}, and {self.capacity - 1} fit into this bundle beside the "
                f"answer; shorten it by {rows + 1 - self.capacity} tokens, or export with a larger --max-context"
            )

    def _take_front(self, prompt: Prompt, key: Key) -> None:
        """Take another front; its rows enter the decoder when a question needs them."""
        front = self._new_front(prompt, key)
        if self._text_capacity(front) != self._text_capacity(self._front):
            self._text.clear()
        self._tail, self._text_from = [], None
        self._front = front

    def _new_front(self, prompt: Prompt, key: Key) -> _Front:
        is_vision = prompt.is_vision[: prompt.front]
        if not is_vision.size:
            rows: Rows = np.zeros((0, self._manifest.model.hidden), np.float32)
        else:
            rows = self._backend.embed(prompt.ids[: prompt.front])
            rows[is_vision] = np.concatenate([encode() for _, encode in prompt.pictures])
        return _Front(key, is_vision, rows, (rows[~is_vision],))

    def _text_capacity(self, front: _Front) -> int:
        """Slots of a cache without vision rows: the context less the rows that never enter it."""
        return self.capacity - (front.size - front.text_size)

    def _run_tail(self, ids: Ids, policy: Policy | None) -> Rows:
        """Run the question's rows through all stages; ask `policy` at each boundary (None: as before)."""
        positions = np.arange(self.length, self.length + len(ids), dtype=np.int64)
        rows = self._backend.embed(ids)
        if policy is not None:
            self._cut = len(self._stages)
        has_vision = bool(self._front.is_vision.any())
        for number, stage in enumerate(self._stages):
            undecided = policy is not None and has_vision and 0 < number < self._cut
            if undecided and policy is not None and policy.withdraws(Boundary(stage.first, rows)):
                self._cut = number
            if number < self._cut:
                self._deepen(number)
                self._full[number].keep(self._front.size + len(self._tail))
            else:
                self._enter_text(number)
                self._text[number].keep(self._front.text_size + len(self._tail))
            rows = self._cache(number).append(rows, positions)
        return rows

    def _cache(self, number: int) -> StageCache:
        return (self._full if number < self._cut else self._text)[number]

    def _deepen(self, number: int) -> None:
        """See that the front has run through stage `number`, vision rows and all."""
        if number not in self._full:
            self._full[number] = self._backend.stage(number, self.capacity)
        if self._front.depth > number:
            return
        cache, front = self._full[number], self._front
        cache.keep(0)
        rows = cache.append(front.rows, front.positions).copy() if front.size else front.rows
        self._front = replace(front, rows=rows, text_rows=(*front.text_rows, rows[~front.is_vision]))

    def _enter_text(self, number: int) -> None:
        """See that the front's text rows have run through the stages from the cut on, without vision rows."""
        if number not in self._text:
            self._text[number] = self._backend.stage(number, self._text_capacity(self._front))
            self._text_from = None
        if number > self._cut or self._text_from == self._cut:
            return
        front, self._text_from = self._front, None
        rows = front.text_rows[self._cut]
        for later in range(self._cut, len(self._stages)):
            if later not in self._text:
                self._text[later] = self._backend.stage(later, self._text_capacity(self._front))
            self._text[later].keep(0)
            if len(rows):
                rows = self._text[later].append(rows, front.positions[~front.is_vision])
        self._text_from = self._cut

    def _per_layer(self, values: Sequence[int]) -> tuple[int, ...]:
        """One value a stage, repeated for each of its layers."""
        return tuple(v for v, stage in zip(values, self._stages, strict=True) for _ in range(stage.layers))


def _common_prefix(cached: Sequence[int], wanted: Sequence[int]) -> int:
    """How many leading ids agree, less one where all do: at least one row must run for its logits."""
    agreed = 0
    while agreed < min(len(cached), len(wanted) - 1) and cached[agreed] == wanted[agreed]:
        agreed += 1
    return agreed
