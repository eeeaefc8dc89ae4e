"""K and V of one stage in device memory, and the stage's runs over them.

The buffer has parts of [slots, kv_heads, head_dim] for each layer, as `regions.py` says. It has the slots that the
conversation needs, and is replaced by a longer one as that grows: tokens that have left the decoder take no memory
behind the cut. A stage reads the slots before its tokens and writes theirs. Prompts run in as many parts as the
engine's profile asks for; `step.py` decodes. Memory and what is recorded over it go from one conversation to the next.
Layers without K and V of their own read those of earlier stages: `reading.py`.

Layers that keep a state have theirs in the history of `device_history.py`. A stage reads and writes them there, but for
decoding, whose recorded work needs one address: it has a copy of the last one, of which it makes the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import Buffer, SavedSlots, aligned, runs
from vtx.runtime.backends.device_history import ONE, DeviceStateHistory
from vtx.runtime.backends.device_lanes import DeviceCache
from vtx.runtime.backends.device_states import FLOAT, put
from vtx.runtime.backends.slots import part_ends, seen_slots
from vtx.runtime.backends.tensorrt.binding import DECODE, PREFILL, BoundStage, BoundStates, BoundTokens, kv_bindings
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext, new_slots, written_in_place
from vtx.runtime.backends.tensorrt.regions import Region, copy_slots, part
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import rope_at
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates


class DeviceSlots(BoundStage):
    """A stage's K and V for `capacity` slots, with what is bound to them.

    `readers` are bound to them and to the memory of other stages, by the numbers of both. `state`, if its layers keep
    one, is the last state of `version`, and behind it the number of the one token.
    """

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        cuda = shared.cuda
        self.capacity = capacity
        self._layout = shared.layout(spec)
        purpose = f"the KV cache of layers {spec.first} to {spec.last}"
        self.kv = Buffer(cuda, max(1, self._layout.nbytes(capacity)), purpose)
        self.regions = self._layout.regions(self.kv.address, capacity)
        self.queries = Queries(shared)
        self.readers = dict[tuple[int, ...], BoundStage]()
        super().__init__(shared, spec, graph, [names.TOTAL_SLOTS])
        self.state: Buffer | None = None
        self.state_bytes = FLOAT.itemsize * len(spec.stateful) * shared.model.state_numbers
        self.version = 0
        states: BoundStates | None = None
        if spec.stateful:
            room = aligned(self.state_bytes)
            self.state = Buffer(cuda, room + ONE.nbytes, f"the state of layers {spec.first} to {spec.last}")
            cuda.copy_in(self.state.address + room, ONE)
            address = shared.engines.address(names.STATE_OUT)
            states = BoundStates(self.state.address, address, self.state.address + room, 1)
        self.bind(self.decode, BoundTokens(1, capacity, self.new_slots(1)), states=states)
        self.clear()

    def load(self, states: DeviceStateHistory, length: int) -> None:
        """Have the state after `length` tokens for the next one."""
        assert self.state is not None
        if self.version != states.version(length):
            states.copy_to(length, self.state.address)
        self.version = 0  # until the token has run

    def turn(self) -> None:
        """Queue the copy of the state that a token's run gave out to the place of the one that it took."""
        if self.state is not None:
            nbytes = self.state_bytes
            made = self._shared.engines.address(names.STATE_OUT)
            self._shared.cuda.copy_rows(self.state.address, nbytes, made, nbytes, nbytes, 1)

    def save(self, states: DeviceStateHistory, length: int) -> None:
        """Copy the state after the token that ran behind `length` others to the history."""
        assert self.state is not None
        states.put_from(length, self.state.address)
        self.version = states.version(length + 1)

    def clear(self) -> None:
        self.version = 0
        for key in [key for key, graph in self.recordings.items() if graph is False]:
            del self.recordings[key]  # what could not be recorded once is tried again
        self._shared.cuda.zero(self.kv)  # masked slots must still be numbers

    def at(self, slot: int) -> list[Region]:
        """The parts from that slot on."""
        return [region.at(slot) for region in self.regions]

    def take_over(self, regions: Sequence[Region], length: int) -> None:
        """Queue a copy of the first `length` slots of other memory."""
        copy_slots(self._shared.cuda, self.regions, regions, length)

    def new_slots(self, tokens: int) -> list[Region]:
        """The parts of the buffer for new K and V, none if no layer has any."""
        if not self._spec.cached:
            return []
        return self._layout.regions(self._shared.engines.address(new_slots(self._spec)), tokens)

    def put(self, start: int, tokens: int) -> None:
        """Copy new K and V from their buffer to the slots from `start` on."""
        copy_slots(self._shared.cuda, self.at(start), self.new_slots(tokens), tokens)

    def bind(
        self,
        to: Context,
        tokens: BoundTokens,
        queries: int | None = None,
        *,
        turned: bool = False,
        states: BoundStates | None = None,
    ) -> None:
        """Bind a context for a run of tokens."""
        shapes, addresses = self.bind_tokens(tokens.number, queries, turned=turned)
        kv_shapes, kv_addresses = kv_bindings(self._shared.model, self.regions, tokens.new, (1, tokens.filled))
        shapes |= kv_shapes
        addresses |= kv_addresses
        if states is not None:
            addresses |= {names.STATE: states.given, names.STATE_OUT: states.made, names.STATE_ENDS: states.ends}
            shapes[names.STATE] = (len(self._spec.stateful), 1, self._shared.model.state_numbers)
            shapes[names.STATE_ENDS] = (states.number,)
        to.bind(shapes, addresses)


