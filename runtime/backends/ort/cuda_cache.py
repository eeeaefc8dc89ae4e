"""K and V in the GPU's memory, for onnxruntime's CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import ALIGNMENT, Buffer, SavedSlots, aligned, runs
from vtx.runtime.backends.device_history import DeviceStateHistory, StatesAt
from vtx.runtime.backends.device_lanes import DeviceCache
from vtx.runtime.backends.device_states import FLOAT, DeviceStates, StatesPool
from vtx.runtime.backends.ort.cache import OrtCacheContext, OrtStage, OrtStageCache
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

PROMPT_RUN = 1024  # tokens of a prompt in one run, which bounds the working memory of a session


class OrtCudaStage(OrtStage):
    """A stage whose K and V and hidden states are in the GPU's memory, bound by their addresses.

    `unsynchronised` are onnxruntime.RunOptions of a run that is queued on the stream.
    """

    def __init__(
        self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec, states: StatesPool, options: Any
    ) -> None:
        super().__init__(context, graph, spec)
        self.states = states
        self.kv_type = np.dtype(context.kv_dtype)
        self.cuda = states.cuda
        self.pool = states.memory
        self.slot_bytes = context.model.head_dim * self.kv_type.itemsize  # of one slot of one head, K or V
        self.unsynchronised = options

    def shape(self, slots: int, lanes: int = 1) -> tuple[int, int, int, int]:
        return lanes, self.context.model.kv_heads, slots, self.context.model.head_dim

    def copy_heads(self, to: OrtRegion, source: OrtRegion, slots: int) -> None:
        """Queue a copy of some slots of every head."""
        unit = self.slot_bytes
        heads = self.context.model.kv_heads
        self.cuda.copy_rows(to.address, to.slots * unit, source.address, source.slots * unit, slots * unit, heads)

    def copy_slots(self, to: Sequence[OrtRegion], source: Sequence[OrtRegion], slots: int) -> None:
        """Queue a copy of the first slots of every layer's K and V."""
        for into, out_of in zip(to, source, strict=True):
            self.copy_heads(into, out_of, slots)

    def new_states(self) -> DeviceStateHistory | None:
        return DeviceStateHistory(self.spec, self.context.model, self.cuda, self.pool) if self.spec.stateful else None

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], kv: Sequence[Any]) -> Any:
        sides = inputs, outputs
        there = [{n: x for n, x in side.items() if isinstance(x, DeviceStates | StatesAt)} for side in sides]
        of_host = [
            {n: x for n, x in side.items() if n not in on_device} for side, on_device in zip(sides, there, strict=True)
        ]
        binding = super().bind(of_host[0], of_host[1], kv)
        self.bind_states(binding, *there)
        return binding

    def bind_states(self, binding: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Bind hidden states of the device, and states of layers."""
        for bind, side in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, x in side.items():
                bind(name, *self.context.memory, FLOAT, x.shape, x.address)

    def bind_kv(self, binding: Any, kv: Sequence[OrtDeviceSlots]) -> None:
        for memory in kv:
            self.bind_lanes(binding, memory.regions, 1)

    def bind_lanes(self, binding: Any, regions: Sequence[OrtRegion], lanes: int) -> None:
        """Bind K and V that begin there of one conversation, or of several behind one another."""
        for (past, present), region in zip(self.kv_names, regions, strict=True):
            place = (*self.context.memory, self.kv_type, self.shape(region.slots, lanes), region.address)
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)


class OrtRegion(NamedTuple):
    """A layer's K or V [kv_heads, slots, head_dim] of a conversation."""

    address: int
    slots: int

    def at(self, slot: int, slot_bytes: int) -> OrtRegion:
        """The same from a slot on."""
        return OrtRegion(self.address + slot * slot_bytes, self.slots)


class OrtDeviceSlots:
    """K and V of a stage for `capacity` slots, in the order of `OrtStage.kv_names`, and one token's run over them."""

    def __init__(self, stage: OrtCudaStage, row: Mapping[str, NDArray[Any]], capacity: int) -> None:
        cuda = stage.cuda
        memory = stage.context.memory
        self.stage = stage
        self.capacity = capacity
        part = aligned(stage.context.model.kv_heads * capacity * stage.slot_bytes)
        purpose = f"the KV cache of layers {stage.spec.first} to {stage.spec.last}"
        self.kv = Buffer(cuda, max(1, part * len(stage.kv_names)), purpose)
        self.regions = [OrtRegion(self.kv.address + n * part, capacity) for n in range(len(stage.kv_names))]
        self.row = {name: Buffer(cuda, array.nbytes, "one token") for name, array in row.items()}
        self.total = np.zeros(1, np.int32)  # stays in the host's memory, where the operator reads it
        self.binding = stage.bind({names.TOTAL_SLOTS: self.total}, {}, [self])
        for name, array in row.items():
            bind = self.binding.bind_output if name == names.HIDDEN_OUT else self.binding.bind_input
            bind(name, *memory, array.dtype, array.shape, self.row[name].address)
        if names.STATE_ENDS in row:
            cuda.copy_in(self.row[names.STATE_ENDS].address, row[names.STATE_ENDS])
        self.clear()

    def clear(self) -> None:
        self.stage.cuda.zero(self.kv)  # masked slots must still be numbers

    def take_over(self, regions: Sequence[OrtRegion], length: int) -> None:
        self.stage.copy_slots(self.regions, regions, length)


class OrtCudaCache(OrtStageCache, DeviceCache[OrtDeviceSlots]):
    """`StageCache` in the GPU's memory, for the slots that the conversation needs; longer memory takes its place.

    Hidden states stay in that memory from stage to stage, positions and further inputs of a prompt are arrays of the
    host, which onnxruntime copies.
    """

    stage: OrtCudaStage
    states: DeviceStateHistory | None

    def __init__(self, stage: OrtCudaStage, capacity: int) -> None:
        super().__init__(stage, capacity)
        self._given: dict[str, NDArray[Any]] = {**self._row, names.POSITIONS: self._row_position, **self._row_seen}
        self._given[names.LAST_SLOT] = self._last
        self.use(stage.pool, stage.spec.first)
        self.buffers = self._held

    def buffers_at(self, number: int | None) -> tuple[list[NDArray[Any]], list[Any], Any]:
        return [], [], None  # a conversation has none before its first token

    def _make(self, capacity: int) -> OrtDeviceSlots:
        row = {**self._given, **self._row_ends, names.HIDDEN_OUT: self._row_out}
        return OrtDeviceSlots(self.stage, row, capacity)

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        hidden: Any = tokens.hidden
        with self.stage.cuda:
            self.make_room(self.length + len(tokens))
            if not isinstance(hidden, DeviceStates):
                tokens = tokens.after(self.stage.states.joined([hidden]).as_states())
            if self._context.model.two_way or len(tokens) <= PROMPT_RUN:
                return super().append(tokens, positions, query=query, outputs=outputs)
            parts = list[HiddenStates]()
            queries = list[NDArray[np.float32]]()
            with nullcontext() if self.states is None else self.states.in_parts(self.length):
                for start in range(0, len(tokens), PROMPT_RUN):
                    end = min(start + PROMPT_RUN, len(tokens))
                    parts.append(super().append(tokens.part(start, end), positions[start:end], query=query))
                    queries.append(self.query)
        if query:
            self.query = np.concatenate(queries)
        joined = np.concatenate(parts)
        return joined if outputs is None else joined[outputs]

    def _output(self, tokens: int) -> HiddenStates:
        return self.stage.states.empty(tokens).as_states()

    def _input(self, array: Any) -> Any:
        if not isinstance(array, DeviceStates):
            return np.ascontiguousarray(array)
        return array.copy() if array.row(0) % ALIGNMENT else array

    def queue_token(self, given: Mapping[str, int], position: int) -> int:
        """Queue the run of one token behind the filled slots; the address of its hidden state.

        `given` are addresses of its hidden state and of token inputs; others are zeros.
        """
        cuda = self.stage.cuda
        memory = self.memory
        self._row_position[:] = position
        for row_counts in self._row_seen.values():
            row_counts[:] = self.length + 1
        self._count(1)
        for name, array in self._given.items():
            to = memory.row[name].address
            nbytes = array.nbytes
            if name in given:
                cuda.copy_rows(to, nbytes, given[name], nbytes, nbytes, 1)
            else:
                if name in self._row:
                    array[...] = 0
                cuda.copy_in(to, array)
        memory.total[:] = self._total
        if self.states is None:
            self.stage.graph.run_bound(memory.binding, self.stage.unsynchronised)
        else:
            before = self.states.before(self.length)
            new_states = self.states.room(1)
            self.stage.bind_states(memory.binding, {names.STATE: before}, {names.STATE_OUT: new_states})
            self.stage.graph.run_bound(memory.binding, self.stage.unsynchronised)
            self.states.put(self.length, self._row_ends[names.STATE_ENDS], new_states)
        return memory.row[names.HIDDEN_OUT].address

    def _bind_keys(self, binding: Any) -> None:
        memory = self.memory
        stage = self.stage
        place = (*stage.context.memory, stage.kv_type, stage.shape(memory.capacity))
        binding.bind_input(names.KEY, *place, memory.regions[-2].address)

    def keys(self) -> NDArray[np.float32]:
        stage = self.stage
        memory = self.memory
        keys = np.empty(stage.shape(self.length)[1:], stage.kv_type)
        with stage.cuda:
            packed = Buffer(stage.cuda, max(1, keys.nbytes), "keys")
            stage.copy_heads(OrtRegion(packed.address, self.length), memory.regions[-2], self.length)
            stage.cuda.copy_out(keys, packed.address)
            stage.cuda.wait()
        return keys.astype(np.float32)

    def _read(self, slots: Ids) -> SavedSlots:  # type: ignore[override]
        stage = self.stage
        with stage.cuda:
            kv_heads = stage.context.model.kv_heads
            nbytes = max(1, len(stage.kv_names) * kv_heads * len(slots) * stage.slot_bytes)
            saved = SavedSlots(Buffer(stage.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, saved, out=True)
        return saved

    def _write(self, slots: Ids, kv: SavedSlots, length: int) -> None:  # type: ignore[override]
        assert len(slots) == kv.count
        with self.stage.cuda:
            self.make_room(length)
            self._move(slots, kv, out=False)

    def _move(self, slots: Ids, kept: SavedSlots, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        stage = self.stage
        memory = self.memory
        unit = stage.slot_bytes
        packed = stage.context.model.kv_heads * kept.count * stage.slot_bytes
        for start, first, count in runs(slots):
            for number, region in enumerate(memory.regions):
                saved = OrtRegion(kept.buffer.address + number * packed, kept.count)
                ends = saved.at(start, unit), region.at(first, unit)
                to, source = ends if out else reversed(ends)
                stage.copy_heads(to, source, count)
        stage.cuda.wait()

    def _copy(self, other: OrtStageCache, length: int) -> None:
        slots = np.arange(length)  # K and V are not on the host
        self.write(slots, other.read(slots), length=length)
