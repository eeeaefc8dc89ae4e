"""Hidden states in a GPU's memory, which go from one stage to the next without the host in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool, runs
from vtx.runtime.backends.slots import BLOCK
from vtx.runtime.vision.tokens import HiddenStates

FLOAT = np.dtype(np.float32)


class StatesMemory:
    """Device memory for the hidden states of `capacity` tokens."""

    def __init__(self, cuda: Cuda, capacity: int, width: int) -> None:
        self.capacity = capacity
        purpose = f"the memory of the hidden states of {capacity} tokens"
        self.buffer = Buffer(cuda, FLOAT.itemsize * capacity * width, purpose)

    def clear(self) -> None:
        """Nothing is read before it is written."""


class _Lease:
    """The use of some memory, by all the states that lie in it; the last of them gives it back."""


@dataclass(frozen=True, slots=True)
class StatesPool:
    """Makes the hidden states of a backend, `width` numbers a token, in memory that is used again."""

    cuda: Cuda
    width: int
    memory: MemoryPool

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's state."""
        return FLOAT.itemsize * self.width

    def empty(self, tokens: int) -> DeviceStates:
        """States [tokens, width] that are yet to be written. Memory has powers of two, so that prompts share it."""
        capacity = max(BLOCK, 1 << (tokens - 1).bit_length()) if tokens else BLOCK
        with self.cuda:
            # stages are numbered by their first layer, from 1
            memory = self.memory.borrow(-capacity, capacity, lambda count: StatesMemory(self.cuda, count, self.width))
        lease = _Lease()
        self.memory.give_back_with(lease, -capacity, [memory])
        return DeviceStates(self, lease, memory.buffer.address, tokens)

    def joined(self, parts: Sequence[HiddenStates]) -> DeviceStates:
        """States of the host and of the device one after the other, as a copy."""
        out = self.empty(sum(map(len, parts)))
        start = 0
        with self.cuda:
            for part in parts:
                put(self.cuda, out.row(start), part)
                start += len(part)
        return out


def put(cuda: Cuda, address: int, states: Any) -> None:
    """Queue a copy of an array of the host, or of states of the device, to an address."""
    if not isinstance(states, DeviceStates):
        cuda.copy_in(address, np.ascontiguousarray(states))
    elif nbytes := states.nbytes:
        cuda.copy_rows(address, nbytes, states.row(0), nbytes, nbytes, 1)


class DeviceStates:
    """Hidden states [tokens, width] float32 in a GPU's memory, which numpy reads as an array of the host.

    As of arrays, a slice is a view, and masks, indices, `copy` and np.concatenate make copies, on the device. One token
    by its number is an array of the host. All work is queued on the one stream of the backend.
    """

    __slots__ = ("_address", "_lease", "_pool", "_tokens")
    dtype, ndim = FLOAT, 2

    def __init__(self, pool: StatesPool, lease: object, address: int, tokens: int) -> None:
        self._pool = pool
        self._lease = lease
        self._address = address
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @property
    def shape(self) -> tuple[int, int]:
        return self._tokens, self._pool.width

    @property
    def nbytes(self) -> int:
        return self._tokens * self._pool.row_bytes

    @property
    def address(self) -> int:
        return self._address

    def row(self, token: int) -> int:
        """The address of a token's state."""
        return self._address + token * self._pool.row_bytes

    def as_states(self) -> HiddenStates:
        """Itself, as sessions handle it: like an array."""
        return cast(HiddenStates, self)

    def copy(self) -> DeviceStates:
        return self._pool.joined([self.as_states()])

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            start, end, step = which.indices(self._tokens)
            assert step == 1, "states of the device are not skipped"
            return DeviceStates(self._pool, self._lease, self.row(start), max(0, end - start))
        if isinstance(which, int | np.integer):
            if not -self._tokens <= which < self._tokens:
                raise IndexError(f"token {which} of {self._tokens}")
            token = int(which) % self._tokens
            return np.asarray(self[token : token + 1])[0]
        tokens = np.arange(self._tokens)[which]
        if not len(tokens):
            return self[:0]
        return self._pool.joined([self[first : first + count] for _, first, count in runs(tokens)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("hidden states of a device can only be copied to the host")
        out = np.empty(self.shape, FLOAT)
        cuda = self._pool.cuda
        if out.nbytes:
            with cuda:
                cuda.copy_out(out, self._address)
                cuda.wait()
        return out if dtype is None else out.astype(dtype)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, named: Any) -> Any:
        if function is not np.concatenate or len(args) != 1 or named:
            return NotImplemented
        return self._pool.joined(args[0])
