"""K and V of one stage in device memory, and the stage's runs over them.

The buffer is [layers, 2] parts of [slots, kv_heads, head_dim]. It has the slots that the conversation needs, and is
replaced by a longer one as that grows: tokens that have left the decoder take no memory behind the cut. A stage reads
the slots before its tokens and writes theirs. Prompts run in as many parts as the engine's profile asks for; `step.py`
decodes. Memory and what is recorded over it go from one conversation to the next.

Layers that keep a state have theirs in the history of `device_history.py`. A stage reads and writes them there, but for
decoding, whose recorded work needs one address: it has a copy of the last one, of which it makes the next one.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import ALIGNMENT, Buffer, Graph, SavedSlots, aligned, runs
from vtx.runtime.backends.device_history import DeviceStateHistory
from vtx.runtime.backends.device_states import FLOAT, put
from vtx.runtime.backends.slots import BLOCK, SlotCounter
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext, new_slots
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import rope_at
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

_numbers = itertools.count()
PAST_AND_PRESENT = ((names.past_key, names.present_key), (names.past_value, names.present_value))
DECODE, PREFILL = 0, -1  # of an engine's profiles, which may be one and the same


ONE = np.ones(1, np.int64)  # the numbers of a run's tokens whose states are given out, if it is of one token


class BoundStates(NamedTuple):
    """Addresses of the state before a run, of those that it gives out, and of the numbers of their tokens."""

    given: int
    made: int
    ends: int
    number: int


class DeviceSlots:
    """A stage's K and V with what is bound to them: its context for one token, and that token's position.

    `state`, if its layers keep one, is the last state of `version`, and behind it the number of the one token.

    `number` is never that of another one; `recordings` are of steps that end with this memory, by the numbers of
    all stages' memories; None once one has run.
    """

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        cuda = shared.cuda
        self._shared, self._spec, self.capacity = shared, spec, capacity
        self.number, self.recordings = next(_numbers), dict[tuple[int, ...], Graph | None]()
        self.part, self.parts = shared.bytes_of(capacity), 2 * len(spec.cached)
        self.kv = Buffer(cuda, max(1, self.parts * self.part), f"the KV cache of layers {spec.first} to {spec.last}")
        self.state: Buffer | None = None
        self.state_bytes, self.version = FLOAT.itemsize * len(spec.stateful) * shared.model.state_numbers, 0
        states: BoundStates | None = None
        if spec.stateful:
            room = aligned(self.state_bytes)
            self.state = Buffer(cuda, room + ONE.nbytes, f"the state of layers {spec.first} to {spec.last}")
            cuda.copy_in(self.state.address + room, ONE)
            made = shared.engines.address(names.STATE_OUT)
            states = BoundStates(self.state.address, made, self.state.address + room, 1)
        self.queries = Queries(shared)
        self.position, self.total = cuda.pinned((1, 1), np.int64), cuda.pinned((1,), np.int32)
        self.decode = shared.engines.new_context(graph, DECODE, captures=True)
        self.bind(self.decode, 1, capacity, *self.new_slots(1), states=states)
        self.clear()

    def load(self, states: DeviceStateHistory, length: int) -> None:
        """Have the state after `length` tokens for the next one."""
        assert self.state is not None
        if self.version != states.version(length):
            source, nbytes = states.before(length).address, self.state_bytes
            self._shared.cuda.copy_rows(self.state.address, nbytes, source, nbytes, nbytes, 1)
        self.version = 0  # until the token has run

    def turn(self) -> None:
        """Queue the copy of the state that a token's run gave out to the place of the one that it took."""
        if self.state is not None:
            made, nbytes = self._shared.engines.address(names.STATE_OUT), self.state_bytes
            self._shared.cuda.copy_rows(self.state.address, nbytes, made, nbytes, nbytes, 1)

    def save(self, states: DeviceStateHistory, length: int) -> None:
        """Copy the state after the token that ran behind `length` others to the history."""
        assert self.state is not None
        room, nbytes = states.room(1), self.state_bytes
        self._shared.cuda.copy_rows(room.address, nbytes, self.state.address, nbytes, nbytes, 1)
        states.put(length, ONE, room)
        self.version = states.version(length + 1)

    def clear(self) -> None:
        self.version = 0
        self._shared.cuda.zero(self.kv)  # masked slots must still be numbers
        self._shared.cuda.wait()

    def take_over(self, other: DeviceSlots, length: int) -> None:
        row, cuda = self._shared.row_bytes, self._shared.cuda
        cuda.copy_rows(self.kv.address, self.part, other.kv.address, other.part, length * row, self.parts)
        cuda.wait()

    def new_slots(self, tokens: int) -> tuple[int, int]:
        """The address of the first part of the buffer for new K and V, and the bytes from one part to the next."""
        if not self.parts:
            return 0, 0
        return self._shared.engines.address(new_slots(self._spec)), aligned(tokens * self._shared.row_bytes)

    def put(self, start: int, tokens: int) -> None:
        """Copy new K and V from their buffer to the slots from `start` on."""
        shared, (source, pitch) = self._shared, self.new_slots(tokens)
        to, width = self.kv.address + start * shared.row_bytes, tokens * shared.row_bytes
        shared.cuda.copy_rows(to, self.part, source, pitch, width, self.parts)

    def bind(
        self, to: Context, tokens: int, filled: int, new: int, pitch: int, queries: int | None = None, *,
        turned: bool = False, states: BoundStates | None = None,
    ) -> None:  # fmt: skip
        """Bind a context for `tokens` tokens after `filled` slots; K and V go to `new`, a part each `pitch` bytes.

        `turned`: the rotary tables have a row for each token.
        """
        shared, address, model = self._shared, self._shared.engines.address, self._shared.model
        addresses = {
            **{name: address(name) for name in (names.HIDDEN, names.HIDDEN_OUT, names.POSITIONS, names.TOTAL_SLOTS)},
            **{name: buffer.address for name, buffer in (shared.turned if turned else shared.rope).items()},
        }
        shapes: dict[str, tuple[int, ...]] = {names.HIDDEN: (tokens, model.hidden), names.POSITIONS: (1, tokens)}
        if self._spec.query:
            addresses[names.QUERY] = queries or address(names.QUERY)
        for number, layer in enumerate(self._spec.cached):
            for half, (past, present) in enumerate(PAST_AND_PRESENT):
                part = 2 * number + half
                addresses |= {past(layer): self.kv.address + part * self.part, present(layer): new + part * pitch}
                shapes[past(layer)] = (1, filled, model.kv_heads, model.head_dim)
        for name, width in shared.widths(self._spec).items():
            shapes[names.token_input(name)] = (tokens, width)
            addresses[names.token_input(name)] = address(names.token_input(name))
        if states is not None:
            addresses |= {names.STATE: states.given, names.STATE_OUT: states.made, names.STATE_ENDS: states.ends}
            shapes[names.STATE_ENDS] = (states.number,)
        to.bind(shapes, addresses)


