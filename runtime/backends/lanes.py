"""Lanes: the caches of several conversations in one array a stage, so that one run can reach all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtx.runtime.backends.allocation import forget, zeros_in_small_pages

CACHES_OF_ONE = 2  # that a conversation has of a stage: full and pruned


@dataclass(slots=True, eq=False)
class Lane:
    """The part of a stage's pool for one conversation's K and V."""

    number: int


class LanePool:
    """Room for the caches of `lanes` conversations in one stage, `kv` [layers, 2, lanes, *shape].

    It is only address space until a lane is written to, and `give_back` returns a lane's memory. Safe for threads.

    Raises:
        MemoryError: the address space or the system's limit is exhausted.

    """

    def __init__(self, layers: int, lanes: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.kv = zeros_in_small_pages((layers, 2, lanes, *shape), dtype, reserved=False)
        self._free = set(range(lanes))
        self._lock = threading.RLock()  # a cache that is collected meanwhile may give its lane back within it

    def take(self) -> Lane | None:
        """The first free lane, None if there is none."""
        with self._lock:
            if not self._free:
                return None
            number = min(self._free)
            self._free.remove(number)
        return Lane(number)

    def give_back(self, lane: Lane) -> None:
        """Free a lane and its memory."""
        with self._lock:
            self._vacate(lane.number)

    def move(self, lane: Lane, number: int) -> None:
        """Give a lane a free number. Its content is lost; the owner has a copy."""
        with self._lock:
            self._free.remove(number)
            left, lane.number = lane.number, number
            self._vacate(left)

    def _vacate(self, number: int) -> None:
        for layer in self.kv[:, :, number]:
            for part in layer:
                forget(part)
        self._free.add(number)
