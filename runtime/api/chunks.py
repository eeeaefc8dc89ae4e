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
<<<<<<< HEAD
=======


class ActionLoop:
    """Actions one at a time for a robot of a fixed rate; the next chunk is computed by a thread meanwhile.

    A chunk is begun after `every` actions of the last one, from the observation of that moment, and continues it.
    `delay` is the number of actions that a computation is expected to take, until one took more. `options` are those of
    `Model.act`, the fields of `Continuation` those of the guidance. Not safe for two threads at once.
    """

    def __init__(
        self, model: Model, instruction: str, *, every: int = 10, delay: int = 1, guidance: Any = None, **options: Any
    ) -> None:
        check_whole("every", every, 1, MOST)
        check_whole("delay", delay, 0, MOST)
        self._model = model
        self._instruction = instruction
        self._every = every
        self._guidance = dict(guidance or {})
        self._options = options
        self._left = deque[NDArray[np.float32]]()
        self._taken = 0  # since the last chunk, or since the next one was begun
        self._next: Future[NDArray[np.float32]] | None = None
        self._thread = ThreadPoolExecutor(1, "vtx-actions")
        self.delay = delay

    @property
    def computing(self) -> bool:
        """True while the next chunk is computed."""
        return self._next is not None and not self._next.done()

    def step(self, images: Cameras, state: ArrayLike | None = None) -> NDArray[np.float32]:
        """The next action [action size]. Waits only if there is none, at the beginning or if a chunk is late.

        Raises what `Model.act` raises; the loop can go on then.
        """
        if self._next is None and (not self._left or self._taken >= self._every):
            self._begin(images, state)
        if self._next is not None and (self._next.done() or not self._left):
            self._join()
        self._taken += 1
        return self._left.popleft()

    def close(self) -> None:
        """Wait for the thread; what it computes is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> ActionLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, images: Cameras, state: ArrayLike | None) -> None:
        after = None
        if self._left:
            after = Continuation(np.array(self._left), min(self.delay, len(self._left)), **self._guidance)
        self._taken = 0
        self._next = self._thread.submit(
            self._model.act, images, self._instruction, state, after=after, **self._options
        )

    def _join(self) -> None:
        """Replace the actions that are left by those of the next chunk, without those for the time that passed."""
        assert self._next is not None
        future = self._next
        self._next = None
        late = self._taken
        chunk = future.result()
        self.delay = max(self.delay, late)
        self._left = deque(chunk[min(late, len(chunk) - 1) :])
        self._taken = 0
>>>>>>> robots
