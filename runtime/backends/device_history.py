"""The states of layers that keep one in place of K and V, in a GPU's memory, and copied there alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool
from vtx.runtime.backends.device_states import FLOAT
from vtx.runtime.backends.slots import StateHistory
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.vision.tokens import Ids

FEWEST = 8  # states that memory for those of one run has room for, and then powers of two
ONE = np.ones(1, np.int64)  # the numbers of a run's tokens whose states are given out, if it is of one token
_versions = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StatesAt:
    """States in the device's memory, float32: [layers, 1, numbers] or [layers, 1, ends, numbers]."""

    address: int
    shape: tuple[int, ...]


class StateMemory:
    """Device memory for `capacity` states of a stage; `version`, of one state, is never that of another one."""

    def __init__(self, cuda: Cuda, capacity: int, nbytes: int) -> None:
        self.capacity = capacity
        self.version = 0
        self.buffer = Buffer(cuda, capacity * nbytes, f"the states of layers after {capacity} tokens")

    def clear(self) -> None:
        """Nothing is read before it is written."""


class DeviceStateHistory(StateHistory):
    """`StateHistory` in a GPU's memory, which it keeps for its next states, and leaves to the next conversation.

    All work is queued on the one stream of the backend, so that memory may be written anew while a run is still to
    read it.
    """

    def __init__(self, spec: StageSpec, model: ModelSpec, cuda: Cuda, pool: MemoryPool) -> None:
        self._cuda = cuda
        self._pool = pool
        self._bytes = FLOAT.itemsize * len(spec.stateful) * model.state_numbers
        self._one = ("state", self._bytes)  # keys of the pool
        self._several = ("states", self._bytes)
        self._free = list[StateMemory]()
        self._all = list[StateMemory]()  # free or not
        self._run: StateMemory | None = None  # of states of one run until they are put
        pool.give_back_with(self, self._one, self._all)
        super().__init__(spec, model)

    @property
    def nbytes(self) -> int:
        return self._bytes * (len(self._all) + (0 if self._run is None else self._run.capacity))

    @contextmanager
    def in_parts(self, length: int) -> Iterator[None]:
        """While tokens behind `length` run in several parts: the state before all of them stays held."""
        self.since = length
        try:
            yield
        finally:
            self.since = None

    def version(self, length: int) -> int:
        """The version of the state after `length` tokens."""
        return self._memory(length).version

    def before(self, length: int) -> StatesAt:
        layers, numbers = self.shape
        return StatesAt(self._memory(length).buffer.address, (layers, 1, numbers))

    def room(self, ends: int) -> StatesAt:
        layers, numbers = self.shape
        if ends > 1:
            if self._run is None or self._run.capacity < ends:
                capacity = max(FEWEST, 1 << (ends - 1).bit_length())
                states = self._pool.borrow(
                    self._several, capacity, lambda count: StateMemory(self._cuda, count, self._bytes)
                )
                if self._run is not None:  # of a run that failed
                    self._pool.give_back(self._several, self._run)
                self._run = states
            return StatesAt(self._run.buffer.address, (layers, 1, ends, numbers))
        if self._room is None:
            self._room = self._taken()
        return StatesAt(self._room.buffer.address, (layers, 1, 1, numbers))

    def put(self, length: int, ends: Ids, states: StatesAt) -> None:
        self._forget(self._outlived(length) | {length + int(end) for end in ends})
        if self._room is not None and states.address == self._room.buffer.address:
            self._hold(length + int(ends[0]), self._room)
            self._room = None
            return
        layers, numbers = self.shape
        count = len(ends)
        row = FLOAT.itemsize * numbers
        for number, end in enumerate(ends):
            memory = self._taken()
            self._cuda.copy_rows(memory.buffer.address, row, states.address + number * row, count * row, row, layers)
            self._hold(length + int(end), memory)
        if self._run is not None:
            self._pool.give_back(self._several, self._run)
            self._run = None

    def copy_to(self, length: int, address: int, pitch: int = 0) -> None:
        """Queue a copy of the state after `length` tokens to an address, its layers `pitch` bytes apart there."""
        layers, numbers = self.shape
        row = FLOAT.itemsize * numbers
        self._cuda.copy_rows(address, pitch or row, self.before(length).address, row, row, layers)

    def put_from(self, length: int, address: int, pitch: int = 0) -> None:
        """Hold a copy of the state after the one token that ran behind `length` others, which is at an address."""
        layers, numbers = self.shape
        row = FLOAT.itemsize * numbers
        room = self.room(1)
        self._cuda.copy_rows(room.address, row, address, pitch or row, row, layers)
        self.put(length, ONE, room)

    def take(self, other: StateHistory, length: int) -> None:
        assert isinstance(other, DeviceStateHistory)
        if length:
            self._forget({length})
            with self._cuda:
                source = other.before(length)
                memory = self._taken()
                self._cuda.copy_rows(memory.buffer.address, self._bytes, source.address, self._bytes, self._bytes, 1)
            self._hold(length, memory)
        self.mark(length)

    def _zeros(self) -> None:
        """Made when they are asked for: a cache takes no memory before its first token."""

    def _memory(self, length: int) -> StateMemory:
        if self._held[length] is None:
            zeros = self._taken()
            self._cuda.zero(zeros.buffer)
            self._hold(length, zeros)
        memory: StateMemory = self._held[length]
        return memory

    def _hold(self, length: int, memory: StateMemory) -> None:
        memory.version = next(_versions)
        self._held[length] = memory

    def _taken(self) -> StateMemory:
        """Memory of one state that is free, or else more of it."""
        if self._free:
            return self._free.pop()
        self._all.append(self._pool.borrow(self._one, 1, lambda _: StateMemory(self._cuda, 1, self._bytes)))
        return self._all[-1]

    def _forget(self, lengths: Iterable[int]) -> None:
        self._free += [memory for at in lengths if (memory := self._held.pop(at, None)) is not None]
