"""One token of each of several conversations in one run of a stage, which reads its weights once.

Conversations that decode together have lanes: K and V of all of them in one buffer, [lanes, capacity, kv_heads,
head_dim] of each layer. A run takes the first lanes. A cache moves into one with its first token in a batch, and back
into memory of its own when something else needs its slots: a prompt, a token alone, or another conversation its lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from vtx.runtime.backends.cuda import Buffer, Graph
from vtx.runtime.backends.device_states import put
from vtx.runtime.backends.slots import GROWTH, Lane
from vtx.runtime.backends.tensorrt.binding import DECODE, kv_bindings, token_bindings
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext, new_slots
from vtx.runtime.backends.tensorrt.regions import Region, copy_slots
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class LaneMemory:
    """K and V of `lanes` conversations of `capacity` slots each, and the runs over the first lanes, by their number.

    A run is queued once, then recorded, and launched from then on, as of one token.
    """

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, lanes: int, capacity: int) -> None:
        self.capacity = capacity
        self._shared = shared
        self._spec = spec
        self._graph = graph
        self._layout = shared.layout(spec)
        slots = lanes * capacity
        purpose = f"the KV caches of layers {spec.first} to {spec.last} of {lanes} conversations"
        self._kv = Buffer(shared.cuda, self._layout.nbytes(slots), purpose)
        self._regions = self._layout.regions(self._kv.address, slots)
        self._contexts = dict[int, Context]()
        self._recordings = dict[int, Graph | Literal[False] | None]()
        self.clear()

    def clear(self) -> None:
        self._shared.cuda.zero(self._kv)  # masked slots must still be numbers

    def at(self, lane: int, slot: int = 0) -> list[Region]:
        """The parts of a lane from a slot on."""
        return [region.at(lane * self.capacity + slot) for region in self._regions]

    def new_slots(self, count: int) -> list[Region]:
        """The parts of the buffer for the new K and V of `count` tokens."""
        return self._layout.regions(self._shared.engines.address(new_slots(self._spec)), count)

    def run(self, count: int) -> None:
        """Queue the run of one token of each of the first `count` lanes, whose inputs are in place."""
        cuda = self._shared.cuda
        if count not in self._contexts:
            self._contexts[count] = self._bound(count)
        context = self._contexts[count]
        recorded = self._recordings.get(count)
        if count in self._recordings and recorded is None and context.records:
            recorded = (context.capturable and cuda.record(context.enqueue)) or False
        self._recordings[count] = recorded
        if recorded:
            recorded.launch()
        else:
            context.enqueue()

    def _bound(self, count: int) -> Context:
        shared = self._shared
        shapes, addresses = token_bindings(shared, self._spec, (count, 1))
        sizes = count, self.capacity
        kv_shapes, kv_addresses = kv_bindings(shared.model, self._regions, self.new_slots(count), sizes)
        context = shared.engines.new_context(self._graph, DECODE, captures=True)
        context.bind(shapes | kv_shapes, addresses | kv_addresses)
        return context


class TensorrtStageBatch:
    """The lanes of one stage. All lanes have the slots of the longest conversation of a run, or up to twice as many."""

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, lanes: int) -> None:
        self.lanes = lanes
        self._shared = shared
        self._spec = spec
        self._graph = graph
        self._memory: LaneMemory | None = None
        self._caches = WeakValueDictionary[int, TensorrtStageCache]()  # by lane

    def regions(self, lane: Lane) -> list[Region]:
        assert self._memory is not None
        return self._memory.at(lane.number)

    def free(self, lane: Lane) -> None:
        """Free a lane, whose cache has its slots elsewhere now."""
        del self._caches[lane.number]

    def append_each(self, caches: Sequence[TensorrtStageCache], tokens: TokenStates, positions: Ids) -> HiddenStates:
        """Run one of the tokens [n] into each cache, at its position [n]. Returns their hidden states [n, hidden]."""
        memory = self._gather(caches)
        shared = self._shared
        address = shared.engines.address
        count = len(caches)
        lanes = [cache.lane.number for cache in caches if cache.lane is not None]
        order = np.argsort(lanes)
        filled = np.array([caches[number].length + 1 for number in order], np.int32)
        inputs = shared.inputs_of(self._spec, tokens.take(order), positions[order])
        inputs[names.TOTAL_SLOTS] = filled
        if shared.model.two_way is not None:
            inputs[names.SEEN_SLOTS] = filled.astype(np.int64)
        if shared.model.sliding is not None:
            for cache, position in zip(caches, positions, strict=True):
                cache.place(np.array([position]))
            firsts = [caches[n].first_slots(positions[n : n + 1], caches[n].length + 1) for n in order]
            inputs[names.FIRST_SLOT] = np.concatenate(firsts)
        for name, array in inputs.items():
            put(shared.cuda, address(name), array)
        memory.run(count)
        new = memory.new_slots(count)
        for lane, number in enumerate(order):
            cache = caches[number]
            copy_slots(shared.cuda, memory.at(lane, cache.length), [region.at(lane) for region in new], 1)
            cache.fill(cache.length + 1)
        out = shared.states.empty(count)
        nbytes = count * shared.states.row_bytes
        shared.cuda.copy_rows(out.row(0), nbytes, address(names.HIDDEN_OUT), nbytes, nbytes, 1)
        states: HiddenStates = out[np.argsort(order)]
        return states

    def _gather(self, caches: Sequence[TensorrtStageCache]) -> LaneMemory:
        """Bring caches into the first lanes, which have room for one more token of each."""
        slots = max(cache.length for cache in caches) + 1
        capacity = min(self._shared.max_context, -(-slots // GROWTH) * GROWTH)
        if self._memory is None or not slots <= self._memory.capacity <= 2 * capacity:
            self._memory = self._replace(capacity)
        count = len(caches)
        together = {id(cache) for cache in caches}
        vacant = [number for number in range(count) if id(self._caches.get(number)) not in together]
        for cache in caches:
            if cache.lane is None or cache.lane.number >= count:
                self._enter(cache, vacant.pop(), self._memory)
        return self._memory

    def _enter(self, cache: TensorrtStageCache, number: int, memory: LaneMemory) -> None:
        """Move a cache to a lane of `memory`; one that is there, and not in this run, leaves it."""
        if number in self._caches:
            self._caches[number].leave_lane()
        if cache.length:
            copy_slots(self._shared.cuda, memory.at(number), cache.regions(), cache.length)
        if cache.lane is not None:
            self.free(cache.lane)
        cache.enter_lane(self, Lane(number))
        self._caches[number] = cache

    def _replace(self, capacity: int) -> LaneMemory:
        """Lanes of that capacity, once all caches have left those that there are."""
        pool = self._shared.pool
        key = "lanes", self._spec.first
        for cache in [*self._caches.values()]:
            cache.leave_lane()
        if self._memory is not None:
            pool.give_back(key, self._memory)
            self._memory = None
        return pool.borrow(key, capacity, self._make)

    def _make(self, capacity: int) -> LaneMemory:
        return LaneMemory(self._shared, self._spec, self._graph, self.lanes, capacity)
