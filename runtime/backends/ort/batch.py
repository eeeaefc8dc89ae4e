"""A stage of several conversations in one run on onnxruntime, whose caches are a batch of K and V, lane after lane."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.ort.cache import OrtReadingCache, OrtStage, OrtStageCache
from vtx.runtime.backends.slots import LanePool
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

BINDINGS = 32  # that a stage keeps


@dataclass(frozen=True, slots=True)
class Run:
    """A binding over one lane for each token, and the arrays that it reads and writes."""

    inputs: dict[str, NDArray[Any]]
    positions: NDArray[np.int64]
    last: NDArray[np.int32]
    total: NDArray[np.int32]
    outputs: dict[str, HiddenStates]
    binding: Any
    seen: NDArray[np.int64] | None = None
    first: NDArray[np.int64] | None = None  # where layers slide


class OrtStageBatch:
    """The pool of lanes for the caches of one stage.

    onnxruntime takes a batch of K and V as one array, so conversations that decode together need neighbouring lanes.
    If they have others, caches swap lanes: K and V of at most two are copied whenever one joins or leaves.
    """

    def __init__(self, stage: OrtStage, lanes: int, capacity: int) -> None:
        self._stage = stage
        self._lanes = lanes
        model = stage.context.model
        shapes = [(model.kv_heads, capacity, model.heads_of(layer)) for layer in stage.spec.cached]
        self.pool = LanePool(shapes, lanes, np.dtype(stage.context.kv_dtype))
        self._caches = weakref.WeakValueDictionary[int, OrtStageCache]()  # by lane
        self._runs: dict[tuple[int, int], Run] = {}

    def stage(self, capacity: int) -> OrtStageCache:
        """An empty cache, in a lane if one is free."""
        cache = OrtStageCache(self._stage, capacity, self.pool)
        if cache.lane is not None:
            self._caches[cache.lane.number] = cache
        return cache

    def append_each(
        self, caches: Sequence[OrtStageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        """Run one of the tokens [n] into each cache, at its position [n]. Returns their hidden states [n, hidden]."""
        assert max(counts) == 1, "its attention takes one token of each of a batch"
        lengths = np.array([cache.length for cache in caches], np.int32)
        assert all(cache.length < cache.capacity for cache in caches), "one is full"
        lanes = self._gather(caches)
        order = np.argsort(lanes)
        key = int(lanes.min()), len(caches)
        if key not in self._runs:
            if len(self._runs) == BINDINGS:
                self._runs.clear()
            self._runs[key] = self._bind(*key)
        run = self._runs[key]
        run.inputs[names.HIDDEN][:], run.positions[:, 0] = tokens.hidden[order], positions[order]
        for name in self._stage.spec.inputs:
            run.inputs[names.token_input(name)][:] = tokens.inputs[name][order]
        run.last[:], run.total[0] = lengths[order], lengths.max() + 1
        if run.seen is not None:
            run.seen[:, 0] = lengths[order] + 1
        stateful = [(cache, cache.states) for cache in caches if cache.states is not None]
        for number, place in enumerate(order if stateful else ()):
            cache, states = stateful[place]
            run.inputs[names.STATE][:, number] = states.at(cache.length)
        if run.first is not None:
            for at, number in enumerate(order):
                cache = caches[number]
                position = positions[number : number + 1]
                cache.place(position)
                run.first[at] = cache.first_slots(position, cache.length + 1)
        self._stage.graph.run_bound(run.binding)
        for number, place in enumerate(order if stateful else ()):
            cache, states = stateful[place]
            states.put(cache.length, np.ones(1, np.int64), run.outputs[names.STATE_OUT][:, number])
        for cache in caches:
            cache.fill(cache.length + 1)
        out = np.empty_like(tokens.hidden)
        out[order] = run.outputs[names.HIDDEN_OUT]
        return out

    def _bind(self, first: int, count: int) -> Run:
        """A run over `count` lanes from `first` on."""
        inputs: dict[str, NDArray[Any]] = {}
        for name, width in self._stage.widths.items():
            inputs[name] = np.zeros((count, width), np.float32)
        positions = np.zeros((count, 1), np.int64)
        last = np.zeros(count, np.int32)
        total = np.zeros(1, np.int32)
        outputs = {names.HIDDEN_OUT: np.empty_like(inputs[names.HIDDEN])}
        if (states := self._stage.new_states()) is not None:
            layers, numbers = states.shape
            inputs[names.STATE] = np.empty((layers, count, numbers), np.float32)
            inputs[names.STATE_ENDS] = np.ones(1, np.int64)
            outputs[names.STATE_OUT] = np.empty((layers, count, 1, numbers), np.float32)
        feeds: dict[str, NDArray[Any]] = {
            **inputs,
            names.POSITIONS: positions,
            names.LAST_SLOT: last,
            names.TOTAL_SLOTS: total,
        }
        slot_counts = np.zeros((count, 1), np.int64) if self._stage.context.model.two_way else None
        if slot_counts is not None:
            feeds[names.SEEN_SLOTS] = slot_counts
        windowed = None if self._stage.context.model.sliding is None else np.zeros((count, 1), np.int64)
        if windowed is not None:
            feeds[names.FIRST_SLOT] = windowed
        buffers = [self._stage.context.value(part[first : first + count]) for layer in self.pool.kv for part in layer]
        return Run(
            inputs,
            positions,
            last,
            total,
            outputs,
            self._stage.bind(feeds, outputs, buffers),
            slot_counts,
            windowed,
        )

    def _gather(self, caches: Sequence[OrtStageCache]) -> NDArray[np.int64]:
        """Bring caches into lanes that follow each other; their lanes [n]."""
        lanes = _lanes(caches)
        count = len(caches)
        if lanes.max() - lanes.min() + 1 == count:
            return lanes
        firsts = np.minimum(lanes, self._lanes - count)
        inside = [((lanes >= first) & (lanes < first + count)).sum() for first in firsts]
        first = int(firsts[np.argmax(inside)])
        vacant = [number for number in range(first, first + count) if number not in lanes]
        outside = [cache for cache, lane in zip(caches, lanes, strict=True) if not first <= lane < first + count]
        for cache, number in zip(outside, vacant, strict=True):
            self._move(cache, number)
        return _lanes(caches)

    def _move(self, cache: OrtStageCache, number: int) -> None:
        """Move a cache to another lane; a cache there moves to this one's. Steps that can fail come first."""
        lane = cache.lane
        other = self._caches.get(number)
        assert lane is not None
        lane_number = lane.number
        moved = [(cache, cache.filled(), cache.buffers_at(number))]
        if other is None:
            self.pool.move(lane, number)
            del self._caches[lane_number]
        else:
            assert other.lane is not None
            moved.append((other, other.filled(), other.buffers_at(lane_number)))
            lane.number, other.lane.number = number, lane_number
            self._caches[lane_number] = other
        self._caches[number] = cache
        for one, kv, bound in moved:
            one.kv, one.buffers, one.row_binding = bound
            for layer, part in zip(one.kv, kv, strict=True):
                layer[..., : one.length, :] = part


class OrtReadingBatch:
    """A stage that reads K and V of earlier ones, for one conversation after the other."""

    def stage(self, capacity: int) -> OrtStageCache:
        raise AssertionError("a stage without caches of its own")

    def append_each(
        self, caches: Sequence[OrtReadingCache], tokens: TokenStates, positions: Ids, _: Sequence[int]
    ) -> HiddenStates:
        """See `OrtStageBatch`."""
        return np.concatenate(
            [cache.append(tokens.part(n, n + 1), positions[n : n + 1]).copy() for n, cache in enumerate(caches)]
        )


def _lanes(caches: Sequence[OrtStageCache]) -> NDArray[np.int64]:
    return np.array([cache.lane.number for cache in caches if cache.lane is not None])
