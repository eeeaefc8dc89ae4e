"""The graphs of any dialect, run by onnxruntime on the CPU: a backend that keeps caches as each dialect wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.exported import THREADS
from vtx.runtime import contract, names
from vtx.runtime.backend import Rows, StageCache
from vtx.runtime.bundle import Bundle
from vtx.runtime.manifest import StageSpec
from vtx.runtime.ort import load_onnxruntime, share_threads
from vtx.runtime.safetensors import read_header, read_tensor

Tensors = dict[str, NDArray[Any]]


class DialectBackend:
    """`Backend` of one dialect; every graph is checked against its contract."""

    device = "cpu"

    def __init__(self, bundle: Bundle, dialect: str) -> None:
        self.bundle, self.manifest, self.dialect = bundle, bundle.manifest, dialect
        graphs = self.manifest.dialects[dialect]
        self._ort = load_onnxruntime()
        share_threads(self._ort, THREADS)
        self._embed = self._session(graphs.embed, contract.embed(self.manifest))
        self._vision = self._session(graphs.vision, contract.vision(self.manifest))
        self._head = self._session(graphs.head, contract.head(self.manifest))
        self._gates = {g.k: self._session(g.graph, contract.gate(self.manifest)) for g in graphs.gates}
        self.stages = [(s, self._session(s.graph, contract.stage(self.manifest, s, dialect))) for s in graphs.stages]
        tables = read_header(bundle.path(self.manifest.rope)).tensors
        self.rope = {name: read_tensor(tables[name]) for name in (names.COS, names.SIN)}

    def _session(self, name: str, promised: contract.Contract) -> Any:
        options = self._ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3  # TensorScatter warns that it copies a buffer that is bound twice elsewhere
        session = self._ort.InferenceSession(Path(self.bundle.path(name)), options, providers=["CPUExecutionProvider"])
        contract.check(name, session, promised)
        return session

    def embed(self, ids: NDArray[np.int64]) -> Rows:
        return _first(self._embed, {names.IDS: ids})

    def vision(self, pixels: NDArray[np.float32]) -> Rows:
        features = _first(self._vision, {names.PIXELS: pixels})
        return features.reshape(-1, features.shape[-1])

    def head(self, rows: Rows) -> NDArray[np.float32]:
        return _first(self._head, {names.HIDDEN: rows})

    def gate(self, k: int, rows: Rows) -> NDArray[np.float32]:
        return _first(self._gates[k], {names.HIDDEN: rows})

    def stage(self, index: int, capacity: int) -> StageCache:
        return CACHES[self.dialect](self, *self.stages[index])


def _first(session: Any, inputs: Tensors) -> NDArray[np.float32]:
    out: NDArray[np.float32] = session.run(None, inputs)[0]
    return out


class _Cache:
    """What the caches have in common: a run takes `_kv`, the pasts by name, and leaves the presents there."""

    def __init__(self, backend: DialectBackend, spec: StageSpec, session: Any) -> None:
        self._backend, self._session = backend, session
        self._layers = range(spec.first, spec.last + 1)
        model = backend.manifest.model
        empty = np.zeros((1, model.kv_heads, self.first_slots(), model.head_dim), backend.manifest.kv_dtype)
        self._kv = {name(n): empty for n in self._layers for name in (names.past_key, names.past_value)}
        self.length = 0

    def first_slots(self) -> int:
        raise NotImplementedError

    def told(self, rows: int) -> Tensors:
        """What the dialect tells a stage of slots."""
        raise NotImplementedError

    def append(self, rows: Rows, positions: NDArray[np.int64]) -> Rows:
        inputs = {names.HIDDEN: rows, names.POSITIONS: positions[None], **self._backend.rope, **self._kv}
        wanted = [output.name for output in self._session.get_outputs()]
        outputs = self._session.run(wanted, inputs | self.told(len(rows)))
        found: Tensors = dict(zip(wanted, outputs, strict=True))
        for n in self._layers:
            self._kv[names.past_key(n)] = found[names.present_key(n)]
            self._kv[names.past_value(n)] = found[names.present_value(n)]
        self.length += len(rows)
        return found[names.HIDDEN_OUT]

    def keep(self, length: int) -> None:
        assert length <= self.length
        self.length = length


class GrownCache(_Cache):
    """The `plain` dialect's: each layer's K and V [1, kv_heads, filled slots, head_dim]."""

    def first_slots(self) -> int:
        return 0

    def told(self, rows: int) -> Tensors:
        assert {kv.shape[2] for kv in self._kv.values()} == {self.length}
        return {}

    def keep(self, length: int) -> None:
        super().keep(length)
        self._kv = {name: kv[:, :, :length] for name, kv in self._kv.items()}


class FixedCache(_Cache):
    """The `trt` dialect's: K and V of `max_context` slots, of which `length` are filled; others hold what they hold."""

    def first_slots(self) -> int:
        return self._backend.manifest.max_context

    def told(self, rows: int) -> Tensors:
        return {names.TOTAL_SLOTS: np.array([self.length + rows], np.int32)}


CACHES: dict[str, type[_Cache]] = {"plain": GrownCache, "trt": FixedCache}
