"""K and V of one stage in device memory, and the stage's runs over them.

The buffer is [layers, 2] parts of [kv_heads, slots, head_dim] with as many slots as the engine was built for; each
layer's K and V are bound as input and output at one address. Decoding one token is recorded into a CUDA graph once and
launched from then on: three small arrays in, the stage, one token's hidden state out. The graph and all memory go from
one conversation to the next. Prompts run in as many parts as the engine's profile asks for.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.backends.tensorrt.cuda import Buffer, Graph
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

log = logging.getLogger(__name__)
DECODE, PREFILL = 0, -1  # of an engine's profiles, which may be one and the same


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """K/V of some slots, [layers, 2, kv_heads, count, head_dim], on the device."""

    buffer: Buffer
    count: int


class InPlaceMemory:
    """A stage's K and V with what is bound to them: its context for one token, that token's arrays, the CUDA graph."""

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str) -> None:
        cuda, hidden = context.cuda, context.model.hidden
        self._cuda, self.capacity = cuda, context.max_context
        size = 2 * len(spec.cached) * context.bytes_of(self.capacity)
        self.kv = Buffer(cuda, size, f"the KV cache of layers {spec.first} to {spec.last}")
        self.queries = Queries(context)
        self.hidden, self.hidden_out = (cuda.pinned((1, hidden), np.float32) for _ in range(2))
        self.position = cuda.pinned((1, 1), np.int64)
        self.inputs = {name: cuda.pinned((1, width), np.float32) for name, width in context.widths(spec).items()}
        self.total = cuda.pinned((1,), np.int32)
        self.decode = context.engines.new_context(graph, DECODE)
        self.steps = 0  # of one token, so far
        self.recordable = self.decode.capturable
        self.recorded: Graph | None = None
        self.clear()

    def clear(self) -> None:
        self._cuda.zero(self.kv)  # masked slots must still be numbers
        self._cuda.wait()


class DeviceCache(SlotCounter):
    """A `StageCache` on the device but for its runs: K and V of each layer in turn lie in parts of equal size."""

    reserved_whole = True
    _queries: Queries

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int, part: int) -> None:
        super().__init__(capacity)
        self._context, self._spec, self._graph = context, spec, graph
        self._parts, self._part = 2 * len(spec.cached), part  # number, bytes

    @abstractmethod
    def _lay_out(self, length: int) -> tuple[int, int]:
        """Make room for `length` slots, the first of which stay: the address of K and V, and the slots of a part."""

    @abstractmethod
    def _run_part(self, tokens: TokenStates, positions: Ids, total: int, queries: int | None) -> HiddenStates: ...

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        longest, out = self._context.engines.longest(self._graph), []
        with self._context.cuda:
            if len(tokens) == 1 and not query:
                return self._decode_one(tokens, positions)
            if query:
                self._queries.room(len(tokens))
            for start in range(0, len(tokens), longest):
                end = min(start + longest, len(tokens))
                address = self._queries.address(start) if query else None
                out.append(self._run_part(tokens.part(start, end), positions[start:end], self.length + end, address))
        return out[0] if len(out) == 1 else np.concatenate(out)  # most prompts are one part

    def _decode_one(self, tokens: TokenStates, positions: Ids) -> HiddenStates:
        return self._run_part(tokens, positions, self.length + 1, None)

    def attention(self, *, last_only: bool = False) -> Scores:
        with self._context.cuda:
            address, slots = self._lay_out(self.length)
            key = address + (self._parts - 2) * self._part
            return self._queries.attention(key, slots, self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        cuda, model = self._context.cuda, self._context.model
        with cuda:
            address, slots = self._lay_out(self.length)
            keys = np.empty((model.kv_heads, slots, model.head_dim), self._context.kv_dtype)
            cuda.copy_out(keys, address + (self._parts - 2) * self._part)
            cuda.wait()
        return keys[:, : self.length].astype(np.float32)

    def read(self, slots: Ids) -> SavedSlots:
        context = self._context
        with context.cuda:
            nbytes = max(1, self._parts * context.model.kv_heads * len(slots) * context.slot_bytes)
            kept = SavedSlots(Buffer(context.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, kept, self.length, out=True)
        return kept

    def write(self, slots: Ids, kv: SavedSlots, *, length: int) -> None:
        assert len(slots) == kv.count
        with self._context.cuda:
            self._move(slots, kv, length, out=False)
        self.fill(length)

    def _move(self, slots: Ids, kept: SavedSlots, length: int, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        unit, heads, cuda = self._context.slot_bytes, self._context.model.kv_heads, self._context.cuda
        address, laid_out = self._lay_out(length)
        cache_pitch, packed_pitch = laid_out * unit, kept.count * unit
        for start, first, count in runs(slots):
            for part in range(self._parts):
                cache = address + part * self._part + first * unit
                packed = kept.buffer.address + part * heads * packed_pitch + start * unit
                ends = [(packed, packed_pitch), (cache, cache_pitch)]
                (to, to_pitch), (source, pitch) = ends if out else reversed(ends)
                cuda.copy_rows(to, to_pitch, source, pitch, count * unit, heads)
        cuda.wait()


class TensorrtStageCache(DeviceCache):
    """`StageCache` updated in place. `capacity` is the requested one; `memory` is as long as the engine wants."""

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        super().__init__(context, spec, graph, capacity, context.bytes_of(context.max_context))
        make = partial(InPlaceMemory, context, spec, graph)
        self.memory = context.borrow(self, spec.first, context.max_context, make)
        self._queries = self.memory.queries

    def _lay_out(self, length: int) -> tuple[int, int]:
        return self.memory.kv.address, self._context.max_context

    def _run_part(self, tokens: TokenStates, positions: Ids, total: int, queries: int | None) -> HiddenStates:
        engines, cuda, count = self._context.engines, self._context.cuda, len(tokens)
        context = self.memory.decode if count == 1 else engines.context(self._graph, PREFILL)
        self._bind(context, count, queries)
        for name, array in self._context.inputs_of(self._spec, tokens, positions).items():
            cuda.copy_in(engines.address(name), array)
        self.memory.total[0] = total
        cuda.copy_in(engines.address(names.TOTAL_SLOTS), self.memory.total)
        context.enqueue()
        out = np.empty((count, self._context.model.hidden), np.float32)
        cuda.copy_out(out, engines.address(names.HIDDEN_OUT))
        cuda.wait()
        return out

    def _bind(self, context: Context, count: int, queries: int | None = None) -> None:
        address = self._context.engines.address
        addresses = {
            **{name: address(name) for name in (names.HIDDEN, names.HIDDEN_OUT, names.POSITIONS, names.TOTAL_SLOTS)},
            **{name: buffer.address for name, buffer in self._context.rope.items()},
        }
        if self._spec.query:
            addresses[names.QUERY] = queries or address(names.QUERY)
        for number, layer in enumerate(self._spec.cached):
            key = self.memory.kv.address + number * 2 * self._part
            addresses |= {name(layer): key for name in (names.past_key, names.present_key)}
            addresses |= {name(layer): key + self._part for name in (names.past_value, names.present_value)}
        shapes = {names.HIDDEN: (count, self._context.model.hidden), names.POSITIONS: (1, count)}
        for name, width in self._context.widths(self._spec).items():
            shapes[names.token_input(name)] = (count, width)
            addresses[names.token_input(name)] = address(names.token_input(name))
        context.bind(shapes, addresses)

    def _decode_one(self, tokens: TokenStates, positions: Ids) -> HiddenStates:
        """One token: the first step is queued, the second recorded, and later ones launch the recording."""
        memory, cuda = self.memory, self._context.cuda
        memory.hidden[:], memory.position[:], memory.total[0] = tokens.hidden, positions, self.length + 1
        for name, array in memory.inputs.items():
            array[:] = tokens.inputs[name]
        self._bind(memory.decode, 1)
        if memory.recorded is None and memory.steps and memory.recordable:
            memory.recorded = cuda.record(self._queue_one)
            memory.recordable = memory.recorded is not None
            if not memory.recordable:
                log.warning("%s cannot be recorded into a CUDA graph; its tokens are queued one by one", self._graph)
        if memory.recorded is not None:
            memory.recorded.launch()
        else:
            self._queue_one()
        cuda.wait()
        memory.steps += 1
        return memory.hidden_out.copy()

    def _queue_one(self) -> None:
        memory, cuda, address = self.memory, self._context.cuda, self._context.engines.address
        cuda.copy_in(address(names.HIDDEN), memory.hidden)
        cuda.copy_in(address(names.POSITIONS), memory.position)
        cuda.copy_in(address(names.TOTAL_SLOTS), memory.total)
        for name, array in memory.inputs.items():
            cuda.copy_in(address(names.token_input(name)), array)
        memory.decode.enqueue()
        cuda.copy_out(memory.hidden_out, address(names.HIDDEN_OUT))


def runs(slots: Ids) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots: (index among `slots`, first slot, number of slots)."""
    if not len(slots):
        return []
    starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, int(slots[a]), b - a) for a, b in pairwise(starts)]
