"""K and V of a stage on onnxruntime: buffers allocated once, bound as input and output alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.allocation import zeros_in_small_pages
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.backends.slots import LanePool, SlotCounter, StateHistory, seen_slots
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec, TokenInput
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.bundle.tensors import RopeTables, rope_at
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

MASKED = 512  # tokens of a run whose products with all slots are held at once, since images see themselves both ways


@dataclass(frozen=True, slots=True)
class OrtCacheContext:
    """Shared by the caches of a bundle. `rope` and `kv_scales` are OrtValues; `memory` holds K and V.

    `value` makes an OrtValue: of an array alone over its own memory, which the caller holds. `tables` are the rotary
    tables as arrays.
    """

    value: Callable[..., Any]
    model: ModelSpec
    kv_dtype: str
    tables: RopeTables
    rope: Mapping[str, Any]  # with those of layers that slide
    kv_scales: Mapping[str, Any]
    score: OrtGraph | None
    token_inputs: tuple[TokenInput, ...]
    memory: tuple[str, int] = ("cpu", 0)


class OrtStage:
    """A stage's graph, and what all its caches bind by name.

    `widths`: numbers per token of the hidden states and of each token input, by the graph's names; `kv_names`: those of
    each layer's keys, then values, as input and as output, None for those of `sources`, layers of earlier stages that a
    stage without caches reads; `constants`: rotary tables, and scales of int8 K and V.
    """

    def __init__(self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec) -> None:
        self.context = context
        self.graph = graph
        self.spec = spec
        model = context.model
        self.key_scale = context.kv_scales.get(names.key_scale(spec.last))
        self.constants = dict(context.rope)
        self.kv_names = list[tuple[str, str | None]]()
        self.sources = () if spec.keeps else model.sources(spec.first, spec.last)
        for layer in spec.cached or self.sources:
            for past, present in ((names.past_key, names.present_key), (names.past_value, names.present_value)):
                self.kv_names.append((past(layer), present(layer) if spec.cached else None))
            for name in (names.key_scale(layer), names.value_scale(layer)) if context.kv_scales else ():
                self.constants[name] = context.kv_scales[name]
        self.query_width = model.heads * model.heads_of(spec.last)
        self.head_dims = [model.heads_of(layer) for layer in spec.cached]
        self.widths = {names.HIDDEN: context.model.hidden}
        for declared in context.token_inputs:
            if declared.name in spec.inputs:
                self.widths[names.token_input(declared.name)] = declared.width

    def new_states(self) -> StateHistory | None:
        return StateHistory(self.spec, self.context.model) if self.spec.stateful else None

    def bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, HiddenStates], kv: Sequence[Any]) -> Any:
        """A binding of the graph over host arrays, which the caller holds, and over the layers' keys and values.

        `inputs` may hold rotary tables of these tokens alone.
        """
        binding = self.graph.session.io_binding()
        value = self.context.value
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, value(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, value(array))
        for name, constant in self.constants.items():
            if name not in inputs:
                binding.bind_ortvalue_input(name, constant)
        self.bind_kv(binding, kv)
        return binding

    def bind_kv(self, binding: Any, kv: Sequence[Any]) -> None:
        for (past, present), buffer in zip(self.kv_names, kv, strict=True):
            binding.bind_ortvalue_input(past, buffer)
            if present is not None:
                binding.bind_ortvalue_output(present, buffer)


class OrtStageCache(SlotCounter):
    """`StageCache` whose K/V buffers are allocated once and bound as input and output alike.

    `kv` is [2, 1, kv_heads, capacity, head_dim] of each cached layer, in the `lane` of a pool if one is given that has
    room, else in memory of its own; `buffers` are each layer's keys and values in it. `query`
    [tokens, heads * head_dim] are the queries of the tokens last appended with `query`. One token, as in decoding, runs
    through `row_binding`, made once; nothing is allocated for it.
    """

    def __init__(self, stage: OrtStage, capacity: int, pool: LanePool | None = None) -> None:
        sliding = stage.context.model.sliding
        super().__init__(capacity, None if sliding is None else sliding.window, stage.new_states())
        self.stage = stage
        self._context = stage.context
        self._pool = pool
        self.lane = pool.take() if pool is not None else None
        if pool is not None and self.lane is not None:
            weakref.finalize(self, pool.give_back, self.lane).atexit = False
        model = stage.context.model
        self.run_limit = MASKED if model.two_way == "images" else None
        self.query = np.zeros((0, stage.query_width), np.float32)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        self._slots: dict[str, NDArray[Any]] = {names.LAST_SLOT: self._last, names.TOTAL_SLOTS: self._total}
        self._row_seen = {names.SEEN_SLOTS: np.zeros((1, 1), np.int64)} if model.two_way else {}
        self._row_out: HiddenStates = np.zeros((1, model.hidden), np.float32)
        self._row = dict[str, NDArray[np.float32]]()
        self._row_position = np.zeros((1, 1), np.int64)
        self._row_first = {} if self.window is None else {names.FIRST_SLOT: np.zeros((1, 1), np.int64)}
        for name, width in stage.widths.items():
            self._row[name] = np.zeros((1, width), np.float32)
        self._row_ends = {} if self.states is None else {names.STATE_ENDS: np.ones(1, np.int64)}
        self.kv, self.buffers, self.row_binding = self.buffers_at(None if self.lane is None else self.lane.number)

    def buffers_at(self, number: int | None) -> tuple[list[NDArray[Any]], list[Any], Any]:
        """K and V in the lane of this number, or in memory of their own, and the binding of one token's run."""
        shapes = [(2, 1, self._context.model.kv_heads, self.capacity, size) for size in self.stage.head_dims]
        kv, buffers = self._allocate(shapes, np.dtype(self._context.kv_dtype), number)
        return kv, buffers, self._bind_row(buffers)

    def _bind_row(self, buffers: Sequence[Any]) -> Any:
        inputs: dict[str, NDArray[Any]] = {
            **self._row,
            names.POSITIONS: self._row_position,
            **self._slots,
            **self._row_first,
            **self._row_seen,
            **self._row_ends,
        }
        return self.stage.bind(inputs, {names.HIDDEN_OUT: self._row_out}, buffers)

    def filled(self) -> list[NDArray[Any]]:
        """A copy of K and V of the filled slots."""
        return [layer[..., : self.length, :].copy() for layer in self.kv]

    def _allocate(
        self, shapes: Sequence[tuple[int, ...]], kv_type: np.dtype[Any], number: int | None
    ) -> tuple[list[NDArray[Any]], list[Any]]:
        """K and V of each layer's shape [2, 1, kv_heads, capacity, head_dim], and each layer's keys and values."""
        if self._pool is not None and number is not None:
            kv = [layer[:, number : number + 1] for layer in self._pool.kv]
        else:
            kv = [zeros_in_small_pages(shape, kv_type) for shape in shapes]
        return kv, [self._context.value(part) for layer in kv for part in layer]

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        hidden = tokens.hidden
        count = len(tokens.hidden)
        self._count(count)
        tensors = {names.HIDDEN: hidden}
        for name in self.stage.spec.inputs:
            tensors[names.token_input(name)] = tokens.inputs[name]
        if positions.ndim > 1:
            tensors[names.COS], tensors[names.SIN] = rope_at(
                self._context.tables, self._context.model.rope.axes, positions
            )
            positions = np.arange(count)
        elif count == 1 and not query and self.row_binding is not None:
            return self._run_token(tensors, positions)
        # Held until the run is over: older releases of onnxruntime, 1.28 too, do not keep an array that is bound.
        out = self._output(count)
        inputs = {names.POSITIONS: positions[None].copy(), **self._slots}
        if self._row_seen:
            inputs[names.SEEN_SLOTS] = seen_slots(tokens, self.length)[None]
        if self._row_first:
            inputs[names.FIRST_SLOT] = self._first_slots(positions)[None]
        for name, array in tensors.items():
            inputs[name] = self._input(array)
        outputs = {names.HIDDEN_OUT: out}
        ends = np.zeros(0, np.int64)
        if self.states is not None:
            ends = self.states.ends(self.length, count)
            inputs |= {names.STATE: self.states.before(self.length), names.STATE_ENDS: ends}
            outputs[names.STATE_OUT] = self.states.room(len(ends))
        binding = self.stage.bind(inputs, outputs, self.buffers)
        if query:
            self.query = np.empty((count, self.query.shape[1]), np.float32)
            binding.bind_ortvalue_output(names.QUERY, self._context.value(self.query))
        self.stage.graph.run_bound(binding)
        if self.states is not None:
            self.states.put(self.length, ends, outputs[names.STATE_OUT])
        return out

    def _run_token(self, tensors: Mapping[str, NDArray[Any]], positions: Ids) -> HiddenStates:
        """Run one token by the arrays that are bound already."""
        self._row_position[:] = positions
        for counts in self._row_seen.values():
            counts[:] = self.length + 1
        for first in self._row_first.values():
            first[:] = self._first_slots(positions)
        for name, row in self._row.items():
            row[:] = tensors[name]
        if self.states is None:
            self._run_row()
            return self._row_out
        old_states = self.states.before(self.length)
        new_states = self.states.room(1)
        self.row_binding.bind_ortvalue_input(names.STATE, self._context.value(old_states))
        self.row_binding.bind_ortvalue_output(names.STATE_OUT, self._context.value(new_states))
        self._run_row()
        self.states.put(self.length, self._row_ends[names.STATE_ENDS], new_states)
        return self._row_out

    def _output(self, tokens: int) -> HiddenStates:
        """Room for the hidden states of a run."""
        return np.empty((tokens, self._context.model.hidden), np.float32)

    def _input(self, array: NDArray[Any]) -> NDArray[Any]:
        """Hidden states or further inputs of a run's tokens, as `OrtStage.bind` takes them."""
        return np.ascontiguousarray(array)

    def _run_row(self) -> None:
        """Run one token, which the arrays of `row_binding` hold."""
        self.stage.graph.run_bound(self.row_binding)

    def _first_slots(self, positions: Ids) -> Ids:
        return self.first_slots(positions, self.length + len(positions))

    def _count(self, tokens: int) -> None:
        """Set the graph's inputs for slots, those of this number of new tokens included."""
        self._last[0], self._total[0] = self.length + tokens - 1, self.length + tokens

    def attention(self, *, last_only: bool = False) -> Scores:
        score = self._context.score
        value = self._context.value
        assert score is not None
        query = self.query[-1:] if last_only else self.query
        binding = score.session.io_binding()
        binding.bind_ortvalue_input(names.QUERY, value(query))
        self._bind_keys(binding)
        binding.bind_ortvalue_input(names.TOTAL_SLOTS, value(self._total))
        if self.stage.key_scale is not None:
            binding.bind_ortvalue_input(names.KEY_SCALE, self.stage.key_scale)
        binding.bind_output(names.ATTENTION_SUM, "cpu")
        binding.bind_output(names.ATTENTION_MAX, "cpu")
        score.run_bound(binding)
        total, most = binding.copy_outputs_to_cpu()
        return total[: self.length], most[: self.length]

    def _bind_keys(self, binding: Any) -> None:
        """Bind the last layer's keys to a score graph."""
        binding.bind_ortvalue_input(names.KEY, self.buffers[-2])

    def keys(self) -> NDArray[np.float32]:
        wide = self.kv[-1][0, 0, :, : self.length].astype(np.float32)
        return wide if self.stage.key_scale is None else wide * self.stage.key_scale.numpy()[0]

    def _read(self, slots: Ids) -> list[NDArray[Any]]:
        return [np.take(layer, slots, axis=-2) for layer in self.kv]

    def _write(self, slots: Ids, kv: list[NDArray[Any]], length: int) -> None:
        for layer, part in zip(self.kv, kv, strict=True):
            layer[..., slots, :] = part

    def _copy(self, other: OrtStageCache, length: int) -> None:
        for layer, source in zip(self.kv, other.kv, strict=True):
            layer[..., :length, :] = source[..., :length, :]


