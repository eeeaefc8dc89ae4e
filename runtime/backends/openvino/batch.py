"""A stage of several conversations in one run on OpenVINO: paged attention over the lanes of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.failures import run_failures
from vtx.runtime.backends.openvino.cache import KV_ARRAYS, OpenvinoCacheContext, OpenvinoStageCache
from vtx.runtime.backends.openvino.graph import ENGINE, StageGraph, run_request
from vtx.runtime.backends.openvino.paged import BEGINS, BLOCK, BLOCK_BEGINS, BLOCKS, FILLED, OUTPUTS, PAST
from vtx.runtime.backends.slots import LanePool
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class OpenvinoStageBatch:
    """The pool of lanes for the caches of one stage, and an infer request over all of it."""

    def __init__(
        self, context: OpenvinoCacheContext, stage: StageGraph, spec: StageSpec, lanes: int, capacity: int
    ) -> None:
        self._context, self._stage, self._reads = context, stage, spec.inputs
        self._blocks = -(-capacity // BLOCK)  # of a lane
        shapes = [context.shape(self._blocks, layer) for layer in spec.cached]
        self.pool = LanePool(shapes, lanes, np.dtype(KV_ARRAYS[context.kv]))
        self._request = stage.request()
        self._lock = threading.Lock()
        for layer, lanes_of_all in zip(spec.cached, self.pool.kv, strict=True):
            keys, values = lanes_of_all.reshape(2, *context.shape(lanes * self._blocks, layer))
            self._request.set_tensor(names.past_key(layer), context.blocks(keys))
            self._request.set_tensor(names.past_value(layer), context.blocks(values))
        for name, table in context.rope.items():
            self._request.set_tensor(name, context.shared(table))

    def append_each(self, caches: Sequence[OpenvinoStageCache], tokens: TokenStates, positions: Ids) -> HiddenStates:
        """Run one of the tokens [n] into each cache, at its position [n]. Returns their hidden states [n, hidden]."""
        self._stage.check_open()
        past = np.array([cache.length for cache in caches], np.int32)
        blocks = list[NDArray[np.int32]]()  # of each cache: the numbers in the pool, up to that of its next slot
        for cache in caches:
            assert cache.lane is not None, "it is in no pool"
            assert cache.length < cache.capacity, "it is full"
            first = cache.lane.number * self._blocks
            blocks.append(np.arange(first, first + cache.length // BLOCK + 1, dtype=np.int32))
        out = np.empty_like(tokens.hidden)
        inputs: dict[str, NDArray[Any]] = {
            **{names.token_input(name): np.ascontiguousarray(tokens.inputs[name]) for name in self._reads},
            names.HIDDEN: np.ascontiguousarray(tokens.hidden), names.POSITIONS: positions[None].copy(),
            names.HIDDEN_OUT: out, PAST: past, BEGINS: np.arange(len(caches) + 1, dtype=np.int32),
            BLOCKS: np.concatenate(blocks), BLOCK_BEGINS: np.cumsum([0, *map(len, blocks)], dtype=np.int32),
            FILLED: np.array(past.max() + 1, np.int32), OUTPUTS: np.arange(len(tokens), dtype=np.int32),
        }  # fmt: skip
        states = [cache.states for cache in caches if cache.states is not None]
        ends = np.ones(1, np.int64)
        if states:
            past_states = [state.at(cache.length) for state, cache in zip(states, caches, strict=True)]
            inputs |= {names.STATE: np.stack(past_states, 1), names.STATE_ENDS: ends}
        with self._lock, run_failures(ENGINE, self._stage.name):
            for name, array in inputs.items():
                self._request.set_tensor(name, self._context.shared(array))
            run_request(self._request)
            for number, state in enumerate(states):
                made = self._request.get_tensor(names.STATE_OUT).data
                state.put(caches[number].length, ends, made[:, number])
        for cache in caches:
            cache.fill(cache.length + 1)
        return out
