"""Actions one after the other: the next chunk is computed while the robot executes the last."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vtx.runtime.api.acting import Cameras
from vtx.runtime.api.chunks import MOST, Continuation
from vtx.runtime.api.model import Model
from vtx.runtime.checks import check_whole


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
