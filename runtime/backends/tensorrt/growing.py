"""K and V of one stage in device memory, for engines whose caches grow: the `plain` dialect, TensorRT before 10.15.

Such an engine reads a past of [1, kv_heads, slots, head_dim] for each layer and writes a present that is longer by the
number of new tokens, so there are two buffers that take turns, each laid out for exactly as many slots as it holds.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from vtx.runtime.backends.tensorrt.cache import DECODE, PREFILL, DeviceCache
from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

_CACHES = ((names.past_key, names.present_key), (names.past_value, names.present_value))


class GrowingMemory:
    """The two buffers [layers, 2] parts of [kv_heads, slots, head_dim]: `now` is laid out for `held` slots."""

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, capacity: int) -> None:
        self.capacity, part = capacity, context.bytes_of(capacity)
        purpose = f"the KV cache of layers {spec.first} to {spec.last}"
        self.now, self.next = (Buffer(context.cuda, 2 * len(spec.cached) * part, purpose) for _ in range(2))
        self.queries = Queries(context)
        self.held = 0

    def clear(self) -> None:
        self.held = 0

    def swap(self, held: int) -> None:
        self.now, self.next, self.held = self.next, self.now, held


class GrowingStageCache(DeviceCache):
    """`StageCache` of two buffers that take turns; slots are dropped when next used."""

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        super().__init__(context, spec, graph, capacity, context.bytes_of(capacity))
        self.memory = context.borrow(self, spec.first, capacity, partial(GrowingMemory, context, spec, capacity))
        self._queries = self.memory.queries

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
            for half, (before, after) in enumerate(_CACHES):
                offset = (2 * number + half) * self._part
                addresses |= {before(layer): memory.now.address + offset, after(layer): memory.next.address + offset}
                shapes[before(layer)] = (1, model.kv_heads, memory.held, model.head_dim)
        context.bind(shapes, addresses)
        for name, array in inputs.items():
            cuda.copy_in(addresses[name], array)
        context.enqueue()
        out = np.empty((count, model.hidden), np.float32)
        cuda.copy_out(out, addresses[names.HIDDEN_OUT])
        cuda.wait()
        memory.swap(memory.held + count)
        return out

    def _lay_out(self, length: int) -> tuple[int, int]:
        memory, cuda, unit = self.memory, self._context.cuda, self._context.slot_bytes
        if memory.held != length:
            stay, heads = min(memory.held, length), self._context.model.kv_heads
            for offset in range(0, self._parts * self._part, self._part) if stay else ():
                to, source = memory.next.address + offset, memory.now.address + offset
                cuda.copy_rows(to, length * unit, source, memory.held * unit, stay * unit, heads)
            cuda.wait()
            memory.swap(length)
        return memory.now.address, length
