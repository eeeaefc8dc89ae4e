"""One token of each of several conversations in one run of a stage on onnxruntime's CUDA provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vtx.runtime.backends.cuda import Buffer, aligned
from vtx.runtime.backends.device_history import ONE
from vtx.runtime.backends.device_lanes import DeviceLanes
from vtx.runtime.backends.device_states import FLOAT, DeviceStates, put
from vtx.runtime.backends.ort.cuda_cache import OrtCudaCache, OrtCudaStage, OrtRegion
from vtx.runtime.backends.slots import LANES
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import Ids, TokenStates


class OrtCudaLanes:
    """K and V of several conversations of `capacity` slots each, [lanes, kv_heads, capacity, head_dim], and their runs.

    GroupQueryAttention takes the first of them as one array, and for each its last slot.
    """

    def __init__(self, stage: OrtCudaStage, capacity: int) -> None:
        self.stage = stage
        self.capacity = capacity
        self._lane = stage.context.model.kv_heads * capacity * stage.slot_bytes
        part = aligned(LANES * self._lane)
        purpose = f"the KV caches of layers {stage.spec.first} to {stage.spec.last} of {LANES} conversations"
        self._kv = Buffer(stage.cuda, max(1, part * len(stage.kv_names)), purpose)
        self._regions = [OrtRegion(self._kv.address + n * part, capacity) for n in range(len(stage.kv_names))]
        self._buffers = dict[str, Buffer]()  # of inputs and outputs
        self._bindings = dict[int, Any]()  # by the number of conversations
        self._total = np.zeros(1, np.int32)  # stays in the host's memory, where the operator reads it
        self.clear()

    def clear(self) -> None:
        self.stage.cuda.zero(self._kv)  # masked slots must still be numbers

    def at(self, lane: int) -> list[OrtRegion]:
        return [OrtRegion(region.address + lane * self._lane, self.capacity) for region in self._regions]

    def put(self, lane: int, regions: Sequence[OrtRegion], length: int) -> None:
        self.stage.copy_slots(self.at(lane), regions, length)

    def run(self, caches: Sequence[OrtCudaCache], tokens: TokenStates, positions: Ids) -> DeviceStates:
        stage = self.stage
        count = len(caches)
        last = np.array([cache.length for cache in caches], np.int32)
        inputs: dict[str, Any] = {names.HIDDEN: tokens.hidden, names.POSITIONS: positions.astype(np.int64)[:, None]}
        inputs |= {names.token_input(name): tokens.inputs[name] for name in stage.spec.inputs}
        inputs[names.LAST_SLOT] = last
        if stage.context.model.two_way:
            inputs[names.SEEN_SLOTS] = last.astype(np.int64)[:, None] + 1
        if count not in self._bindings:
            self._bindings[count] = self._bound(inputs, count)
        for name, array in inputs.items():
            put(stage.cuda, self._buffers[name].address, array)
        self._total[0] = last.max() + 1
        row = FLOAT.itemsize * stage.context.model.state_numbers
        states = [(number, cache.states) for number, cache in enumerate(caches) if cache.states is not None]
        for number, history in states:
            place = self._buffers[names.STATE].address + number * row
            history.copy_to(caches[number].length, place, count * row)
        stage.graph.run_bound(self._bindings[count], stage.unsynchronised)
        for number, history in states:
            place = self._buffers[names.STATE_OUT].address + number * row
            history.put_from(caches[number].length, place, count * row)
        out = stage.states.empty(count)
        nbytes = count * stage.states.row_bytes
        stage.cuda.copy_rows(out.row(0), nbytes, self._buffers[names.HIDDEN_OUT].address, nbytes, nbytes, 1)
        return out

    def _bound(self, inputs: dict[str, Any], count: int) -> Any:
        """A run of `count` conversations."""
        stage = self.stage
        binding = stage.bind({names.TOTAL_SLOTS: self._total}, {}, [])
        stage.bind_lanes(binding, self._regions, count)
        for name, array in inputs.items():
            self._bind(binding.bind_input, name, array.dtype, array.shape, count)
        self._bind(binding.bind_output, names.HIDDEN_OUT, FLOAT, (count, stage.context.model.hidden), count)
        if stage.spec.stateful:
            layers = len(stage.spec.stateful)
            numbers = stage.context.model.state_numbers
            self._bind(binding.bind_input, names.STATE, FLOAT, (layers, count, numbers), count)
            self._bind(binding.bind_output, names.STATE_OUT, FLOAT, (layers, count, 1, numbers), count)
            self._bind(binding.bind_input, names.STATE_ENDS, ONE.dtype, ONE.shape, 1)
            stage.cuda.copy_in(self._buffers[names.STATE_ENDS].address, ONE)
        return binding

    def _bind(self, bind: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], count: int) -> None:
        """Bind a tensor of `count` conversations, whose buffer has room for those of all lanes."""
        if name not in self._buffers:
            nbytes = dtype.itemsize * int(np.prod(shape)) // count * LANES
            self._buffers[name] = Buffer(self.stage.cuda, nbytes, f"the tensor {name} of {LANES} conversations")
        bind(name, *self.stage.context.memory, dtype, shape, self._buffers[name].address)


class OrtCudaStageBatch(DeviceLanes[OrtCudaLanes]):
    """The lanes of one stage."""

    def __init__(self, stage: OrtCudaStage, longest: int) -> None:
        super().__init__(stage.pool, stage.spec.first, LANES, longest)
        self._stage = stage

    def _make(self, capacity: int) -> OrtCudaLanes:
        return OrtCudaLanes(self._stage, capacity)
