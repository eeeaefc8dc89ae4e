"""The states of a stage's convolution layers after some of the tokens in its cache, for a cache that goes back."""

from __future__ import annotations

import numpy as np

from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids

RECENT = 16  # last tokens of a run or an answer that a cache goes back among: text that is tokenized anew
TRIED = 65  # tokens of a run that may all leave again but for the first ones: one and the longest draft


class StateHistory:
    """States [layers, columns, hidden] by the number of tokens that they have seen; after 0 tokens they are zeros.

    Kept are those of the last tokens, and those of `marks`. A state cannot be cut as slots can: a cache that goes back
    to another number of tokens goes back to the `nearest` one before, and runs the tokens between again.
    """

    def __init__(self, spec: StageSpec, model: ModelSpec) -> None:
        self.shape = len(spec.stateful), model.conv_taps - 1, model.hidden
        self.marks = set[int]()
        self._held: dict[int, HiddenStates] = {0: np.zeros(self.shape, np.float32)}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._held.values())

    def at(self, length: int) -> HiddenStates:
        """The state after `length` tokens, which must be held."""
        return self._held[length]

    def nearest(self, length: int) -> int:
        """The most tokens, at most `length`, whose state is held."""
        return max(held for held in self._held if held <= length)

    def ends(self, length: int, count: int) -> Ids:
        """The numbers of a run's `count` tokens, behind `length` others, after which states are to be held."""
        recent = range(max(1, count - RECENT + 1) if count > TRIED else 1, count + 1)
        marked = {mark - length for mark in self.marks if 0 < mark - length <= count}
        return np.array(sorted(marked.union(recent)), np.int64)

    def put(self, length: int, ends: Ids, states: HiddenStates) -> None:
        """Hold the states [layers, ends * columns, hidden] of a run from `length` on; older ones go, but for marks."""
        layers, columns, hidden = self.shape
        apart = states.reshape(layers, len(ends), columns, hidden)
        kept = {at: state for at, state in self._held.items() if at in self.marks or at > length - RECENT or not at}
        self._held = kept | {length + int(end): apart[:, number].copy() for number, end in enumerate(ends)}

    def keep(self, length: int) -> None:
        """Forget what comes behind `length` tokens, whose state must be held."""
        assert length in self._held, f"the state after {length} tokens is not held"
        self._held = {at: state for at, state in self._held.items() if at <= length}
        self.marks = {mark for mark in self.marks if mark <= length}

    def take(self, other: StateHistory, length: int) -> None:
        """Hold the state of another cache after `length` tokens, and mark it."""
        self._held[length] = other.at(length)
        self.marks.add(length)
