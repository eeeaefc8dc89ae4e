"""Chunks of actions that continue each other.

The guidance is that of LeRobot's real-time chunking. It is the paper's (Black, Galliker and Levine 2025, "Real-Time
Execution of Action Chunking Flow Policies", arXiv:2506.07339, Algorithm 1) without the gradient through the expert,
which is taken as constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vtx.runtime.checks import check_number, check_whole
from vtx.runtime.errors import RequestError
from vtx.runtime.session.acting import Numbers

SCHEDULES = ("linear", "exp", "ones", "zeros")
MOST = 1 << 20  # actions


@dataclass(frozen=True, slots=True)
class Continuation:
    """A guide for a chunk: the actions `left` of the last one, [n, action size], not executed when it begins.

    The first `delay` of them are executed while the chunk is computed; the chunk repeats these, and those up to
    `overlap` by weights that fall by the `schedule` (linear, exp, ones or zeros). `strength` bounds the guidance.
    """

    left: ArrayLike
    delay: int
    overlap: int = 10
    schedule: str = "linear"
    strength: float = 10.0

    def __post_init__(self) -> None:
        check_whole("delay", self.delay, 0, MOST)
        check_whole("overlap", self.overlap, 0, MOST)
        check_number("strength", self.strength, "a number from 1e-6 to 1e6", least=1e-6, most=1e6)
        if self.schedule not in SCHEDULES:
            raise RequestError(f"schedule is {self.schedule!r:.40}; it must be one of {', '.join(SCHEDULES)}")

    def weights(self, count: int, horizon: int) -> Numbers:
        """The share of the guidance in each action [horizon], of `count` actions that are left."""
        end = min(self.overlap, count)
        start = min(self.delay, end)
        weights = np.zeros(horizon, np.float32)
        weights[:start] = 1
        if self.schedule == "zeros":
            return weights
        between = np.linspace(1, 0, end - start + 2, dtype=np.float32)[1:-1]
        if self.schedule == "exp":
            between = between * np.expm1(between) / np.float32(math.e - 1)
        weights[start:end] = 1 if self.schedule == "ones" else between
        return weights


@dataclass(frozen=True, slots=True)
class ChunkGuide:
    """The guidance of a chunk towards `actions` [horizon, width] by `weights` [horizon]."""

    actions: Numbers
    weights: Numbers
    strength: float

    def __call__(self, noisy: Numbers, velocity: Numbers, time: float) -> Numbers:
        """The velocity at a time from 1 to 0, turned towards the actions."""
        error = (self.actions - (noisy - np.float32(time) * velocity)) * self.weights[:, None]
        passed = 1 - time
        most = self.strength
        if passed > 0:
            most = min(most, time / passed * (time**2 + passed**2) / time**2)
        return velocity - np.float32(most) * error
