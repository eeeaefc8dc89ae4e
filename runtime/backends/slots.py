"""The slots and states of a stage's cache, whatever engine runs it, and lanes: several caches in one array."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import forget, zeros_in_small_pages
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

BLOCK = 32  # slots that become resident together
GROWTH = 256  # slots by which a GPU's memory grows: each time is a new context, a copy of K and V and a new recording
LANES = 8  # conversations that a GPU decodes in one run, at most
RECENT = 16  # last tokens of a run or an answer that a cache goes back among: text that is tokenized anew
TRIED = 65  # tokens of a run that may all leave again but for the first ones: one and the longest draft
STATE_BYTES = 8 << 20  # of one layer's states: fewer tokens are gone back among, or tried, where states are large
CACHES_OF_ONE = 2  # that a conversation has of a stage: full and pruned


@dataclass(slots=True, eq=False)
class Lane:
    """The part of a stage's pool for one conversation's K and V."""

    number: int


class LanePool:
    """Room for the caches of `lanes` conversations in one stage, `kv` [2, lanes, *shape] of each layer's `shapes`.

    It is only address space until a lane is written to, and `give_back` returns a lane's memory. Safe for threads.
    Raises MemoryError: the address space or the system's limit is exhausted.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], lanes: int, dtype: np.dtype[Any]) -> None:
        self.kv = [zeros_in_small_pages((2, lanes, *shape), dtype, reserved=False) for shape in shapes]
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
            lane_number = lane.number
            lane.number = number
            self._vacate(lane_number)

    def _vacate(self, number: int) -> None:
        for layer in self.kv:
            for part in layer[:, number]:
                forget(part)
        self._free.add(number)


def seen_slots(tokens: TokenStates, length: int) -> Ids:
    """The number of first slots that each token [n] sees which follows `length` filled ones, its own among them.

    Tokens of one group, which stand together, see as far as the last of them.
    """
    counts = length + np.arange(1, len(tokens) + 1, dtype=np.int64)
    groups = tokens.inputs.get(names.GROUP)
    if groups is not None:
        for group in np.unique(groups[groups >= 0]):
            members = np.flatnonzero(groups[:, 0] == group)
            counts[members] = counts[members[-1]]
    return counts


def begin_of_group(tokens: TokenStates, number: int) -> int:
    """Of these tokens the first of the group that the n-th one continues, or the n-th."""
    groups = tokens.inputs.get(names.GROUP)
    if groups is None or not 0 < number < len(groups) or groups[number, 0] < 0:
        return number
    return min(number, int(np.argmax(groups[:, 0] == groups[number, 0])))


