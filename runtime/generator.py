"""Random numbers from a seed, which are the same in libvtx."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1


class SplitMix:
    """Steele, Lea and Flood's SplitMix64 (OOPSLA 2014). Without a seed the system's own randomness begins it."""

    def __init__(self, seed: int | None = None) -> None:
        self._state = int.from_bytes(os.urandom(8), "little") if seed is None else seed & MASK

    def uniform(self) -> float:
        """A number in [0, 1) of 53 bits."""
        self._state = self._state + 0x9E3779B97F4A7C15 & MASK
        bits = (self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return ((bits ^ bits >> 31) >> 11) * 2.0**-53

    def choice(self, odds: NDArray[np.float64]) -> int:
        """The number of one of these, each as often as its odds say."""
        bounds = odds.cumsum()
        return int((bounds / bounds[-1]).searchsorted(self.uniform(), side="right"))

    def normals(self, count: int) -> NDArray[np.float32]:
        """Numbers of the standard normal distribution, by Box and Muller."""
        return np.fromiter(self._normals(count), np.float32, count)

    def _normals(self, count: int) -> Iterator[float]:
        for number in range(count):
            if number % 2 == 0:
                radius = math.sqrt(-2 * math.log(1 - self.uniform()))
                angle = 2 * math.pi * self.uniform()
                yield radius * math.cos(angle)
            else:
                yield radius * math.sin(angle)