class TensorrtStageCache(DeviceCache[DeviceSlots]):
    """`StageCache` over engines that read filled slots and write new ones behind them."""

    reads = False
    states: DeviceStateHistory | None

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        sliding = context.model.sliding
        super().__init__(capacity, None if sliding is None else sliding.window, context.new_states(spec))
        self._context = context
        self._spec = spec
        self._graph = graph
        self._layout = context.layout(spec)
        self.use(context.pool, spec.first)

    def _make(self, capacity: int) -> DeviceSlots:
        return DeviceSlots(self._context, self._spec, self._graph, capacity)

    def _last_keys(self) -> tuple[int, tuple[int, ...]]:
        """The address and shape of the keys of the stage's last layer."""
        model = self._context.model
        layer = self._spec.cached[-1]
        return part(self.memory.regions, layer, 0), (1, self.length, model.kv_heads, model.heads_of(layer))

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        shared = self._context
        longest = self._context.engines.longest(self._graph)
        parts = list(itertools.pairwise([0, *part_ends(tokens, longest)]))
        shared.engines.check_tokens(self._graph, max((end - start for start, end in parts), default=0))
        with shared.cuda, nullcontext() if self.states is None else self.states.in_parts(self.length):
            self.make_room(self.length + len(tokens))
            out = shared.states.empty(len(tokens))
            if query:
                self.memory.queries.room(len(tokens))
            for start, end in parts:
                address = self.memory.queries.address(start) if query else None
                some = tokens.part(start, end)
                continues = end < len(tokens)
                self._run_part(some, positions[start:end], self.length + end, address, out.row(start), more=continues)
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

    def begin_token(self, position: int) -> None:
        """Have what a token at that position is told, behind the filled slots, and the state before it."""
        filled = self.length + 1
        values = {names.POSITIONS: position, names.TOTAL_SLOTS: self.length + 1}
        if self.window is not None:
            self.place(np.array([position]))
            values[names.FIRST_SLOT] = int(self.first_slots(np.array([position]), filled)[0])
        if self._context.model.two_way is not None:
            values[names.SEEN_SLOTS] = filled
        self.memory.tell(values)
        if self.states is not None:
            self.memory.load(self.states, self.length)

    def end_token(self) -> None:
        """Queue copies of the token's K and V, and of the state after it, to where they are held."""
        self.memory.put(self.length, 1)
        if self.states is not None:
            self.memory.save(self.states, self.length)

    def _read(self, slots: Ids) -> SavedSlots:
        context = self._context
        with context.cuda:
            nbytes = max(1, self._layout.nbytes(len(slots), packed=True))
            saved = SavedSlots(Buffer(context.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, saved, out=True)
        return saved

    def _write(self, slots: Ids, kv: SavedSlots, length: int) -> None:
        assert len(slots) == kv.count
        with self._context.cuda:
            self.make_room(length)
            self._move(slots, kv, out=False)

    def _move(self, slots: Ids, kept: SavedSlots, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        packed = self._layout.regions(kept.buffer.address, kept.count, packed=True)
        cuda = self._context.cuda
        for start, first, count in runs(slots):
            ends = [region.at(start) for region in packed], self.memory.at(first)
            to, source = ends if out else reversed(ends)
            copy_slots(cuda, to, source, count)
        cuda.wait()

    def _run_part(
        self, tokens: TokenStates, positions: Ids, total: int, queries: int | None, out: int, *, more: bool
    ) -> None:
        """Queue the run of some tokens, the last of `total`; their hidden states go to the address `out`.

        `more`: further ones follow in another run.
        """
        shared = self._context
        memory = self.memory
        count = len(tokens)
        engines = shared.engines
        cuda = shared.cuda
        start = total - count
        context = engines.context(self._graph, DECODE if count == 1 else PREFILL)
        in_place = written_in_place(self._layout)
        new = memory.at(start) if in_place else memory.new_slots(count)
        inputs: dict[str, NDArray[Any]] = {names.TOTAL_SLOTS: np.array([total], np.int32)}
        if self.window is not None:
            inputs[names.FIRST_SLOT] = self.first_slots(positions, total)
        if shared.model.two_way is not None:
            inputs[names.SEEN_SLOTS] = seen_slots(tokens, start)
        turned = positions.ndim > 1
        ends = ONE
        bound = None
        states_out = None
        if self.states is not None:
            ends = self.states.ends(start, count, more=more)
            states_out = self.states.room(len(ends))
            states_in = self.states.before(start).address
            bound = BoundStates(states_in, states_out.address, engines.address(names.STATE_ENDS), len(ends))
            inputs[names.STATE_ENDS] = ends
        memory.bind(context, BoundTokens(count, start, new), queries, turned=turned, states=bound)
        if turned:
            tables = shared.tables[names.COS], shared.tables[names.SIN]
            cos, sin = rope_at(tables, shared.model.rope.axes, positions)
            for name, rows in ((names.COS, cos), (names.SIN, sin)):
                cuda.copy_in(shared.turned[name].address, rows)
            positions = np.arange(count)
        for name, array in (shared.inputs_of(self._spec, tokens, positions) | inputs).items():
            put(cuda, engines.address(name), array)
        context.enqueue()
        if not in_place:
            memory.put(start, count)
        if self.states is not None and states_out is not None:
            self.states.put(start, ends, states_out)
        nbytes = count * shared.states.row_bytes
        cuda.copy_rows(out, nbytes, engines.address(names.HIDDEN_OUT), nbytes, nbytes, 1)
