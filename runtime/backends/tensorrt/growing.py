"""K and V of one stage in device memory, for engines whose caches grow: the `plain` dialect, TensorRT before 10.15.

Such an engine reads a past of [1, kv_heads, slots, head_dim] for each layer and writes a present that is longer by the
number of new tokens, so there are two buffers that take turns, each laid out for exactly as many slots as it holds.
"""

from __future__ import annotations

import numpy as np

from vtx.runtime.backends.tensorrt.cache import DECODE, PAST_AND_PRESENT, PREFILL, DeviceCache, SavedSlots, runs
from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class GrowingMemory:
    """The two buffers [layers, 2] parts of [kv_heads, slots, head_dim]: `now` is laid out for `held` slots."""

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, capacity: int) -> None:
        self._shared, self.capacity = shared, capacity
        self.part, self.parts = shared.bytes_of(capacity), 2 * len(spec.cached)
        purpose = f"the KV cache of layers {spec.first} to {spec.last}"
        self.now, self.next = (Buffer(shared.cuda, self.parts * self.part, purpose) for _ in range(2))
        self.queries = Queries(shared)
        self.held = 0

    def clear(self) -> None:
        self.held = 0

    def take_over(self, other: GrowingMemory, length: int) -> None:
        cuda, width = self._shared.cuda, other.held * self._shared.row_bytes
        cuda.copy_rows(self.now.address, self.part, other.now.address, other.part, width, self.parts)
        cuda.wait()
        self.held = other.held

    def swap(self, held: int) -> None:
        self.now, self.next, self.held = self.next, self.now, held


class GrowingStageCache(DeviceCache):
    """`StageCache` of two buffers that take turns; slots are dropped when next used."""

    def _make(self, capacity: int) -> GrowingMemory:
        return GrowingMemory(self._context, self._spec, capacity)

    def _last_keys(self) -> tuple[int, tuple[int, ...]]:
        self._lay_out(self.length)
        memory, model = self.memory, self._context.model
        return memory.now.address + (self._parts - 2) * memory.part, (1, model.kv_heads, self.length, model.head_dim)

    def _run_part(self, tokens: TokenStates, positions: Ids, total: int, queries: int | None) -> HiddenStates:
        """Run from `now` to `next`, which then change places."""
        shared, cuda, memory, count = self._context, self._context.cuda, self.memory, len(tokens)
        engines, model = shared.engines, shared.model
        self._lay_out(total - count)
        context = engines.context(self._graph, DECODE if count == 1 else PREFILL)
        inputs = shared.inputs_of(self._spec, tokens, positions[None])
        shapes: dict[str, tuple[int, ...]] = {name: array.shape for name, array in inputs.items()}
        shapes |= {name: (shared.max_context, model.head_dim // 2) for name in shared.rope}
        addresses = {name: engines.address(name) for name in (*inputs, names.HIDDEN_OUT)}
        addresses |= {name: buffer.address for name, buffer in shared.rope.items()}
        if self._spec.query:
            addresses[names.QUERY] = queries or engines.address(names.QUERY)
        for number, layer in enumerate(self._spec.cached):
            for half, (past, present) in enumerate(PAST_AND_PRESENT):
                offset = (2 * number + half) * memory.part
                addresses |= {past(layer): memory.now.address + offset, present(layer): memory.next.address + offset}
                shapes[past(layer)] = (1, model.kv_heads, memory.held, model.head_dim)
        context.bind(shapes, addresses)
        for name, array in inputs.items():
            cuda.copy_in(addresses[name], array)
        context.enqueue()
        out = np.empty((count, model.hidden), np.float32)
        cuda.copy_out(out, addresses[names.HIDDEN_OUT])
        cuda.wait()
        memory.swap(memory.held + count)
        return out

    def _move(self, slots: Ids, kept: SavedSlots, length: int, *, out: bool) -> None:
        unit, heads, cuda = self._context.slot_bytes, self._context.model.kv_heads, self._context.cuda
        self._lay_out(length)
        cache_pitch, packed_pitch = length * unit, kept.count * unit
        for start, first, count in runs(slots):
            for part in range(self._parts):
                cache = self.memory.now.address + part * self.memory.part + first * unit
                packed = kept.buffer.address + part * heads * packed_pitch + start * unit
                ends = [(packed, packed_pitch), (cache, cache_pitch)]
                (to, to_pitch), (source, pitch) = ends if out else reversed(ends)
                cuda.copy_rows(to, to_pitch, source, pitch, count * unit, heads)
        cuda.wait()

    def _lay_out(self, length: int) -> None:
        """Lay the buffer out for `length` slots, the first of which stay."""
        if not self._held or self.memory.held == length:
            return
        memory, cuda, unit, heads = (
            self.memory,
            self._context.cuda,
            self._context.slot_bytes,
            self._context.model.kv_heads,
        )
        stay = min(memory.held, length)
        for offset in range(0, self._parts * memory.part, memory.part) if stay else ():
            to, source = memory.next.address + offset, memory.now.address + offset
            cuda.copy_rows(to, length * unit, source, memory.held * unit, stay * unit, heads)
        cuda.wait()
        memory.swap(length)
