"""The slots of a stage's cache: counted and guarded once, whatever engine runs the stage."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vtx.runtime.backends.lanes import Lane
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class SlotCounter(ABC):
    """The base of every `StageCache`: `length` of `capacity` slots are filled, and no run may fill more.

    Slots are forgotten by lowering `length`. `lane`: the cache's lane in a pool, None outside a pool.
    """

    selects_outputs = False
    lane: Lane | None = None

    def __init__(self, capacity: int) -> None:
        self.length, self.capacity = 0, capacity

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        """See `StageCache`."""
        count = len(tokens)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} tokens in a cache of {self.capacity} slots")
        if outputs is None:
            out = self._run(tokens, positions, query=query)
        else:
            out = self._run_for(outputs, tokens, positions)
        self.length += count
        return out

    def keep(self, length: int) -> None:
        """Forget every slot from `length` on."""
        assert length <= self.length, f"a cache of {self.length} tokens cannot keep {length}"
        self.length = length

    @abstractmethod
    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        """Run the stage; K/V go into the slots from `length` on, which are counted afterwards."""

    def _run_for(self, outputs: Ids, tokens: TokenStates, positions: Ids) -> HiddenStates:
        """`_run`, for the hidden states of `outputs`. Overridden for engines that need not compute the others."""
        return self._run(tokens, positions, query=False)[outputs]
