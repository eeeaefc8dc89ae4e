"""The OpenVINO backend: one compiled graph a stage, K and V in blocks that one infer request a cache fills."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.openvino.cache import KV_ARRAYS, ROW_SCALE_BYTES, OpenvinoStageCache
from vtx.runtime.backends.openvino.narrow import keep_narrow, letting_go
from vtx.runtime.backends.openvino.paged import page_caches
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors.rope import read_rope
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.host.machine import cores
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, Ids, ImageTokens, Rows, Scores

DIALECT = "plain"
WORDS = {"f32": "float", "f16": "float16", "i64": "int64", "i32": "int32"}  # OpenVINO's and onnxruntime's
KV_WORDS = {"float32": "f32", "float16": "f16", "int8": "u8"}  # numpy's and OpenVINO's
# Values of a row that share a scale where rows are quantised for products of integers, as onnxruntime does it too.
QUANTISED_ROWS = {"int8": 128, "int4": 64}


def load_openvino() -> Any:
    """The openvino module, or DeviceError with the command that installs it."""
    try:
        import openvino
    except ImportError as e:
        raise DeviceError('openvino is not installed; pip install "vtx-edge[openvino]"') from e
    return openvino


def arithmetic(compute: str, precision: str, threads: int) -> dict[str, Any]:
    """The engine's settings for products of rows with weights stored in `precision`, in `compute` arithmetic."""
    return {
        "INFERENCE_PRECISION_HINT": compute,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": QUANTISED_ROWS.get(precision, 0),
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # or the graphs of two processes fight over the same cores
    }


