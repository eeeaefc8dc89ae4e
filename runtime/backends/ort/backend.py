"""The onnxruntime backend: one session per graph, K/V updated in place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.memory import returning_memory, zeros_in_small_pages
from vtx.runtime.backends.ort.library import load_onnxruntime, session_options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors.kv_scales import read_kv_scales
from vtx.runtime.bundle.tensors.rope import read_rope
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.host.machine import cores
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, Ids, ImageTokens, Rows, Scores

_SMALLER = "use a smaller precision or a machine with more"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class OrtBackend:
    """`Backend` on onnxruntime's CPU provider."""

    device = "cpu"
    providers: Sequence[str] = ("CPUExecutionProvider",)

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self._ort = load_onnxruntime()
        self._bundle, self._manifest = bundle, bundle.manifest
        self.dialect, self.compute = "ort", "f32"
        self.threads = threads or cores()
        graphs = self._manifest.dialects["ort"]
        self._options = self._session_options()
        self._embed = self._session(graphs.embed, contract.embed(self._manifest))
        self._head = self._session(graphs.head, contract.head(self._manifest))
        stages, gates = self._manifest.stage_files("ort"), self._manifest.gate_files("ort")
        self._stages = [self._session(file, contract.stage(self._manifest, spec, "ort")) for spec, file in stages]
        self._specs = self._manifest.stages
        self._gates = {k: self._session(file, contract.gate(self._manifest)) for k, file in gates.items()}
        score = contract.score(self._manifest, "ort")
        self._score: Any = self._session(graphs.score, score) if graphs.score else None
        self._vision: Any = None
        self._vision_lock = threading.Lock()
        cos, sin = read_rope(bundle)
        self._rope = self._value(cos), self._value(sin)
        self.kv_slot_bytes = self._manifest.kv_slot_bytes()
        scales = read_kv_scales(bundle) if self._manifest.kv_dtype == "int8" else {}
        self.kv_scales = {name: self._value(scale) for name, scale in scales.items()}

    def _session_options(self) -> Any:
        options = session_options(self._ort, self.threads)
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.enable_mem_pattern = False  # row counts change with every prompt
        options.enable_cpu_mem_arena = False  # each session's own would keep what the longest prompt took
        return options

    def _session(self, name: str, promised: contract.Contract) -> Any:
        with self._bundle.lent(name) as path:
            try:
                with returning_memory():
                    session = self._ort.InferenceSession(os.fspath(path), self._options, providers=list(self.providers))
            except Exception as e:
                if isinstance(e, MemoryError) or "bad_alloc" in str(e) or "allocate" in str(e):
                    raise DeviceError(f"not enough memory to load {name}; {_SMALLER}") from e
                raise BundleError(f"onnxruntime cannot load {name}: {_one_line(e)}; export the bundle again") from e
        contract.check(name, session, promised)
        return session

    def _value(self, array: NDArray[Any]) -> Any:
        """An OrtValue over the array's own memory."""
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def embed(self, ids: NDArray[np.int64]) -> Rows:
        rows: Rows = self._embed.run(None, {names.IDS: ids})[0]
        return rows

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        graphs = self._manifest.dialects["ort"]
        with self._vision_lock:
            if self._vision is None:
                self._vision = self._session(graphs.vision, contract.vision(self._manifest, self.dialect))
        feeds = {names.PIXELS: pixels, **contract.vision_extras(self._manifest, self.dialect, extras)}
        found = dict(zip((o.name for o in self._vision.get_outputs()), self._vision.run(None, feeds), strict=True))
        return ImageTokens.of(found)

    def head(self, rows: Rows) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._head.run(None, {names.HIDDEN: rows})[0]
        return logits

    def gate(self, k: int, rows: Rows) -> NDArray[np.float32]:
        odds: NDArray[np.float32] = self._gates[k].run(None, {names.HIDDEN: rows})[0]
        return odds

    def stage(self, index: int, capacity: int) -> OrtStageCache:
        try:
            return OrtStageCache(self, self._stages[index], self._specs[index], capacity)
        except MemoryError as e:
            raise DeviceError(
                f"not enough memory for a KV cache of {capacity} slots; export a smaller --max-context"
            ) from e

    def close(self) -> None:
        self._stages.clear()
        self._gates.clear()
        self._embed = self._head = self._score = self._vision = None


