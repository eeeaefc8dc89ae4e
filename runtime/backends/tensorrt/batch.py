"""One token of each of several conversations in one run of a stage, which reads its weights once.

Conversations that decode together have lanes: K and V of all of them in one buffer, [lanes, capacity, kv_heads,
head_dim] of each layer. States of layers go there and back for a run, from where each conversation holds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import Buffer, Graph
from vtx.runtime.backends.device_history import ONE
from vtx.runtime.backends.device_lanes import BatchedRuns, DeviceLanes, order_of
from vtx.runtime.backends.device_states import FLOAT, DeviceStates, put
from vtx.runtime.backends.tensorrt.binding import DECODE, Bindings, kv_bindings, next_number, token_bindings
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import LANE_STATES, TensorrtCacheContext, new_slots
from vtx.runtime.backends.tensorrt.reading import TensorrtReadingCache
from vtx.runtime.backends.tensorrt.regions import Region, copy_slots, part
from vtx.runtime.backends.tensorrt.step import RECORDINGS
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class LaneRuns(ABC):
    """The runs of a stage over the first lanes, by their number.

    A run is queued once, then recorded, and launched from then on, as of one token.
    """

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str) -> None:
        self._shared = shared
        self._spec = spec
        self._graph = graph
        self._contexts = dict[int, Context]()
        self._recordings = dict[int, Graph | Literal[False] | None]()

    def launch(self, inputs: Mapping[str, Any], count: int) -> None:
        """Queue the run of one token of each of the first `count` lanes."""
        shared = self._shared
        for name, array in inputs.items():
            put(shared.cuda, shared.engines.address(name), array)
        if count not in self._contexts:
            context = shared.engines.new_context(self._graph, DECODE, captures=True)
            context.bind(*self._bindings(count))
            self._contexts[count] = context
        context = self._contexts[count]
        recorded = self._recordings.get(count)
        if count in self._recordings and recorded is None and context.records:
            recorded = (context.capturable and shared.cuda.record(context.enqueue)) or False
        self._recordings[count] = recorded
        if recorded:
            recorded.launch()
        else:
            context.enqueue()

    def outputs(self, count: int) -> DeviceStates:
        """A copy of the hidden states that a run gave."""
        shared = self._shared
        out = shared.states.empty(count)
        nbytes = count * shared.states.row_bytes
        shared.cuda.copy_rows(out.row(0), nbytes, shared.engines.address(names.HIDDEN_OUT), nbytes, nbytes, 1)
        return out

    @abstractmethod
    def _bindings(self, count: int) -> Bindings:
        """Shapes and addresses of a run."""


class TensorrtLanes(LaneRuns):
    """K and V of `lanes` conversations of `capacity` slots each. `readers` are stages that read them too."""

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, lanes: int, capacity: int) -> None:
        super().__init__(shared, spec, graph)
        self.capacity = capacity
        self.number = next_number()
        self.readers = dict[tuple[int, ...], ReadingLanes]()
        self._layout = shared.layout(spec)
        slots = lanes * capacity
        purpose = f"the KV caches of layers {spec.first} to {spec.last} of {lanes} conversations"
        self._kv = Buffer(shared.cuda, max(1, self._layout.nbytes(slots)), purpose)
        self._regions = self._layout.regions(self._kv.address, slots)
        self.clear()

    def clear(self) -> None:
        self._shared.cuda.zero(self._kv)  # masked slots must still be numbers

    def at(self, lane: int, slot: int = 0) -> list[Region]:
        """The parts of a lane from a slot on."""
        return [region.at(lane * self.capacity + slot) for region in self._regions]

    def put(self, lane: int, regions: Sequence[Region], length: int) -> None:
        copy_slots(self._shared.cuda, self.at(lane), regions, length)

    def run(self, caches: Sequence[TensorrtStageCache], tokens: TokenStates, positions: Ids) -> DeviceStates:
        shared = self._shared
        count = len(caches)
        filled = np.array([cache.length + 1 for cache in caches], np.int32)
        inputs = shared.inputs_of(self._spec, tokens, positions)
        inputs[names.TOTAL_SLOTS] = filled
        if shared.model.two_way is not None:
            inputs[names.SEEN_SLOTS] = filled.astype(np.int64)
        if shared.model.sliding is not None:
            for cache, position in zip(caches, positions, strict=True):
                cache.place(np.array([position]))
            inputs[names.FIRST_SLOT] = first_slots(caches, positions, filled)
        if self._spec.stateful:
            inputs[names.STATE_ENDS] = ONE
        row = FLOAT.itemsize * shared.model.state_numbers
        states = [(number, cache.states) for number, cache in enumerate(caches) if cache.states is not None]
        for number, history in states:
            place = shared.engines.address(LANE_STATES[0]) + number * row
            history.copy_to(caches[number].length, place, count * row)
        self.launch(inputs, count)
        new = self._new_slots(count)
        for number, cache in enumerate(caches):
            one = [region.at(number) for region in new]
            copy_slots(shared.cuda, self.at(number, cache.length), one, 1)
        for number, history in states:
            place = shared.engines.address(LANE_STATES[1]) + number * row
            history.put_from(caches[number].length, place, count * row)
        return self.outputs(count)

    def _new_slots(self, count: int) -> list[Region]:
        """The parts of the buffer for the new K and V of `count` tokens, none if no layer has any."""
        if not self._spec.cached:
            return []
        return self._layout.regions(self._shared.engines.address(new_slots(self._spec)), count)

    def _bindings(self, count: int) -> Bindings:
        shared = self._shared
        model = shared.model
        shapes, addresses = token_bindings(shared, self._spec, (count, 1))
        kv = kv_bindings(model, self._regions, self._new_slots(count), (count, self.capacity))
        shapes |= kv[0]
        addresses |= kv[1]
        if self._spec.stateful:
            shapes |= {names.STATE: (len(self._spec.stateful), count, model.state_numbers), names.STATE_ENDS: (1,)}
            buffers = {names.STATE: LANE_STATES[0], names.STATE_OUT: LANE_STATES[1], names.STATE_ENDS: names.STATE_ENDS}
            addresses |= {name: shared.engines.address(buffer) for name, buffer in buffers.items()}
        return shapes, addresses


class TensorrtStageBatch(DeviceLanes[TensorrtLanes]):
    """The lanes of one stage."""

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, lanes: int) -> None:
        super().__init__(shared.pool, spec.first, lanes, shared.max_context)
        self._shared = shared
        self._spec = spec
        self._graph = graph

    def _make(self, capacity: int) -> TensorrtLanes:
        return TensorrtLanes(self._shared, self._spec, self._graph, self.lanes, capacity)


class ReadingLanes(LaneRuns):
    """The runs of a stage over lanes of earlier ones, by the layers that are read. It keeps addresses, not memory."""

    def __init__(
        self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, sources: Mapping[int, TensorrtLanes]
    ) -> None:
        super().__init__(shared, spec, graph)
        self._capacities = {layer: lanes.capacity for layer, lanes in sources.items()}
        self._addresses = {
            name(layer): part(lanes.at(0), layer, half)
            for layer, lanes in sources.items()
            for half, name in enumerate((names.past_key, names.past_value))
        }

    def _bindings(self, count: int) -> Bindings:
        model = self._shared.model
        slots = map(names.source_slot, self._capacities)
        shapes, addresses = token_bindings(self._shared, self._spec, (count, 1), slots)
        for layer, capacity in self._capacities.items():
            shape = (count, capacity, model.kv_heads, model.heads_of(layer))
            shapes |= {names.past_key(layer): shape, names.past_value(layer): shape}
        return shapes, addresses | self._addresses


class TensorrtReadingBatch(BatchedRuns):
    """The same of a stage whose layers have no K and V of their own, over the lanes of `sources` by layer."""

    def __init__(
        self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, sources: Mapping[int, TensorrtStageBatch]
    ) -> None:
        super().__init__(min(batch.lanes for batch in sources.values()))
        self._shared = shared
        self._spec = spec
        self._graph = graph
        self._sources = sources

    def append_each(self, caches: Sequence[TensorrtReadingCache], tokens: TokenStates, positions: Ids) -> HiddenStates:
        read = {layer: [cache.sources[layer] for cache in caches] for layer in self._sources}
        runs = self._runs(self._gather(read))
        order = order_of(next(iter(read.values())))
        ordered = [caches[number] for number in order]
        inputs = self._shared.inputs_of(self._spec, tokens.take(order), positions[order])
        for layer, sources in read.items():
            inputs[names.source_slot(layer)] = np.array([sources[n].length - 1 for n in order], np.int32)
        if self._shared.model.sliding is not None:
            placed = [cache.placed for cache in ordered]
            inputs[names.FIRST_SLOT] = first_slots(placed, positions[order], [cache.length for cache in placed])
        runs.launch(inputs, len(caches))
        states: HiddenStates = runs.outputs(len(caches))[np.argsort(order)]
        return states

    def _gather(self, read: Mapping[int, Sequence[TensorrtStageCache]]) -> dict[int, TensorrtLanes]:
        """Bring the sources into the first lanes, in which a conversation has one number in all stages."""
        for leaving in (False, True):
            for cache in (cache for caches in read.values() for cache in caches if leaving):
                cache.leave_lane()
            lanes = {layer: self._sources[layer].gather(c, max(x.length for x in c)) for layer, c in read.items()}
            if len({tuple(order_of(caches)) for caches in read.values()}) == 1:
                break
        return lanes

    def _runs(self, sources: Mapping[int, TensorrtLanes]) -> ReadingLanes:
        """The runs over these lanes, of which the last ones hold them."""
        readers = [*sources.values()][-1].readers
        key = (self._spec.first, *(lanes.number for lanes in sources.values()))
        if key not in readers:
            if len(readers) == RECORDINGS:
                readers.clear()
            readers[key] = ReadingLanes(self._shared, self._spec, self._graph, sources)
        return readers[key]


def first_slots(caches: Sequence[TensorrtStageCache], positions: Ids, filled: Sequence[int] | NDArray[np.int32]) -> Ids:
    """The first slot within the window of a token of each cache, which has the last of its `filled` slots."""
    return np.concatenate([cache.first_slots(positions[n : n + 1], int(filled[n])) for n, cache in enumerate(caches)])
