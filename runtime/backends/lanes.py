"""Lanes: the caches of several conversations in one array a stage, so that one run can reach all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import forget, zeros_in_small_pages

CACHES_OF_ONE = 2  # that a conversation has of a stage: full and pruned


@dataclass(frozen=True, slots=True)
class Lane:
    """The place of one conversation's K and V in a stage's pool; `kv` is a view of it, [layers, 2, ...]."""

    number: int
    kv: NDArray[Any]


class LanePool:
    """Room for the caches of `lanes` conversations in one stage, `kv` [layers, 2, lanes, *shape].

    It is address space until a lane is written to, and a lane that is given back returns its memory. Safe for threads.

    Raises:
        MemoryError: the address space or the system's limit is exhausted.

    """

    def __init__(self, layers: int, lanes: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.kv = zeros_in_small_pages((layers, 2, lanes, *shape), dtype, reserved=False)
        self._free = list(reversed(range(lanes)))
        self._lock = threading.Lock()

    def take(self) -> Lane | None:
        """A free lane, None where there is none."""
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
        return Lane(number, self.kv[:, :, number])

    def give_back(self, number: int) -> None:
        """Free a lane and its memory."""
        for layer in self.kv[:, :, number]:
            for part in layer:
                forget(part)
        with self._lock:
            self._free.append(number)