@dataclass(frozen=True, slots=True)
class _Port:
    """An input or output as `contract.check` looks at it."""

    name: str
    type: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, port: Any, promised: Iterable[str]) -> _Port:
        """A port may have further names, which tensors had on the way to it."""
        name = next(iter(port.get_names().intersection(promised)), port.get_any_name())
        shape = tuple(None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
        kind = port.get_element_type().get_type_name()
        return cls(name, f"tensor({WORDS.get(kind, kind)})", shape)


@dataclass(frozen=True, slots=True)
class _Ports:
    """A graph's inputs and outputs, asked for as onnxruntime's sessions are."""

    model: Any
    promised: contract.Contract

    def get_inputs(self) -> Sequence[_Port]:
        return [_Port.of(port, self.promised[0]) for port in self.model.inputs]

    def get_outputs(self) -> Sequence[_Port]:
        return [_Port.of(port, self.promised[1]) for port in self.model.outputs]


class _Graph:
    """A compiled graph. Calls from several threads wait for each other."""

    def __init__(self, compiled: Any, outputs: Iterable[str]) -> None:
        self._request, self._outputs = compiled.create_infer_request(), tuple(outputs)
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name."""
        with self._lock:
            self._request.infer(dict(inputs), share_inputs=True, share_outputs=True)
            return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}


class OpenvinoBackend:
    """`Backend` on OpenVINO's CPU plugin, from the bundle's `plain` graphs.

    `compute` is the type of the arithmetic: "f32", or "bf16" on processors that have it.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f32") -> None:
        self._openvino = load_openvino()
        self._bundle, self._manifest = bundle, bundle.manifest
        if DIALECT not in self._manifest.dialects:
            raise DeviceError(
                f"this bundle holds no graphs of the {DIALECT!r} dialect, which OpenVINO reads; "
                f"export it with --dialect ort,{DIALECT}"
            )
        self.device, self.dialect, self.compute = "openvino", DIALECT, compute
        self.threads = threads or cores()
        self._core = self._openvino.Core()
        kept, model = KV_WORDS[self._manifest.kv_dtype], self._manifest.model
        self._kv = "bf16" if compute == "bf16" and kept != "u8" else kept
        self.kv_width = model.head_dim + (ROW_SCALE_BYTES if self._kv == "u8" else 0)
        self.kv_slot_bytes = 2 * model.kv_heads * self.kv_width * np.dtype(KV_ARRAYS[self._kv]).itemsize
        self._settings = self._choose_settings()
        graphs = self._manifest.dialects[DIALECT]
        self._rope = read_rope(bundle)
        self._row = np.zeros((1, self._manifest.model.hidden), np.float32)
        self._embed = self._graph(graphs.embed, contract.embed(self._manifest))
        self._head = self._graph(graphs.head, contract.head(self._manifest), {names.HIDDEN: self._row})
        stages, gates = self._manifest.stage_files(DIALECT), self._manifest.gate_files(DIALECT)
        self._stages = [self._compile_stage(spec, file) for spec, file in stages]
        self._specs = self._manifest.stages
        self._gates = {k: self._graph(file, contract.gate(self._manifest)) for k, file in gates.items()}
        self._score = self._graph(graphs.score, contract.score(self._manifest, DIALECT)) if graphs.score else None
        self._vision: _Graph | None = None
        self._vision_lock = threading.Lock()

    def _choose_settings(self) -> dict[str, Any]:
        able = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if self.compute == "bf16" and "BF16" not in able:
            raise DeviceError(f"this processor computes {', '.join(able)}, not bf16; leave out --compute bf16")
        by_row = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if self._kv == "u8" else {}
        computing = arithmetic(self.compute, self._manifest.precision, self.threads)
        return {"KV_CACHE_PRECISION": self._kv, **by_row, **computing}

    def _read(self, name: str, promised: contract.Contract) -> Any:
        with self._bundle.lent(name) as path:
            try:
                model = self._core.read_model(os.fspath(path))
            except RuntimeError as e:
                raise BundleError(f"OpenVINO cannot read {name}: {_one_line(e)}; export the bundle again") from e
        contract.check(name, _Ports(model, promised), promised)
        keep_narrow(model)
        return model

    def _graph(self, name: str, promised: contract.Contract, first: Mapping[str, NDArray[Any]] | None = None) -> _Graph:
        """`first`: inputs to run once, since the engine packs the weights of a graph of any size when it first runs."""
        model = self._read(name, promised)
        with letting_go(model):
            graph = _Graph(self._engine(name, model), promised[1])
            if first is not None:
                graph.run(first)
        return graph

    def _compile_stage(self, spec: StageSpec, file: str) -> Any:
        model = self._read(file, contract.stage(self._manifest, spec, DIALECT))
        page_caches(model, range(spec.first, spec.last + 1), self._manifest.model.heads)
        with letting_go(model):
            compiled = self._engine(file, model)
            OpenvinoStageCache(self, compiled, spec, 1).append(self._row, np.zeros(1, np.int64))
        return compiled

    def _engine(self, name: str, model: Any) -> Any:
        try:
            return self._core.compile_model(model, "CPU", self._settings)
        except RuntimeError as e:
            if "alloc" in str(e):
                raise DeviceError(
                    f"not enough memory to load {name}; use a smaller precision or a machine with more"
                ) from e
            raise BundleError(f"OpenVINO cannot compile {name}: {_one_line(e)}; export the bundle again") from e

    def embed(self, ids: Ids) -> Rows:
        return self._embed.run({names.IDS: ids})[names.HIDDEN]

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        with self._vision_lock:
            if self._vision is None:
                self._vision = self._compile_vision()
        inputs = {names.PIXELS: np.ascontiguousarray(pixels)}
        inputs |= contract.vision_extras(self._manifest, DIALECT, extras)
        return ImageTokens.of(self._vision.run(inputs))

    def _compile_vision(self) -> _Graph:
        """Compiled for one image, which lets the engine choose its kernels for these very sizes."""
        graphs, image = self._manifest.dialects[DIALECT], self._manifest.image
        promised = contract.vision(self._manifest, DIALECT)
        model = self._read(graphs.vision, promised)
        model.reshape({names.PIXELS: [1, 3, image.height, image.width]})
        with letting_go(model):
            return _Graph(self._engine(graphs.vision, model), promised[1])

    def head(self, rows: Rows) -> NDArray[np.float32]:
        return self._head.run({names.HIDDEN: np.ascontiguousarray(rows)})[names.LOGITS]

    def gate(self, k: int, rows: Rows) -> NDArray[np.float32]:
        return self._gates[k].run({names.HIDDEN: np.ascontiguousarray(rows)})[names.ODDS]

    def stage(self, index: int, capacity: int) -> OpenvinoStageCache:
        return OpenvinoStageCache(self, self._stages[index], self._specs[index], capacity)

    def close(self) -> None:
        self._stages.clear()
        self._gates.clear()
        self._score = self._vision = None
        del self._embed, self._head

    def scores(self, query: NDArray[np.float32], key: NDArray[Any]) -> Scores:
        """What `query` [rows, heads * head_dim] gives to the slots of `key` [1, kv_heads, slots, head_dim]."""
        assert self._score is not None
        slots = np.array([key.shape[2]], np.int32)
        key = key.astype(names.kv_type(DIALECT, self._manifest.kv_dtype), copy=False)
        found = self._score.run({names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: slots})
        return found[names.ATTENTION_SUM], found[names.ATTENTION_MAX]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]