class OrtStageCache:
    """`StageCache` whose K/V buffers are allocated once and bound as input and output alike.

    One row, as in decoding, runs through a binding made once; nothing is allocated for it.
    """

    bound_once = True

    def __init__(self, backend: OrtBackend, session: Any, spec: StageSpec, capacity: int) -> None:
        self._backend, self._session, self.capacity = backend, session, capacity
        self.length = 0
        model, kv_type = backend._manifest.model, np.dtype(backend._manifest.kv_dtype)
        shape = (spec.layers, 2, 1, model.kv_heads, capacity, model.head_dim)
        self._kv: NDArray[Any]
        self._buffers: list[tuple[str, str, Any]] = []
        for layer, (key, value) in zip(range(spec.first, spec.last + 1), self._allocate(shape, kv_type), strict=True):
            self._buffers.append((names.past_key(layer), names.present_key(layer), key))
            self._buffers.append((names.past_value(layer), names.present_value(layer), value))
        self._key_scale = backend.kv_scales.get(names.key_scale(spec.last))
        scales = {name(n) for n in range(spec.first, spec.last + 1) for name in (names.key_scale, names.value_scale)}
        self._scales = {name: scale for name, scale in backend.kv_scales.items() if name in scales}  # none if not int8
        self._query = np.zeros((0, model.heads * model.head_dim), np.float32)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        self._row: Rows = np.zeros((1, model.hidden), np.float32)
        self._row_out: Rows = np.zeros((1, model.hidden), np.float32)
        self._row_position = np.zeros((1, 1), np.int64)
        self._row_binding = self._bind(self._row, self._row_position, self._row_out)

    def _allocate(self, shape: tuple[int, ...], kv_type: np.dtype[Any]) -> Iterator[tuple[Any, Any]]:
        """Key and value buffer of each layer, of `shape` [layers, 2, 1, kv_heads, capacity, head_dim] together."""
        self._kv = zeros_in_small_pages(shape, kv_type)
        for layer in self._kv:
            yield self._backend._value(layer[0]), self._backend._value(layer[1])

    def append(self, rows: Rows, positions: Ids, *, query: bool = False) -> Rows:
        count = len(rows)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} rows in a cache of {self.capacity}")
        self._last[0], self._total[0] = self.length + count - 1, self.length + count
        if query:
            out, self._query = np.empty_like(rows), np.empty((count, self._query.shape[1]), np.float32)
            binding = self._bind(np.ascontiguousarray(rows), positions[None].copy(), out)
            binding.bind_ortvalue_output(names.QUERY, self._backend._value(self._query))
            self._session.run_with_iobinding(binding)
        elif count == 1 and self.bound_once:
            self._row[:], self._row_position[:] = rows, positions
            self._session.run_with_iobinding(self._row_binding)
            out = self._row_out
        else:
            out = np.empty_like(rows)
            binding = self._bind(np.ascontiguousarray(rows), positions[None].copy(), out)
            self._session.run_with_iobinding(binding)
        self.length += count
        return out

    def keep(self, length: int) -> None:
        assert length <= self.length, (length, self.length)
        self.length = length

    def attention(self, *, last_only: bool = False) -> Scores:
        session, value = self._backend._score, self._backend._value
        query = self._query[-1:] if last_only else self._query
        binding = session.io_binding()
        binding.bind_ortvalue_input(names.QUERY, value(query))
        binding.bind_ortvalue_input(names.KEY, self._buffers[-2][2])  # the last layer's
        binding.bind_ortvalue_input(names.TOTAL_SLOTS, value(self._total))
        if self._key_scale is not None:
            binding.bind_ortvalue_input(names.KEY_SCALE, self._key_scale)
        binding.bind_output(names.ATTENTION_SUM, "cpu")
        binding.bind_output(names.ATTENTION_MAX, "cpu")
        session.run_with_iobinding(binding)
        total, most = binding.copy_outputs_to_cpu()
        return total[: self.length], most[: self.length]

    def keys(self) -> NDArray[np.float32]:
        return self._scaled(self._kv[-1, 0, 0, :, : self.length])

    def _scaled(self, keys: NDArray[Any]) -> NDArray[np.float32]:
        """Keys [kv_heads, slots, head_dim] of the last layer as numbers."""
        wide = keys.astype(np.float32)
        return wide if self._key_scale is None else wide * self._key_scale.numpy()[0]

    def read(self, slots: Ids) -> NDArray[Any]:
        return np.take(self._kv, slots, axis=-2)

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        self._kv[..., slots, :] = kv
        self.length = length

    def _bind(self, rows: Rows, positions: NDArray[np.int64], out: Rows) -> Any:
        binding, value = self._session.io_binding(), self._backend._value
        binding.bind_ortvalue_input(names.HIDDEN, value(rows))
        binding.bind_ortvalue_input(names.POSITIONS, value(positions))
        binding.bind_ortvalue_input(names.COS, self._backend._rope[0])
        binding.bind_ortvalue_input(names.SIN, self._backend._rope[1])
        binding.bind_ortvalue_input(names.LAST_SLOT, value(self._last))
        binding.bind_ortvalue_input(names.TOTAL_SLOTS, value(self._total))
        binding.bind_ortvalue_output(names.HIDDEN_OUT, value(out))
        for name, scale in self._scales.items():
            binding.bind_ortvalue_input(name, scale)
        for past, present, buffer in self._buffers:
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        return binding
