"""Blocks of K and V that the caches of a stage hold: some of them alone, those of a common prefix together."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import forget, zeros_in_small_pages
from vtx.runtime.backends.openvino.paged import BLOCK
from vtx.runtime.backends.slots import Lane


class BlockTable:
    """The blocks of one cache: `numbers` in the pool, of which the first `held` are taken."""

    def __init__(self, lane: Lane, blocks: int) -> None:
        self.lane = lane
        self.held = 0
        self.numbers = np.zeros(blocks, np.int32)


class BlockPool:
    """Room for `caches` of `blocks` blocks each, `kv` [2, blocks of all, *shape] of each layer's `shapes`.

    It is only address space until a block is written to, and memory returns once no cache holds a block. Unless
    `reserved`, it may be larger than the machine's. A block that several caches hold is copied before one of them
    writes to it. Safe for threads. Raises MemoryError: the address space or the system's limit is exhausted.
    """

    def __init__(
        self, shapes: Iterable[Sequence[int]], caches: int, blocks: int, dtype: np.dtype[Any], *, reserved: bool = False
    ) -> None:
        self.kv = [zeros_in_small_pages((2, caches * blocks, *shape), dtype, reserved=reserved) for shape in shapes]
        self._users = np.zeros(caches * blocks, np.int32)  # of each block
        self._free = list(range(caches * blocks))  # heaps: the lowest is taken first
        self._lanes = list(range(caches))
        self._lock = threading.RLock()  # a cache that is collected meanwhile may give its blocks back within it

    @property
    def taken(self) -> int:
        """Blocks that caches hold, each counted once."""
        return len(self._users) - len(self._free)

    def take(self, blocks: int) -> BlockTable | None:
        """A table for a cache of at most this many blocks; None if there are as many caches as may be."""
        with self._lock:
            return BlockTable(Lane(heapq.heappop(self._lanes)), blocks) if self._lanes else None

    def give_back(self, table: BlockTable) -> None:
        """Free a table, and the memory of blocks that no other cache holds."""
        with self._lock:
            numbers = table.numbers[: table.held].copy()
            table.held = 0
            self._users[numbers] -= 1
            self._vacate(np.sort(numbers[self._users[numbers] == 0]))
            heapq.heappush(self._lanes, table.lane.number)

    def hold(self, table: BlockTable, first: int, count: int) -> None:
        """Have `count` blocks in a table, those from number `first` on for this cache alone."""
        for place in range(min(first, table.held), count):
            if place < table.held and self._users[table.numbers[place]] == 1:
                continue
            with self._lock:
                number = heapq.heappop(self._free)
                shared = int(table.numbers[place])
                self._users[number] = 1
                if place < table.held:
                    for layer in self.kv:
                        layer[:, number] = layer[:, shared]
                    self._users[shared] -= 1
                    if not self._users[shared]:
                        self._vacate(np.array([shared]))
                table.numbers[place] = number
                table.held = max(table.held, place + 1)

    def share(self, table: BlockTable, other: BlockTable, count: int) -> None:
        """Have the first `count` blocks of another table in an empty one."""
        assert not table.held, "it holds blocks"
        with self._lock:
            table.numbers[:count] = other.numbers[:count]
            self._users[table.numbers[:count]] += 1
            table.held = count

    def slots(self, table: BlockTable) -> int:
        """Slots that a table holds; of blocks of several caches each has its share."""
        return round(BLOCK * float((1 / self._users[table.numbers[: table.held]]).sum()))

    def _vacate(self, numbers: NDArray[Any]) -> None:
        """Free blocks, in order, and their memory, neighbours together: pages may hold several."""
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else ():
            for layer in self.kv:
                for part in layer:
                    forget(part[run[0] : run[-1] + 1])
        for number in numbers.tolist():
            heapq.heappush(self._free, number)
