"""The graphs of any dialect, run by onnxruntime on the CPU: a backend that keeps caches as each dialect wants them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tests.support.exported import THREADS
from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import NOTHING, StageCache
from vtx.runtime.backends.ort.graph import ports
from vtx.runtime.backends.ort.library import load_onnxruntime, session_options
from vtx.runtime.backends.slots import StateHistory, seen_slots
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs as graph_io
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import read_rope, rope_at
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, Scores, TokenStates

Tensors = dict[str, NDArray[Any]]
POSITIONS = "positions"  # among the saved K and V of slots


class DialectBackend:
    """`Backend` of one dialect; every graph is checked against its contract."""

    device, compute = "cpu", "f32"

    def __init__(self, bundle: Bundle, dialect: str) -> None:
        self.bundle, self.manifest, self.dialect = bundle, bundle.manifest, dialect
        self.kv_slot_bytes = self.manifest.kv_slot_bytes(dialect)
        graphs = self.manifest.dialects[dialect]
        self._ort = load_onnxruntime()
        self._embed = self._session(graphs.embed, graph_io.embed(self.manifest))
        self._vision = self._session(graphs.vision, graph_io.vision(self.manifest, dialect))
        if graphs.projector is not None:
            self._projector = self._session(graphs.projector, graph_io.projector(self.manifest))
        self._head = self._session(graphs.head, graph_io.head(self.manifest, dialect))
        self.score = self._session(graphs.score, graph_io.score(self.manifest, self.dialect)) if graphs.score else None
        self._gates = {
            k: self._session(f, graph_io.gate(self.manifest)) for k, f in self.manifest.gate_files(dialect).items()
        }
        staged = self.manifest.stage_files(dialect)
        self.stages = [(s, self._session(file, graph_io.stage_of(self.manifest, s, dialect))) for s, file in staged]
        self.rope = read_rope(bundle)

    def _session(self, name: str, promised: graph_io.GraphIO) -> Any:
        options = session_options(self._ort, THREADS)
        session = self._ort.InferenceSession(Path(self.bundle.path(name)), options, providers=["CPUExecutionProvider"])
        contract.check(name, *ports(session), promised)
        return session

    def embed(self, ids: NDArray[np.int64]) -> TokenStates:
        return contract.embedded("embed", _run(self._embed, {names.IDS: ids}), len(ids))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        feeds = {names.PIXELS: pixels, **contract.vision_extras(self.manifest, self.dialect, extras)}
        return ImageTokens.of(_run(self._vision, feeds), self.manifest.model.tower)

    def project(self, states: HiddenStates) -> HiddenStates:
        return _first(self._projector, {names.TOWER_STATES: states})

    def head(self, rows: HiddenStates) -> NDArray[np.float32]:
        return _first(self._head, {names.HIDDEN: rows})

    def gate(self, k: int, rows: HiddenStates) -> NDArray[np.float32]:
        return _first(self._gates[k], {names.HIDDEN: rows})

    def text_tower(self, ids: Ids) -> NDArray[np.float32]:
        file = self.manifest.dialects[self.dialect].text_tower
        return _first(self._session(file, graph_io.text_tower(self.manifest)), {names.IDS: ids})

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> StageCache:
        if sources:
            return cast(StageCache, ReadingCache(self, *self.stages[index], sources))
        return CACHES[self.dialect](self, *self.stages[index], capacity)


def _run(session: Any, inputs: Tensors) -> Tensors:
    wanted = [output.name for output in session.get_outputs()]
    return dict(zip(wanted, session.run(wanted, inputs), strict=True))


def _first(session: Any, inputs: Tensors) -> NDArray[np.float32]:
    out: NDArray[np.float32] = session.run(None, inputs)[0]
    return out


class _Cache:
    """What the caches have in common: a run takes `kv`, the pasts by name, and leaves the presents there."""

    selects_outputs = False

    def __init__(self, backend: DialectBackend, spec: StageSpec, session: Any, capacity: int) -> None:
        self._backend, self._session, self.capacity = backend, session, capacity
        self._layers, self._reads = spec.cached, spec.inputs
        model = backend.manifest.model
        self._axes = model.rope.axes
        self._axis = 1 if backend.dialect in names.TENSORRT else 2  # that of the slots
        self.kv = {name(n): self._empty(n) for n in self._layers for name in (names.past_key, names.past_value)}
        self.positions = np.zeros(backend.manifest.max_context, np.int64)  # of the tokens in slots
        self._query: HiddenStates = np.zeros((0, model.heads * model.head_dim), np.float32)
        self.states = StateHistory(spec, model) if spec.stateful else None
        limited = model.delta is not None and backend.dialect in names.TENSORRT
        self._run = graph_io.DELTA_RUN if limited else capacity
        self.length = 0

    def _empty(self, layer: int) -> NDArray[Any]:
        backend, model = self._backend, self._backend.manifest.model
        sizes = [model.kv_heads, model.heads_of(layer)]
        sizes.insert(self._axis - 1, self.first_slots())
        return np.zeros((1, *sizes), names.kv_type(backend.dialect, backend.manifest.kv_dtype))

    def first_slots(self) -> int:
        raise NotImplementedError

    def seen_from(self, positions: Ids, filled: int) -> Ids:
        """The first of `filled` slots within the window of tokens at these positions, one by one."""
        sliding = self._backend.manifest.model.sliding
        assert sliding is not None
        near = [np.flatnonzero(p - self.positions[:filled] < sliding.window) for p in positions]
        return np.array([slots[0] for slots in near])

    def told(self, rows: int) -> Tensors:
        """What the dialect tells a stage of slots."""
        raise NotImplementedError

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        if len(tokens) > self._run:
            parts = list[HiddenStates]()
            for at in range(0, len(tokens), self._run):
                end = min(at + self._run, len(tokens))
                parts.append(self.append(tokens.part(at, end), positions[at:end], query=query))
            return np.concatenate(parts) if outputs is None else np.concatenate(parts)[outputs]
        hidden = tokens.hidden
        assert self.length + len(hidden) <= self.capacity
        rope = self._backend.rope
        if positions.ndim > 1:  # tables of these tokens alone, as long as the bundle's
            cos, sin = rope_at((rope[names.COS], rope[names.SIN]), self._axes, positions)
            room = ((0, len(rope[names.COS]) - len(hidden)), (0, 0))
            rope, positions = {names.COS: np.pad(cos, room), names.SIN: np.pad(sin, room)}, np.arange(len(hidden))
        inputs = {names.HIDDEN: hidden, names.POSITIONS: positions[None], **rope, **self.kv}
        inputs |= {names.token_input(name): tokens.inputs[name] for name in self._reads}
        if self._backend.manifest.model.two_way:
            inputs[names.SEEN_SLOTS] = seen_slots(tokens, self.length)[None]
        if self.states is not None:
            ends = self.states.ends(self.length, len(hidden))
            inputs |= {names.STATE: self.states.before(self.length), names.STATE_ENDS: ends}
        if self._backend.manifest.model.sliding is not None:
            filled = self.length + len(hidden)
            self.positions[self.length : filled] = positions
            inputs[names.FIRST_SLOT] = self.seen_from(positions, filled)[None]
        found = _run(self._session, inputs | self.told(len(hidden)))
        if self.states is not None:
            self.states.put(self.length, ends, found[names.STATE_OUT])
        for n in self._layers:
            self._take(names.past_key(n), found[names.present_key(n)])
            self._take(names.past_value(n), found[names.present_value(n)])
        if query:
            self._query = found[names.QUERY]
        self.length += len(hidden)
        out: HiddenStates = found[names.HIDDEN_OUT]
        return out if outputs is None else out[outputs]

    def _take(self, past: str, present: NDArray[Any]) -> None:
        """Keep what a stage gave."""
        self.kv[past] = present

    def _slots(self, name: str, slots: Any) -> NDArray[Any]:
        """Some slots of a layer's K or V [1, kv_heads, slots, head_dim], a view of all of them for a slice."""
        kv = self.kv[name] if self._axis == 2 else self.kv[name].swapaxes(1, 2)
        return kv[:, :, slots]

    def attention(self, *, last_only: bool = False) -> Scores:
        query = self._query[-1:] if last_only else self._query
        key, total = self.kv[names.past_key(self._layers[-1])], np.array([self.length], np.int32)
        found = _run(self._backend.score, {names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: total})
        return found[names.ATTENTION_SUM][: self.length], found[names.ATTENTION_MAX][: self.length]

    def keys(self) -> HiddenStates:
        keys: HiddenStates = self._slots(names.past_key(self._layers[-1]), slice(self.length))[0].astype(np.float32)
        return keys

    def keep(self, length: int) -> None:
        assert length <= self.length
        if self.states is not None:
            self.states.keep(length)
        self.cut(length)

    def cut(self, length: int) -> None:
        self.length = length

    def mark(self, length: int) -> None:
        if self.states is not None:
            self.states.mark(length)

    def nearest(self, length: int) -> int:
        return length if self.states is None else self.states.nearest(length)

    def copy(self, other: _Cache, length: int) -> None:
        self.write(np.arange(length), other.read(np.arange(length)), length=length)
        if self.states is not None:
            self.states.take(other.states, length)

    @property
    def tried(self) -> int:
        return self.capacity if self.states is None else self.states.tried

    @property
    def state_bytes(self) -> int:
        return 0

    def read(self, slots: Ids) -> Tensors:
        return {POSITIONS: self.positions[slots], **{name: self._slots(name, slots) for name in self.kv}}

    def write(self, slots: Ids, kv: Tensors, *, length: int) -> None:
        """Slots from the end of a grown cache on make it longer."""
        self.positions[slots] = kv[POSITIONS]
        for name, rows in kv.items():
            if name == POSITIONS:
                continue
            room = [(0, 0)] * 4
            room[self._axis] = (0, max(0, length - self.kv[name].shape[self._axis]))
            self.kv[name] = np.pad(self.kv[name], room)
            self._slots(name, slice(None))[:, :, slots] = rows
        self.cut(length)


