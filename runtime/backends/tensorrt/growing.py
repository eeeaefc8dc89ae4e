"""K and V of one stage in device memory, for engines whose caches grow: the `plain` dialect, TensorRT before 10.15.

Such an engine reads a past of [1, kv_heads, slots, head_dim] for each layer and writes a present that is longer by the
number of new tokens, so there are two buffers that take turns, each laid out for exactly as many slots as it holds.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.backends.tensorrt.cache import DECODE, PREFILL, SavedSlots, runs
from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates


class GrowingMemory:
    """The two buffers [layers, 2] parts of [kv_heads, slots, head_dim]: `now` is laid out for `held` slots."""

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, capacity: int) -> None:
        self.capacity, self.part = capacity, context.bytes_of(capacity)
        purpose = f"the KV cache of layers {spec.first} to {spec.last}"
        self.now, self.next = (Buffer(context.cuda, 2 * len(spec.cached) * self.part, purpose) for _ in range(2))
        self.queries = Queries(context)
        self.held = 0

    def clear(self) -> None:
        self.held = 0

    def swap(self, held: int) -> None:
        self.now, self.next, self.held = self.next, self.now, held


class GrowingStageCache(SlotCounter):
    """`StageCache` of two buffers that take turns; slots are dropped when next used."""

    reserved_whole = True

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        super().__init__(capacity)
        self._context, self._spec, self._graph = context, spec, graph
        self._kv_heads, self._head_dim = context.model.kv_heads, context.model.head_dim
        self._unit = context.slot_bytes
        self.memory = context.borrow(self, spec.first, capacity, partial(GrowingMemory, context, spec, capacity))
        self._part = self.memory.part

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        queries, longest = self.memory.queries, self._context.engines.longest(self._graph)
        with self._context.cuda:
            self._lay_out(self.length)
            if query:
                queries.room(len(tokens))
            out = []
            for start in range(0, len(tokens), longest):
                end = min(start + longest, len(tokens))
                address = queries.address(start) if query else None
                out.append(self._run_part(tokens.part(start, end), positions[start:end], address))
        return np.concatenate(out)

    def _run_part(self, tokens: TokenStates, positions: Ids, queries: int | None) -> HiddenStates:
        """Run from `now` to `next`, which then change places."""
        shared, cuda, memory, count = self._context, self._context.cuda, self.memory, len(tokens)
        engines = shared.engines
        context = engines.context(self._graph, DECODE if count == 1 else PREFILL)
        inputs = shared.inputs_of(self._spec, tokens, positions[None])
        shapes: dict[str, tuple[int, ...]] = {name: array.shape for name, array in inputs.items()}
        shapes |= {name: (shared.max_context, self._head_dim // 2) for name in shared.rope}
        addresses = {name: engines.address(name) for name in (*inputs, names.HIDDEN_OUT)}
        addresses |= {name: buffer.address for name, buffer in shared.rope.items()}
        if self._spec.query:
            addresses[names.QUERY] = queries or engines.address(names.QUERY)
        past = (1, self._kv_heads, memory.held, self._head_dim)
        for number, layer in enumerate(self._spec.cached):
            for half, (before, after) in enumerate(_CACHES):
                offset = (2 * number + half) * self._part
                addresses |= {before(layer): memory.now.address + offset, after(layer): memory.next.address + offset}
                shapes[before(layer)] = past
        context.bind(shapes, addresses)
        for name, array in inputs.items():
            cuda.copy_in(addresses[name], array)
        context.enqueue()
        out = np.empty((count, shared.model.hidden), np.float32)
        cuda.copy_out(out, addresses[names.HIDDEN_OUT])
        cuda.wait()
        memory.swap(memory.held + count)
        return out

    def attention(self, *, last_only: bool = False) -> Scores:
        with self._context.cuda:
            self._lay_out(self.length)
            key = self.memory.now.address + (len(self._spec.cached) - 1) * 2 * self._part
            return self.memory.queries.attention(key, self.length, self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        cuda = self._context.cuda
        keys = np.empty((self._kv_heads, self.length, self._head_dim), self._context.kv_dtype)
        with self._context.cuda:
            self._lay_out(self.length)
            cuda.copy_out(keys, self.memory.now.address + (len(self._spec.cached) - 1) * 2 * self._part)
            cuda.wait()
        return keys.astype(np.float32)

    def read(self, slots: Ids) -> SavedSlots:
        count = len(slots)
        with self._context.cuda:
            self._lay_out(self.length)
            nbytes = max(1, 2 * len(self._spec.cached) * self._kv_heads * count * self._unit)
            kept = SavedSlots(Buffer(self._context.cuda, nbytes, "K/V set aside"), count)
            for part in range(2 * len(self._spec.cached)):
                for start, first, run in runs(slots):
                    self._copy(
                        kept.buffer, part, count, start, self.memory.now, part, self.memory.held, first, run, kept=True
                    )
            self._context.cuda.wait()
        return kept

    def write(self, slots: Ids, kv: SavedSlots, *, length: int) -> None:
        assert len(slots) == kv.count
        with self._context.cuda:
            self._lay_out(length)
            for part in range(2 * len(self._spec.cached)):
                for start, first, run in runs(slots):
                    self._copy(self.memory.now, part, length, first, kv.buffer, part, kv.count, start, run, kept=False)
            self._context.cuda.wait()
        self.fill(length)

    def _lay_out(self, length: int) -> None:
        """Lay the buffer out for `length` slots; the first that it held stay."""
        if self.memory.held == length:
            return
        stay = min(self.memory.held, length)
        if stay:
            for part in range(2 * len(self._spec.cached)):
                self._copy(self.memory.next, part, length, 0, self.memory.now, part, self.memory.held, 0, stay)
            self._context.cuda.wait()
        self.memory.swap(length)

    def _copy(
        self, to: Buffer, to_part: int, to_slots: int, to_slot: int,
        source: Buffer, part: int, slots: int, slot: int, count: int, *, kept: bool | None = None,
    ) -> None:  # fmt: skip
        """`count` slots of a part, between buffers; `kept`: `to` (or else `source`) is packed."""
        packed = self._kv_heads * self._unit
        to_at = to.address + to_part * (packed * to_slots if kept is True else self._part) + to_slot * self._unit
        at = source.address + part * (packed * slots if kept is False else self._part) + slot * self._unit
        pitches = to_slots * self._unit, slots * self._unit
        self._context.cuda.copy_rows(to_at, pitches[0], at, pitches[1], count * self._unit, self._kv_heads)


_CACHES = ((names.past_key, names.present_key), (names.past_value, names.present_value))
