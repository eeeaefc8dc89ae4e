"""A stage of several conversations in one run on OpenVINO: paged attention over the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.failures import run_failures
from vtx.runtime.backends.openvino.cache import FEW, OpenvinoCacheContext, OpenvinoStageCache, SlidingRun, blocks_of
from vtx.runtime.backends.openvino.graph import ENGINE, StageGraph, run_request
from vtx.runtime.backends.openvino.paged import (
    BEGINS,
    BLOCK_BEGINS,
    BLOCKS,
    FILLED,
    IMAGES,
    OUTPUTS,
    PAST,
    PLACES,
    SLIDING,
    WINDOW,
)
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates


class OpenvinoStageBatch:
    """The pool of blocks for the caches of one stage, and an infer request over all of it."""

    def __init__(
        self, context: OpenvinoCacheContext, stage: StageGraph, spec: StageSpec, lanes: int, capacity: int
    ) -> None:
        self._context = context
        self._stage = stage
        self._reads = spec.inputs
        self.pool = context.pool(spec, lanes, capacity)
        self._few = stage.request()
        many = stage.for_many
        self._many = self._few if many is None else many.create_infer_request()
        self._lock = threading.Lock()
        for request in {self._few, self._many}:
            for layer, (keys, values) in zip(spec.cached, self.pool.kv, strict=True):
                request.set_tensor(names.past_key(layer), context.blocks(keys))
                request.set_tensor(names.past_value(layer), context.blocks(values))
            for name, table in context.rope.items():
                request.set_tensor(name, context.shared(table))

    def append_each(
        self, caches: Sequence[OpenvinoStageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        """Run `counts[n]` of the tokens into the n-th cache, at their positions. Returns their hidden states."""
        self._stage.check_open()
        window = self._window(caches, tokens, positions, counts)
        if window is None and len(caches) == 1:
            return caches[0].append(tokens, positions).copy()
        most = self._context.most_rows
        if window is None or (most and len(tokens) > most and len(caches) > 1):
            half = len(caches) // 2
            rows = sum(counts[: len(caches) // 2])
            first = self.append_each(caches[:half], tokens.part(0, rows), positions[:rows], counts[:half])
            rest = tokens.part(rows, len(tokens)), positions[rows:], counts[half:]
            return np.concatenate([first, self.append_each(caches[half:], *rest)])
        out = np.empty_like(tokens.hidden)
        inputs = self._inputs(tokens, positions, window) | self._blocks(caches, counts)
        inputs[names.HIDDEN_OUT] = out
        states = [cache.states for cache in caches if cache.states is not None]
        ends = np.ones(1, np.int64)
        if states:
            past_states = [state.at(cache.length) for state, cache in zip(states, caches, strict=True)]
            inputs |= {**self._stage.states.given(np.stack(past_states, 1)), names.STATE_ENDS: ends}
        request = self._many if len(tokens) > max(FEW, len(caches)) else self._few
        with self._lock, run_failures(ENGINE, self._stage.name):
            for name, array in inputs.items():
                request.set_tensor(name, self._context.shared(array))
            run_request(request)
            if states:
                new_states = self._made(request, len(states), states[0].shape)
            for number, state in enumerate(states):
                state.put(caches[number].length, ends, new_states[:, number])
        for cache, count in zip(caches, counts, strict=True):
            cache.fill(cache.length + count)
        return out

    def _inputs(self, tokens: TokenStates, positions: Ids, window: int) -> dict[str, NDArray[Any]]:
        """The inputs of a run of tokens at their positions, which see `window` slots in layers that slide."""
        inputs: dict[str, NDArray[Any]] = {
            names.HIDDEN: np.ascontiguousarray(tokens.hidden),
            names.POSITIONS: positions[None].copy(),
            OUTPUTS: np.arange(len(tokens), dtype=np.int32),
        }
        for name in self._reads:
            inputs[names.token_input(name)] = np.ascontiguousarray(tokens.inputs[name])
        if self._context.model.sliding is not None:
            inputs[WINDOW] = np.array(window, np.int32)
        if self._context.model.two_way is not None:
            inputs[IMAGES] = np.zeros(len(tokens), np.int32)
        return inputs

    def _made(self, request: Any, conversations: int, shape: tuple[int, int]) -> NDArray[np.float32]:
        """The states [layers, conversations, 1, numbers] that a run made; `shape`: layers and numbers."""
        if not self._stage.states.parts:
            new_states: NDArray[np.float32] = request.get_tensor(names.STATE_OUT).data
            return new_states
        states = np.empty((shape[0], conversations, 1, shape[1]), np.float32)
        return self._stage.states.put(states, lambda name: request.get_tensor(name).data)

    def _window(
        self, caches: Sequence[OpenvinoStageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> int | None:
        """The slots that all of the tokens see in layers that slide; 0: all; None: they cannot go in one run."""
        if self._context.model.sliding is None:
            return 0
        runs = list[tuple[int, SlidingRun]]()
        first = 0
        for cache, count in zip(caches, counts, strict=True):
            end = first + count
            parts = cache.runs(tokens.part(first, end), positions[first:end])
            runs += [(cache.length + part.end, part) for part in parts]
            first = end
        window = max(run.window for _, run in runs)
        fits = all(run.window == window or (not run.window and filled <= window) for filled, run in runs)
        return window if fits and len(runs) == len(caches) and not any(run.first for _, run in runs) else None

    def _blocks(self, caches: Sequence[OpenvinoStageCache], counts: Sequence[int]) -> dict[str, NDArray[np.int32]]:
        """Have the slots of `counts[n]` new tokens in the n-th cache; inputs that tell a run where all slots are."""
        past = np.array([cache.length for cache in caches], np.int32)
        blocks = list[NDArray[np.int32]]()  # of each cache: the numbers in the pool, up to that of its last slot
        for cache, count in zip(caches, counts, strict=True):
            assert cache.lane is not None, "it is in no pool"
            assert cache.length + count <= cache.capacity, "it is full"
            cache.hold(cache.length, cache.length + count)
            blocks.append(cache.table.numbers[: blocks_of(cache.length + count)])
        inputs = {
            PAST: past,
            BEGINS: np.cumsum([0, *counts], dtype=np.int32),
            BLOCKS: np.concatenate(blocks),
            BLOCK_BEGINS: np.cumsum([0, *map(len, blocks)], dtype=np.int32),
            FILLED: np.array((past + counts).max(), np.int32),
        }
        if self._context.model.sliding is not None:
            inputs |= {SLIDING + name: inputs[name] for name in PLACES}
        return inputs