def run_ends(tokens: TokenStates, first: int, end: int, most: int | None) -> list[int]:
    """Ends of runs of the tokens from `first` to before `end`, nearly alike and of `most` at most, but for one group.

    No group is cut in two.
    """
    count = -(-(end - first) // most) if most else 1
    sizes = np.cumsum([len(part) for part in np.array_split(np.arange(end - first), count)])
    return sorted({begin_of_group(tokens, first + int(size)) for size in sizes} - {first})


def part_ends(tokens: TokenStates, most: int) -> list[int]:
    """Ends of parts of these tokens, each of `most` at most, but for one group, since none is cut in two."""
    ends = [0]
    count = len(tokens)
    while ends[-1] < count:
        end = begin_of_group(tokens, min(ends[-1] + most, count))
        if end == ends[-1]:  # a group that is longer
            end = next(n for n in range(end + 1, count + 1) if begin_of_group(tokens, n) == n)
        ends.append(end)
    return ends[1:]


class SlotCounter(ABC):
    """The base of every `StageCache`: `length` of `capacity` slots are filled, and no run may fill more.

    Slots are forgotten by lowering `length`. `window`: the positions that a token sees in layers that slide, and
    `positions` those of the tokens in slots; None if no layer slides. `lane`: the cache's lane in a pool, None outside
    a pool. `resident`: slots that hold memory: those that were ever filled, in blocks, or all of them if the engine
    reserves its caches whole. `states` are those of layers that keep a state, None if the stage has none.
    """

    selects_outputs = False
    run_limit: int | None = None  # tokens of a run, unless queries are kept; a group goes in one all the same
    reserved_whole = False
    lane: Lane | None = None

    def __init__(self, capacity: int, window: int | None = None, states: StateHistory | None = None) -> None:
        self.states = states
        self.capacity = capacity
        self._resident = capacity if self.reserved_whole else 0
        self.length = 0
        self.window = window
        self.positions = None if window is None else np.zeros(capacity, np.int64)

    @property
    def resident(self) -> int:
        return self._resident

    def fill(self, length: int) -> None:
        """Count the first `length` slots as filled."""
        self.length = length
        if length > self._resident:
            self._resident = min(self.capacity, -(-length // BLOCK) * BLOCK)

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        """See `StageCache`."""
        count = len(tokens.hidden)
        if self.run_limit is not None and count > self.run_limit and not query:
            parts: list[HiddenStates] = []
            for first, end in pairwise([0, *run_ends(tokens, 0, count, self.run_limit)]):
                part = tokens.part(first, end)
                at = positions[first:end]
                self.place(at)
                parts.append(self._run(part, at, query=False).copy())
                self.fill(self.length + end - first)
            table = np.concatenate(parts)
            return table if outputs is None else table[outputs]
        filled = self.length + count
        if filled > self.capacity:
            raise AssertionError(f"{filled} tokens in a cache of {self.capacity} slots, {self.length} of them before")
        if self.positions is not None:
            self.place(positions)
        if outputs is None:
            out = self._run(tokens, positions, query=query)
        else:
            out = self._run_for(outputs, tokens, positions)
        self.fill(filled)
        return out

    def place(self, positions: Ids) -> None:
        """Note the positions of tokens that are about to fill the next slots."""
        if self.positions is not None:
            self.positions[self.length : self.length + len(positions)] = positions

    def first_slots(self, positions: Ids, filled: int) -> Ids:
        """The first of `filled` slots within the window of each of these tokens, which have the last of them."""
        assert self.positions is not None
        assert self.window is not None
        return np.searchsorted(self.positions[:filled], positions - self.window, side="right")

    def read(self, slots: Ids) -> Any:
        """See `StageCache`."""
        content = self._read(slots)
        return content if self.positions is None else (content, self.positions[slots])

    def write(self, slots: Ids, kv: Any, *, length: int) -> None:
        """See `StageCache`."""
        if self.positions is not None:
            kv, self.positions[slots] = kv
        self._write(slots, kv, length)
        self.fill(length)

    def keep(self, length: int) -> None:
        """Forget every slot from `length` on."""
        assert length <= self.length, f"a cache of {self.length} tokens cannot keep {length}"
        if self.states is not None:
            self.states.keep(length)
        self.length = length

    def mark(self, length: int) -> None:
        """See `StageCache`."""
        if self.states is not None:
            self.states.mark(length)

    @property
    def tried(self) -> int:
        """See `StageCache`."""
        return TRIED if self.states is None else self.states.tried

    @property
    def state_bytes(self) -> int:
        """See `StageCache`."""
        return 0 if self.states is None else self.states.nbytes

    def nearest(self, length: int) -> int:
        """See `StageCache`."""
        return length if self.states is None else self.states.nearest(length)

    def copy(self, other: SlotCounter, length: int) -> None:
        """See `StageCache`."""
        self._copy(other, length)
        if self.positions is not None and other.positions is not None:
            self.positions[:length] = other.positions[:length]
        self.fill(length)
        if self.states is not None and other.states is not None:
            self.states.take(other.states, length)

    @abstractmethod
    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        """Run the stage; K/V go into the slots from `length` on, which are counted afterwards."""

    @abstractmethod
    def _read(self, slots: Ids) -> Any:
        """A copy of the K/V of some slots."""

    @abstractmethod
    def _write(self, slots: Ids, kv: Any, length: int) -> None:
        """Put K/V that `_read` returned into the same number of slots; `length` will be filled."""

    def _copy(self, other: Any, length: int) -> None:
        """Put another cache's first slots into the same ones."""
        self.write(np.arange(length), other.read(np.arange(length)), length=length)

    def _run_for(self, outputs: Ids, tokens: TokenStates, positions: Ids) -> HiddenStates:
        """`_run`, for the hidden states of `outputs`. Overridden for engines that need not compute the others."""
        return self._run(tokens, positions, query=False)[outputs]


class ReadingCounter(SlotCounter):
    """The base of caches of stages whose layers keep nothing: they read K and V of earlier stages' caches.

    The tokens of a run are in the last slots of these already.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        out = self._run(tokens, positions, query=query)
        return out if outputs is None else out[outputs]

    def keep(self, length: int) -> None:
        """Nothing is held."""

    def attention(self, *, last_only: bool = False) -> Scores:
        raise AssertionError("no reduction reads the attention of these layers")

    def keys(self) -> NDArray[np.float32]:
        raise AssertionError("these layers have no keys")

    def _read(self, slots: Ids) -> Any:
        raise AssertionError("nothing is held")

    def _write(self, slots: Ids, kv: Any, length: int) -> None:
        raise AssertionError("nothing is held")


@dataclass(frozen=True, slots=True)
class HeldStates:
    """The number of states that a cache holds, by the size of one."""

    model: ModelSpec

    @property
    def _fitting(self) -> int:
        return max(1, STATE_BYTES // (4 * self.model.state_numbers))

    @property
    def recent(self) -> int:
        """Last tokens whose states are held."""
        return min(RECENT, self._fitting)

    @property
    def tried(self) -> int:
        """Tokens of a run that has the state after each of them held."""
        return min(TRIED, self._fitting)

    @property
    def ends(self) -> int:
        """The most states of one run: of each of few tokens, or of the last ones and of every mark."""
        return max(self.tried, 2 * self.recent + 1)


class StateHistory:
    """States [layers, numbers] by the number of tokens that they have seen.

    After 0 tokens they are zeros. Kept are those of the last tokens, and those of `marks`: the first one, which is the
    image's end, and the last ones. A state cannot be cut as slots can: a cache that goes back to another number of
    tokens goes back to the `nearest` one before, and runs the tokens between again. `tried`: tokens of a run that has
    the state after each of them held. `since`: where tokens began that run in several parts, which all of them can
    leave again; None: in one.

    While tokens run one by one nothing is copied: a run reads the state `before` it where it is held, and writes the
    next one into `room`, which is the memory of one that is held no more, and is then held itself.
    """

    def __init__(self, spec: StageSpec, model: ModelSpec) -> None:
        self.shape = (len(spec.stateful), model.state_numbers)
        states = HeldStates(model)
        self.recent = states.recent
        self.tried = states.tried
        self.marks = set[int]()
        self.since: int | None = None
        self._held: dict[int, Any] = {0: self._zeros()}
        self._room: Any = None

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in (*self._held.values(), self._room) if state is not None)

    def at(self, length: int) -> HiddenStates:
        """The state after `length` tokens, which must be held."""
        state: HiddenStates = self._held[length]
        return state

    def before(self, length: int) -> Any:
        """The state after `length` tokens as a run of one conversation takes it, [layers, 1, numbers]: the held one."""
        return self._held[length][:, None]

    def room(self, ends: int) -> Any:
        """Memory for the states after that many tokens of one run, [layers, 1, ends, numbers], to be `put`."""
        layers, numbers = self.shape
        if ends > 1:
            return np.empty((layers, 1, ends, numbers), np.float32)
        if self._room is None:
            self._room = np.empty(self.shape, np.float32)
        return self._room[:, None, None]

    def nearest(self, length: int) -> int:
        """The most tokens, at most `length`, whose state is held."""
        return max(length_of_state for length_of_state in self._held if length_of_state <= length)

    def mark(self, length: int) -> None:
        """Have the state after `length` tokens held, now or once they have run."""
        self.marks.add(length)
        if len(self.marks) > 1 + self.recent:
            self.marks.remove(sorted(self.marks)[1])

    def ends(self, length: int, count: int, *, more: bool = False) -> Ids:
        """The numbers of a run's `count` tokens, behind `length` others, after which states are to be held.

        `more`: another run follows at once, so that only the last token of this one is gone back to, and marks.
        """
        first = count if more else count - self.recent + 1 if count > self.tried else 1
        recent = range(max(1, first), count + 1)
        marked = {mark - length for mark in self.marks if 0 < mark - length <= count}
        return np.array(sorted(marked.union(recent)), np.int64)

    def put(self, length: int, ends: Ids, states: Any) -> None:
        """Hold the states [layers, ends, numbers] of a run from `length` on; older ones go, but for marks.

        They are copied, unless they are the one in `room`, which becomes the history's own.
        """
        layers, numbers = self.shape
        if self._room is not None and np.shares_memory(states, self._room):
            rooms = {length + int(ends[0]): self._room}
            self._room = None
        else:
            by_end = states.reshape(layers, len(ends), numbers)
            rooms = {length + int(end): by_end[:, number].copy() for number, end in enumerate(ends)}
        self._forget(self._outlived(length) | {*rooms})
        self._held |= rooms

    def _outlived(self, length: int) -> set[int]:
        """Places that go when tokens have run behind `length`: old states, and those of a run behind it that failed."""
        oldest = (length if self.since is None else self.since) - self.recent
        return {at for at in self._held if at > length or (at and at not in self.marks and at <= oldest)}

    def keep(self, length: int) -> None:
        """Forget what comes behind `length` tokens, whose state must be held."""
        assert length in self._held, f"the state after {length} tokens is not held"
        self._forget({at for at in self._held if at > length})
        self.marks = {mark for mark in self.marks if mark <= length}

    def take(self, other: StateHistory, length: int) -> None:
        """Hold a copy of the state of another cache after `length` tokens, and mark it."""
        if length:
            self._forget({length})
            self._held[length] = other.at(length).copy()
        self.mark(length)

    def _zeros(self) -> Any:
        return np.zeros(self.shape, np.float32)

    def _forget(self, lengths: Iterable[int]) -> None:
        """Drop states, and have the memory of one as room for the next."""
        for at in lengths:
            if (gone := self._held.pop(at, None)) is not None and self._room is None:
                self._room = gone
