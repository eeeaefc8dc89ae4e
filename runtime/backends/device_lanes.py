"""Caches in a GPU's memory, and lanes: the slots of several conversations in one buffer, which one run decodes.

A run takes the first lanes. A cache moves into one with its first token in a batch, and back into memory of its own
when something else needs its slots: a prompt, a token alone, or another conversation its lane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from vtx.runtime.backends.cuda import MemoryPool, StageMemory
from vtx.runtime.backends.device_states import DeviceStates
from vtx.runtime.backends.slots import GROWTH, Lane, SlotCounter
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class OwnMemory(StageMemory, Protocol):
    """The slots of one conversation; `regions` are their places."""

    regions: Any

    def take_over(self, regions: Any, length: int) -> None:
        """Queue a copy of the first `length` slots of other memory."""


class LaneMemory(StageMemory, Protocol):
    """Lanes of `capacity` slots each."""

    def at(self, lane: int) -> Any:
        """The places of a lane's slots."""

    def put(self, lane: int, regions: Any, length: int) -> None:
        """Queue a copy of the first `length` slots of other memory to a lane."""

    def run(self, caches: Sequence[Any], tokens: TokenStates, positions: Ids) -> DeviceStates:
        """Queue the run of one token of each of the first lanes, which these caches have; they count it later."""


Memory = TypeVar("Memory", bound=OwnMemory)
Lanes = TypeVar("Lanes", bound=LaneMemory)


class DeviceCache(SlotCounter, Generic[Memory]):
    """A cache whose slots are in memory of its own, once it has any, or in a lane of its stage's."""

    _pool_of_stage: tuple[MemoryPool, int]
    _held: list[Memory]  # its memory, while it is in no lane
    _lanes: DeviceLanes[Any] | None = None  # that its lane is of

    def use(self, pool: MemoryPool, stage: int) -> None:
        """Have memory of a pool's stage, which the next conversation gets."""
        self._pool_of_stage = pool, stage
        self._held = []
        pool.give_back_with(self, stage, self._held)

    @property
    def memory(self) -> Memory:
        self.leave_lane()
        return self._held[0]

    def leave_lane(self) -> None:
        """Have its slots in memory of its own."""
        if self.lane is not None:
            self.make_room(self.length)

    def regions(self) -> Any:
        """The places of its slots, in memory of its own or in its lane; none if it has no slots."""
        if self.lane is not None:
            assert self._lanes is not None
            return self._lanes.regions(self.lane)
        return self._held[0].regions if self._held else []

    def enter_lane(self, lanes: DeviceLanes[Any], lane: Lane) -> None:
        """Its slots are in this lane from now on; its own memory goes to the next conversation."""
        self._lanes = lanes
        self.lane = lane
        pool, stage = self._pool_of_stage
        for memory in self._held:
            pool.give_back(stage, memory)
        self._held.clear()

    def make_room(self, slots: int) -> None:
        """Have memory of its own for `slots` slots. If there is not enough, the cache stays as it is."""
        if self._held and self._held[0].capacity >= slots:
            return
        pool, stage = self._pool_of_stage
        longer = pool.borrow(stage, min(self.capacity, grown(slots)), self._make)
        if self.length:
            longer.take_over(self.regions(), self.length)
        self._held[:] = [longer]
        if self.lane is not None:
            assert self._lanes is not None
            self._lanes.free(self.lane)
            self.lane = None
        self._resident = longer.capacity

    @abstractmethod
    def _make(self, capacity: int) -> Memory:
        """New memory of that capacity."""


def grown(slots: int) -> int:
    """The slots that memory has which is to hold `slots`."""
    return -(-max(1, slots) // GROWTH) * GROWTH


class BatchedRuns(ABC):
    """Runs of a stage of one token of each of up to `lanes` conversations."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def append_parts(self, caches: Sequence[Any], tokens: TokenStates, positions: Ids) -> HiddenStates:
        """Run one of the tokens [n] into each cache, at its position [n]. Returns their hidden states [n, hidden].

        In as many runs as the lanes ask for.
        """
        parts = [
            self.append_each(caches[first:end], tokens.part(first, end), positions[first:end])
            for first, end in pairwise([*range(0, len(caches), self.lanes), len(caches)])
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @abstractmethod
    def append_each(self, caches: Sequence[Any], tokens: TokenStates, positions: Ids) -> HiddenStates:
        """The same in one run."""


class DeviceLanes(BatchedRuns, Generic[Lanes]):
    """The lanes of one stage. All lanes have the slots of the longest conversation of a run, or up to twice as many."""

    def __init__(self, pool: MemoryPool, stage: int, lanes: int, longest: int) -> None:
        super().__init__(lanes)
        self._pool = pool
        self._key = "lanes", stage
        self._longest = longest
        self._memory: Lanes | None = None
        self._caches = WeakValueDictionary[int, DeviceCache[Any]]()  # by lane

    def regions(self, lane: Lane) -> Any:
        """The places of a lane's slots."""
        assert self._memory is not None
        return self._memory.at(lane.number)

    def free(self, lane: Lane) -> None:
        """Free a lane, whose cache has its slots elsewhere now."""
        del self._caches[lane.number]

    def append_each(self, caches: Sequence[Any], tokens: TokenStates, positions: Ids) -> HiddenStates:
        memory = self.gather(caches, 1 + max(cache.length for cache in caches))
        order = order_of(caches)
        ordered = [caches[number] for number in order]
        out = memory.run(ordered, tokens.take(order), positions[order])
        for cache in ordered:
            cache.fill(cache.length + 1)
        states: HiddenStates = out[np.argsort(order)]
        return states

    def gather(self, caches: Sequence[DeviceCache[Any]], slots: int) -> Lanes:
        """Bring caches into the first lanes, which have `slots` slots."""
        capacity = min(self._longest, grown(slots))
        if self._memory is None or not slots <= self._memory.capacity <= 2 * capacity:
            self._memory = self._replace(capacity)
        count = len(caches)
        together = {id(cache) for cache in caches}
        vacant = [number for number in range(count) if id(self._caches.get(number)) not in together]
        for cache in caches:
            if cache.lane is None or cache.lane.number >= count:
                self._enter(cache, vacant.pop(), self._memory)
        return self._memory

    def _enter(self, cache: DeviceCache[Any], number: int, memory: Lanes) -> None:
        """Move a cache to a lane of `memory`; one that is there, and not in this run, leaves it."""
        if number in self._caches:
            self._caches[number].leave_lane()
        if cache.length:
            memory.put(number, cache.regions(), cache.length)
        if cache.lane is not None:
            self.free(cache.lane)
        cache.enter_lane(self, Lane(number))
        self._caches[number] = cache

    def _replace(self, capacity: int) -> Lanes:
        """Lanes of that capacity, once all caches have left those that there are."""
        for cache in [*self._caches.values()]:
            cache.leave_lane()
        if self._memory is not None:
            self._pool.give_back(self._key, self._memory)
            self._memory = None
        return self._pool.borrow(self._key, capacity, self._make)

    @abstractmethod
    def _make(self, capacity: int) -> Lanes:
        """New lanes of that capacity."""


def order_of(caches: Sequence[DeviceCache[Any]]) -> Ids:
    """The numbers of these caches by their lanes."""
    order: Ids = np.argsort([cache.lane.number for cache in caches if cache.lane is not None])
    return order
