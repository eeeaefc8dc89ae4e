"""A stage of several conversations in one run on OpenVINO: paged attention over the lanes of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.failures import run_failures
from vtx.runtime.backends.openvino.cache import FEW, KV_ARRAYS, OpenvinoCacheContext, OpenvinoStageCache
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
        self._few, many = stage.request(), stage.for_many
        self._many = self._few if many is None else many.create_infer_request()
        self._lock = threading.Lock()
        for request in {self._few, self._many}:
            for layer, lanes_of_all in zip(spec.cached, self.pool.kv, strict=True):
                keys, values = lanes_of_all.reshape(2, *context.shape(lanes * self._blocks, layer))
                request.set_tensor(names.past_key(layer), context.blocks(keys))
                request.set_tensor(names.past_value(layer), context.blocks(values))
            for name, table in context.rope.items():
                request.set_tensor(name, context.shared(table))

    def append_each(
        self, caches: Sequence[OpenvinoStageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        """Run `counts[n]` of the tokens into the n-th cache, at their positions. Returns their hidden states."""
        self._stage.check_open()
        if self._context.most_rows and len(tokens) > self._context.most_rows and len(caches) > 1:
            half, rows = len(caches) // 2, sum(counts[: len(caches) // 2])
            begun = self.append_each(caches[:half], tokens.part(0, rows), positions[:rows], counts[:half])
            rest = tokens.part(rows, len(tokens)), positions[rows:], counts[half:]
            return np.concatenate([begun, self.append_each(caches[half:], *rest)])
        past = np.array([cache.length for cache in caches], np.int32)
        blocks = list[NDArray[np.int32]]()  # of each cache: the numbers in the pool, up to that of its last slot
        for cache, count in zip(caches, counts, strict=True):
            assert cache.lane is not None, "it is in no pool"
            assert cache.length + count <= cache.capacity, "it is full"
            first = cache.lane.number * self._blocks
            blocks.append(np.arange(first, first - (-(cache.length + count) // BLOCK), dtype=np.int32))
        out = np.empty_like(tokens.hidden)
        inputs: dict[str, NDArray[Any]] = {
            **{names.token_input(name): np.ascontiguousarray(tokens.inputs[name]) for name in self._reads},
            names.HIDDEN: np.ascontiguousarray(tokens.hidden), names.POSITIONS: positions[None].copy(),
            names.HIDDEN_OUT: out, PAST: past, BEGINS: np.cumsum([0, *counts], dtype=np.int32),
            BLOCKS: np.concatenate(blocks), BLOCK_BEGINS: np.cumsum([0, *map(len, blocks)], dtype=np.int32),
            FILLED: np.array((past + counts).max(), np.int32), OUTPUTS: np.arange(len(tokens), dtype=np.int32),
        }  # fmt: skip
        states = [cache.states for cache in caches if cache.states is not None]
        ends = np.ones(1, np.int64)
        if states:
            past_states = [state.at(cache.length) for state, cache in zip(states, caches, strict=True)]
            inputs |= {names.STATE: np.stack(past_states, 1), names.STATE_ENDS: ends}
        request = self._many if len(tokens) > max(FEW, len(caches)) else self._few
        with self._lock, run_failures(ENGINE, self._stage.name):
            for name, array in inputs.items():
                request.set_tensor(name, self._context.shared(array))
            run_request(request)
            for number, state in enumerate(states):
                made = request.get_tensor(names.STATE_OUT).data
                state.put(caches[number].length, ends, made[:, number])
        for cache, count in zip(caches, counts, strict=True):
            cache.fill(cache.length + count)
        return out