class TensorrtStageCache(SlotCounter):
    """`StageCache` over engines that read filled slots and write new ones behind them."""

    states: DeviceStateHistory | None

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        super().__init__(capacity, states=context.new_states(spec))
        self._context, self._spec, self._graph = context, spec, graph
        self._parts = 2 * len(spec.cached)
        self._held: list[DeviceSlots] = []  # its memory, once it has any
        context.pool.give_back_with(self, spec.first, self._held)

    @property
    def memory(self) -> DeviceSlots:
        return self._held[0]

    def _make(self, capacity: int) -> DeviceSlots:
        return DeviceSlots(self._context, self._spec, self._graph, capacity)

    def _last_keys(self) -> tuple[int, tuple[int, ...]]:
        """The address and shape of the keys of the stage's last layer."""
        memory, model = self.memory, self._context.model
        return memory.kv.address + (self._parts - 2) * memory.part, (1, self.length, model.kv_heads, model.head_dim)

    def make_room(self, slots: int) -> None:
        """Have memory for `slots` slots. If there is not enough, the cache stays as it is."""
        if self._held and self.memory.capacity >= slots:
            return
        capacity = min(self.capacity, -(-slots // BLOCK) * BLOCK)
        longer = self._context.pool.borrow(self._spec.first, capacity, self._make)
        if self._held and self.length:
            longer.take_over(self.memory, self.length)
        self._held[:] = [longer]
        self._resident = longer.capacity

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        shared, longest = self._context, self._context.engines.longest(self._graph)
        with shared.cuda, nullcontext() if self.states is None else self.states.in_parts(self.length):
            self.make_room(self.length + len(tokens))
            out = shared.states.empty(len(tokens))
            if query:
                self.memory.queries.room(len(tokens))
            for start in range(0, len(tokens), longest):
                end = min(start + longest, len(tokens))
                address = self.memory.queries.address(start) if query else None
                part, more = tokens.part(start, end), end < len(tokens)
                self._run_part(part, positions[start:end], self.length + end, address, out.row(start), more=more)
            shared.cuda.wait()
        return out.as_states()

    def attention(self, *, last_only: bool = False) -> Scores:
        with self._context.cuda:
            return self.memory.queries.attention(*self._last_keys(), self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        cuda = self._context.cuda
        with cuda:
            address, shape = self._last_keys()
            keys = np.empty(shape[1:], self._context.kv_dtype)
            cuda.copy_out(keys, address)
            cuda.wait()
        return keys.astype(np.float32).transpose(1, 0, 2)

    def _read(self, slots: Ids) -> SavedSlots:
        context = self._context
        with context.cuda:
            nbytes = max(1, self._parts * len(slots) * context.row_bytes)
            kept = SavedSlots(Buffer(context.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, kept, out=True)
        return kept

    def _write(self, slots: Ids, kv: SavedSlots, length: int) -> None:
        assert len(slots) == kv.count
        with self._context.cuda:
            self.make_room(length)
            self._move(slots, kv, out=False)

    def _move(self, slots: Ids, kept: SavedSlots, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        row, cuda = self._context.row_bytes, self._context.cuda
        for start, first, count in runs(slots):
            packed = (kept.buffer.address + start * row, kept.count * row)
            ends = [packed, (self.memory.kv.address + first * row, self.memory.part)]
            (to, to_pitch), (source, pitch) = ends if out else reversed(ends)
            cuda.copy_rows(to, to_pitch, source, pitch, count * row, self._parts)
        cuda.wait()

    def _run_part(
        self, tokens: TokenStates, positions: Ids, total: int, queries: int | None, out: int, *, more: bool
    ) -> None:
        """Queue the run of some tokens, the last of `total`; their hidden states go to the address `out`.

        `more`: further ones follow in another run.
        """
        shared, memory, count = self._context, self.memory, len(tokens)
        engines, cuda, start = shared.engines, shared.cuda, total - count
        context = engines.context(self._graph, DECODE if count == 1 else PREFILL)
        in_place = shared.row_bytes % ALIGNMENT == 0  # else no slot but the first has an address that TensorRT takes
        new = (memory.kv.address + start * shared.row_bytes, memory.part) if in_place else memory.new_slots(count)
        turned = positions.ndim > 1
        ends, bound, made = ONE, None, None
        if self.states is not None:
            ends = self.states.ends(start, count, more=more)
            made = self.states.room(len(ends))
            given = self.states.before(start).address
            bound = BoundStates(given, made.address, engines.address(names.STATE_ENDS), len(ends))
            put(cuda, bound.ends, ends)
        memory.bind(context, count, start, *new, queries, turned=turned, states=bound)
        if turned:
            tables = shared.tables[names.COS], shared.tables[names.SIN]
            cos, sin = rope_at(tables, shared.model.rope.axes, positions)
            for name, rows in ((names.COS, cos), (names.SIN, sin)):
                cuda.copy_in(shared.turned[name].address, rows)
            positions = np.arange(count)
        for name, array in shared.inputs_of(self._spec, tokens, positions).items():
            put(cuda, engines.address(name), array)
        put(cuda, engines.address(names.TOTAL_SLOTS), np.array([total], np.int32))
        context.enqueue()
        if not in_place:
            memory.put(start, count)
        if self.states is not None and made is not None:
            self.states.put(start, ends, made)
        nbytes = count * shared.states.row_bytes
        cuda.copy_rows(out, nbytes, engines.address(names.HIDDEN_OUT), nbytes, nbytes, 1)