class OrtReadingCache(OrtStageCache):
    """The cache of a stage whose layers keep nothing: they read K and V of `sources`, caches by layer.

    The tokens of a run are in the sources' last slots already.
    """

    def __init__(self, stage: OrtStage, sources: Mapping[int, OrtStageCache]) -> None:
        self.sources = sources
        super().__init__(stage, 0)
        lanes = [cache.lane for cache in sources.values()]
        self.lane = None if None in lanes else lanes[0]

    def buffers_at(self, number: int | None) -> tuple[list[NDArray[Any]], list[Any], Any]:
        self._slots = {names.source_slot(layer): np.zeros(1, np.int32) for layer in self.sources}
        self._held = [cache.buffers for cache in self.sources.values()]
        buffers = list[Any]()
        for layer, cache in self.sources.items():
            at = 2 * cache.stage.spec.cached.index(layer)
            buffers += cache.buffers[at : at + 2]
        return [], buffers, self._bind_row(buffers)

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        if any(buffers is not cache.buffers for buffers, cache in zip(self._held, self.sources.values(), strict=True)):
            self.kv, self.buffers, self.row_binding = self.buffers_at(None)  # a source has moved to another lane
        out = self._run(tokens, positions, query=False)
        return out if outputs is None else out[outputs]

    def _first_slots(self, positions: Ids) -> Ids:
        slides = self._context.model.slides
        caches = [cache for layer, cache in self.sources.items() if slides(layer)]
        cache = (caches or [*self.sources.values()])[0]  # none may slide: then the graph does not use them
        return cache.first_slots(positions, cache.length)

    def _count(self, _: int) -> None:
        for layer, cache in self.sources.items():
            self._slots[names.source_slot(layer)][0] = cache.length - 1

    def keep(self, length: int) -> None:
        """Nothing is held."""