class GrownCache(_Cache):
    """The `plain` dialect's: each layer's K and V [1, kv_heads, filled slots, head_dim]."""

    def first_slots(self) -> int:
        return 0

    def told(self, rows: int) -> Tensors:
        assert {kv.shape[2] for kv in self.kv.values()} == {self.length}
        return {}

    def cut(self, length: int) -> None:
        super().cut(length)
        self.kv = {name: kv[:, :, :length] for name, kv in self.kv.items()}


class AppendedCache(_Cache):
    """TensorRT's dialects': K and V of `max_context` slots, `length` of them filled; others hold what they hold."""

    def first_slots(self) -> int:
        return self._backend.manifest.max_context

    def told(self, rows: int) -> Tensors:
        return {names.TOTAL_SLOTS: np.array([self.length + rows], np.int32)}

    def _take(self, past: str, present: NDArray[Any]) -> None:
        self.kv[past] = self.kv[past].copy()
        self.kv[past][:, self.length : self.length + present.shape[1]] = present


class InPlaceCache(_Cache):
    """The `ort-cuda` dialect's: K and V of all slots of the capacity, of which `length` are filled."""

    def first_slots(self) -> int:
        return self.capacity

    def told(self, rows: int) -> Tensors:
        total = self.length + rows
        return {names.LAST_SLOT: np.array([total - 1], np.int32), names.TOTAL_SLOTS: np.array([total], np.int32)}


