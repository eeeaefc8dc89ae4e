"""Caches and rows of one conversation: prefill in two chunks, rows leaving between stages, decode.

A prompt is cut after its last vision row. What stands before the cut, the *front* (system text and
images), does not depend on the question: its rows and KV slots are computed once and stay. What stands
after it, the *tail*, is the question, and later the answer.

Every stage may be needed with all vision rows (`_full`) and after some or all have left (`_pruned`), with different
caches. Slots are not positions: a row keeps its position when rows before it leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.backend import Backend, StageCache
from vtx.runtime.bundle.manifest import Manifest
from vtx.runtime.errors import BundleError, ContextError, RequestError
from vtx.runtime.policies.base import Boundary
from vtx.runtime.policies.policy import Policy, Removal
from vtx.runtime.session.prefix import Prefix, PrefixSlots, Prompt, PrunedPrefix, SavedKV
from vtx.runtime.session.result import Cut, PrefillResult, Selection, common_prefix
from vtx.runtime.vision.tokens import Ids, Mask, Rows, Scores

__all__ = ["Cut", "PrefillResult", "Prompt", "Selection", "Session"]


class Session:
    """One conversation over a shared backend. Not safe for two threads at once; its owner locks it."""

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend, self._manifest = backend, manifest
        self._stages = manifest.dialects["ort"].stages
        self._full: dict[int, StageCache] = {}
        self._pruned: dict[int, StageCache] = {}
        self._prefix = self._nothing()
        self._pruned_prefix: PrunedPrefix | None = None  # what `_pruned` holds of the prefix
        self._tail: list[int] = []  # ids after the front that the caches hold
        self._asked: Selection | None = None  # the question by which the cached vision rows were chosen
        self._cut = len(self._stages)  # the stage from which on the tail runs in `_pruned`
        self._holding: set[int] = set()  # boundaries at which the full line's vision rows are kept
        self._layouts: list[PrefixSlots] = []
        self._cuts: list[Cut] = []

    @property
    def capacity(self) -> int:
        return self._manifest.max_context

    @property
    def length(self) -> int:
        """Rows of the conversation so far: the position of the next token."""
        return self._prefix.size + len(self._tail)

    @property
    def asked(self) -> Selection | None:
        """The question by which the cached vision rows were chosen, None where none was answered."""
        return self._asked

    def prefill(self, prompt: Prompt, policy: Policy, *, after: Selection | None = None) -> PrefillResult:
        """Run a prompt and return the logits [vocab] at its last row.

        The front's slots are reused where it is the same as before. The policy is asked anew, unless the prompt goes
        on `after` a question: then the vision rows that stay are those of that question, and the tail's slots are
        reused as far as the ids agree. Where another question has been answered since, `after` is run again first.

        Raises:
            ContextError: the prompt and one new token do not fit.
            RequestError: no text stands after the last image.
            BundleError: a gate or an attention gives what is not a number.

        """
        self._check_room(len(prompt.ids), int(prompt.is_vision.sum()))
        front = prompt.front
        if front == len(prompt.ids):
            raise RequestError(
                "the prompt ends with an image and leaves no row to answer from; "
                "export with a --chat-template that prints the question, or ASSISTANT:, after the images"
            )
        known = prompt.key == self._prefix.key
        reused = known and front > 0 and self._prefix.depth > 0
        if not known:
            self._take_front(prompt)
        tail = prompt.ids[front:].tolist()
        if after is None or not after.leads_to(prompt.key, policy, tail):
            rows = self._ask(Selection(prompt.key, policy, tuple(tail)))
        else:
            if after != self._asked:
                self._ask(after)
            agreed = common_prefix(self._tail, tail)
            self._tail = self._tail[:agreed]
            rows = self._go_on(prompt.ids[front + agreed :])
            self._tail = tail
        return self._report(self._backend.head(rows[-1:])[0], reused)

    def decode(self, token: int) -> NDArray[np.float32]:
        """Run one more token and return the logits [vocab] after it."""
        self._check_room(self.length)
        rows = self._backend.embed(np.array([token], np.int64))
        for number in range(len(self._stages)):
            position = np.array([self._layouts[number].position + len(self._tail)], np.int64)
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

    # ---- the tail ----------------------------------------------------------------------------------------------------

    def _ask(self, asked: Selection) -> Rows:
        """Run a question's rows through all stages, asking its policy at each boundary which vision rows go on."""
        self._asked, self._tail = None, []
        policy, ids = asked.policy, np.array(asked.ids, np.int64)
        needs = policy.needs()
        self._prepare(policy)
        self._cut, self._cuts, self._layouts = len(self._stages), [], []
        survivors: Mask | None = None
        rows = self._backend.embed(ids)
        for number, stage in enumerate(self._stages):
            departure = policy.ask(self._boundary(number, rows)) if number and self._looks(number - 1) else None
            if departure is not None:
                line = self._depart(number, departure)
                survivors = line.present if departure.shrinks else survivors
            self._layouts.append(self._enter(number))
            query = stage.query and stage.last in needs.queries and self._looks(number)
            rows = self._run(number, rows, query=query)
        if survivors is not None and needs.shrinks is not None:
            self._shrink([n for n, s in enumerate(self._stages) if s.first >= needs.shrinks], survivors, len(ids))
        if policy.renumbers:  # as the released code decodes: each layer at its own cache's length
            self._layouts = [replace(seat, position=seat.slots) for seat in self._layouts]
        self._asked, self._tail = asked, [*asked.ids]
        return rows

    def _go_on(self, ids: Ids) -> Rows:
        """Run more rows of the tail in the caches as they stand."""
        rows = self._backend.embed(ids)
        for number in range(len(self._stages)):
            rows = self._run(number, rows)
        return rows

    def _run(self, number: int, rows: Rows, *, query: bool = False) -> Rows:
        seat, cache, done = self._layouts[number], self._cache(number), len(self._tail)
        cache.keep(seat.slots + done)
        first = seat.position + done
        return cache.append(rows, np.arange(first, first + len(rows), dtype=np.int64), query=query)

    def _cache(self, number: int) -> StageCache:
        return (self._full if number < self._cut else self._pruned)[number]

    def _looks(self, number: int) -> bool:
        """Whether the tail sees a vision row in stage `number`."""
        return bool((self._layouts[number].present & self._prefix.is_vision).any())

    def _boundary(self, number: int, rows: Rows) -> Boundary:
        """What a policy may know before stage `number`."""
        front, before = self._prefix, self._layouts[number - 1].present
        slots, layer = np.flatnonzero(front.is_vision[before]), self._stages[number - 1].last

        def scores(last_only: bool) -> Scores:
            total, most = self._cache(number - 1).attention(last_only=last_only)
            if not (np.isfinite(total).all() and np.isfinite(most).all()):
                raise BundleError(
                    f"the attention of layer {layer} is not a number; use --reduce none, or export at fp32"
                )
            return total[slots], most[slots]

        return Boundary(layer + 1, rows, front.images, before[front.is_vision], scores)

    # ---- the front ---------------------------------------------------------------------------------------------------

    def _take_front(self, prompt: Prompt) -> None:
        """Take another front; its rows enter the decoder when a question needs them."""
        key, is_vision = prompt.key, prompt.is_vision[: prompt.front]
        front = self._nothing()
        if is_vision.size:
            rows = self._backend.embed(prompt.ids[: prompt.front])
            encoded = [encode() for _, encode in prompt.pictures]
            rows[is_vision] = np.concatenate([image.rows for image in encoded])
            front = Prefix(key, is_vision, tuple(image.patches for image in encoded), (rows,))
        self._tail, self._asked, self._pruned_prefix, self._prefix = [], None, None, replace(front, key=key)

    def _nothing(self) -> Prefix:
        return Prefix((b"", ()), np.zeros(0, bool), (), (np.zeros((0, self._manifest.model.hidden), np.float32),))

    def _prepare(self, policy: Policy) -> None:
        """Before a question: full caches whole again, and vision rows held wherever the policy may drop some."""
        self._restore()
        cuts = policy.row_cuts
        self._holding = {number for number, stage in enumerate(self._stages) if stage.first in cuts}
        lacking = [number for number in self._holding if not self._prefix.held(number)]
        if lacking:
            self._prefix = self._prefix.rewound(min(lacking))

    def _enter(self, number: int) -> PrefixSlots:
        """See that what goes on of the front has run through stage `number`."""
        if number < self._cut:
            self._deepen(number)
            return PrefixSlots(np.ones(self._prefix.size, bool), self._prefix.size, self._prefix.size)
        line = self._pruned_prefix
        assert line is not None
        if line.depth <= number:
            cache = self._room(number, line)
            cache.keep(0)
            rows = cache.append(line.rows, line.positions).copy() if line.size else line.rows
            self._pruned_prefix = line.deeper(rows)
        return PrefixSlots(line.present, line.size, line.next_position)

    def _deepen(self, number: int) -> None:
        """See that the front has run through stage `number`, vision rows and all."""
        if number not in self._full:
            self._full[number] = self._backend.stage(number, self.capacity)
        front = self._prefix
        if front.depth > number:
            return
        cache = self._full[number]
        cache.keep(0)
        last = front.boundaries[-1]
        rows = cache.append(last, np.arange(front.size, dtype=np.int64)).copy() if front.size else last
        self._prefix = front.deeper(rows, hold=number in self._holding)

    def _depart(self, number: int, departure: Removal) -> PrunedPrefix:
        """Some vision rows leave before stage `number`. What is left runs anew, but for a withdrawal done before."""
        front, before = self._prefix, self._pruned_prefix
        first = self._cut == len(self._stages)
        here = front.line(number) if first or before is None else before
        line = here.left(departure, front.is_vision)
        again = first and before is not None and before.history == line.history and not departure.kept.any()
        if not again:
            self._pruned_prefix = line
        self._cut = number if first else self._cut
        self._cuts.append(Cut(self._stages[number].first, departure.by, line.present[front.is_vision]))
        return line

    def _room(self, number: int, line: PrunedPrefix) -> StageCache:
        """The cache of a stage after rows have left: no slot for those that never enter it."""
        wanted, cache = self.capacity - (self._prefix.size - line.size), self._pruned.get(number)
        withdrawn = line.size == self._prefix.text_size
        if cache is None or cache.capacity < wanted or (withdrawn and cache.capacity > wanted):
            self._pruned.pop(number, None)  # freed before the next one is made
            cache = self._pruned[number] = self._backend.stage(number, wanted)
        return cache

    # ---- caches that shrink after the prompt -------------------------------------------------------------------------

    def _shrink(self, numbers: Iterable[int], survivors: Mask, tail: int) -> None:
        """Leave in these stages' caches only the survivors of the front, and the tail (MustDrop section 3.5).

        What a full stage loses is set aside for the next question. Until all is done the session knows no front, so
        that an interrupt costs a computation and not its truth.
        """
        front, self._prefix, self._pruned_prefix = self._prefix, self._nothing(), None
        aside, seats = [], list(self._layouts)
        for number in numbers:
            seat, cache = seats[number], self._cache(number)
            stays = survivors[seat.present]
            if stays.all():
                continue
            kept, dropped = np.flatnonzero(stays), np.flatnonzero(~stays)
            if number < self._cut:
                aside.append(SavedKV(number, kept, dropped, cache.read(dropped)))
            moved = np.concatenate([kept, np.arange(seat.slots, seat.slots + tail)])
            cache.write(np.arange(len(moved)), cache.read(moved), length=len(moved))
            seats[number] = replace(seat, slots=len(kept))
        self._layouts, self._prefix = seats, replace(front, aside=tuple(aside))

    def _restore(self) -> None:
        """Put back what full stages have lost."""
        front = self._prefix
        if not front.aside:
            return
        self._prefix = self._nothing()
        for lost in front.aside:
            cache = self._full[lost.stage]
            cache.write(lost.survivors, cache.read(np.arange(len(lost.survivors))), length=front.size)
            cache.write(lost.dropped, lost.kv, length=front.size)
        self._prefix = replace(front, aside=())

    # ---- the report --------------------------------------------------------------------------------------------------

    def _report(self, logits: NDArray[np.float32], reused: bool) -> PrefillResult:
        is_vision = self._prefix.is_vision
        kept = [int((seat.present & is_vision).sum()) for seat in self._layouts]
        gone = kept.index(0) if is_vision.any() and 0 in kept else None
        return PrefillResult(
            logits=logits,
            k=None if gone is None else self._stages[gone].first,
            reused_image=reused,
            vision_tokens=int(is_vision.sum()),
            slots=self._per_layer([self._cache(number).length for number in range(len(self._stages))]),
            vision_kept=self._per_layer(kept),
            images=self._prefix.images,
            cuts=tuple(self._cuts),
            asked=self._asked,
        )

    def _per_layer(self, values: Sequence[int]) -> tuple[int, ...]:
        """One value a stage, repeated for each of its layers."""
        return tuple(v for v, stage in zip(values, self._stages, strict=True) for _ in range(stage.layers))
