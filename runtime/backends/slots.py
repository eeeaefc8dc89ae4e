"""The slots of a stage's cache: counted and guarded once, whatever engine runs the stage."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class SlotCounter(ABC):
    """What every `StageCache` shares: `length` of `capacity` slots are filled, and no run may fill more.

    Slots are forgotten by being counted no longer.
    """

    spares_rows = False

    def __init__(self, capacity: int) -> None:
        self.length, self.capacity = 0, capacity

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, rows: Ids | None = None
    ) -> HiddenStates:
        """As `StageCache` says."""
        count = len(tokens)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} tokens in a cache of {self.capacity} slots")
        out = self._run(tokens, positions, query=query) if rows is None else self._run_for(rows, tokens, positions)
        self.length += count
        return out

    def keep(self, length: int) -> None:
        """Forget every slot from `length` on."""
        assert length <= self.length, (length, self.length)
        self.length = length

    @abstractmethod
    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        """Run the stage; K/V go into the slots from `length` on, which are counted afterwards."""

    def _run_for(self, rows: Ids, tokens: TokenStates, positions: Ids) -> HiddenStates:
        """`_run`, and of the hidden states those of `rows`; an engine that need not compute the others has its own."""
        return self._run(tokens, positions, query=False)[rows]