class ReadingCache:
    """Of a stage whose layers read K and V of `sources`, caches by layer; the tokens are in their last slots."""

    selects_outputs, length, state_bytes = False, 0, 0

    def __init__(self, backend: DialectBackend, spec: StageSpec, session: Any, sources: Mapping[int, Any]) -> None:
        self._backend, self._session, self._reads, self._sources = backend, session, spec.inputs, sources

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        inputs = {names.HIDDEN: tokens.hidden, names.POSITIONS: positions[None], **self._backend.rope}
        inputs |= {names.token_input(name): tokens.inputs[name] for name in self._reads}
        for layer, cache in self._sources.items():
            for name in (names.past_key(layer), names.past_value(layer)):
                inputs[name] = cache.kv[name]
            if self._backend.dialect != "plain":
                inputs[names.source_slot(layer)] = np.array([cache.length - 1], np.int32)
            if self._backend.manifest.model.slides(layer) or names.FIRST_SLOT not in inputs:
                inputs[names.FIRST_SLOT] = cache.seen_from(positions, cache.length)[None]
        out: HiddenStates = _run(self._session, inputs)[names.HIDDEN_OUT]
        return out if outputs is None else out[outputs]

    def mark(self, length: int) -> None:
        """Nothing is held."""

    def keep(self, length: int) -> None:
        """Nothing is held."""


CACHES: dict[str, type[_Cache]] = {
    "ort-cuda": InPlaceCache, "plain": GrownCache, "trt": AppendedCache, "trt10": AppendedCache,
}  # fmt: skip
