"""The OpenVINO backend: one compiled graph a stage, K and V as state of one infer request a cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime import contract, names
from vtx.runtime.bundle import Bundle
from vtx.runtime.encoded import NEVER, Encoded, Ids, Rows, Scores
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.machine import cores
from vtx.runtime.manifest import StageSpec
from vtx.runtime.memory import zeros_in_small_pages
from vtx.runtime.narrow import keep_narrow, letting_go
from vtx.runtime.paged import BEGINS, BLOCK, BLOCK_BEGINS, BLOCKS, FILLED, PAST, page_caches
from vtx.runtime.rope import read_rope

DIALECT = "plain"
WORDS = {"f32": "float", "f16": "float16", "i64": "int64", "i32": "int32"}  # OpenVINO's and onnxruntime's
KV_WORDS = {"float32": "f32", "float16": "f16", "int8": "u8"}  # numpy's and OpenVINO's
# Of what K and V are arrays: bfloat16's bits; in u8 a row of a head is its scale, its zero point, and its numbers.
KV_ARRAYS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "u8": np.uint8}
ROW_SCALE_BYTES = 8  # both in float32, found when the row is written
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
        self._stages = [self._compile_stage(spec) for spec in graphs.stages]
        self._specs = graphs.stages
        self._gates = {g.k: self._graph(g.graph, contract.gate(self._manifest)) for g in graphs.gates}
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
        try:
            model = self._core.read_model(os.fspath(self._bundle.path(name)))
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

    def _compile_stage(self, spec: StageSpec) -> Any:
        model = self._read(spec.graph, contract.stage(self._manifest, spec, DIALECT))
        page_caches(model, range(spec.first, spec.last + 1), self._manifest.model.heads)
        with letting_go(model):
            compiled = self._engine(spec.graph, model)
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

    def vision(self, pixels: NDArray[np.float32], tau: float | None = None) -> Encoded:
        with self._vision_lock:
            if self._vision is None:
                self._vision = self._compile_vision()
        inputs = {names.PIXELS: np.ascontiguousarray(pixels)}
        if self._manifest.dialects[DIALECT].vision_merges:
            inputs[names.TAU] = np.array([NEVER if tau is None else tau], np.float32)
        return Encoded.of(self._vision.run(inputs))

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

    def scores(self, query: NDArray[np.float32], key: NDArray[Any]) -> Scores:
        """What `query` [rows, heads * head_dim] gives to the slots of `key` [1, kv_heads, slots, head_dim]."""
        assert self._score is not None
        slots = np.array([key.shape[2]], np.int32)
        key = key.astype(names.kv_type(DIALECT, self._manifest.kv_dtype), copy=False)
        found = self._score.run({names.QUERY: query, names.KEY: key, names.TOTAL_SLOTS: slots})
        return found[names.ATTENTION_SUM], found[names.ATTENTION_MAX]


class OpenvinoStageCache:
    """`StageCache` whose K and V are arrays of blocks, which an infer request over the stage's graph reads and fills.

    Slots are forgotten by being counted no longer. One row, as in decoding, runs through tensors made once.
    """

    def __init__(self, backend: OpenvinoBackend, compiled: Any, spec: StageSpec, capacity: int) -> None:
        self._backend, self.capacity = backend, capacity
        self._tensor = backend._openvino.Tensor
        self._request = compiled.create_infer_request()
        self.length = 0
        model, blocks = backend._manifest.model, -(-capacity // BLOCK)
        shape = (spec.layers, 2, blocks, model.kv_heads, BLOCK, backend.kv_width)
        self._kv = zeros_in_small_pages(shape, np.dtype(KV_ARRAYS[backend._kv]))
        for layer, (keys, values) in zip(range(spec.first, spec.last + 1), self._kv, strict=True):
            self._set(names.past_key(layer), self._blocks(keys))
            self._set(names.past_value(layer), self._blocks(values))
        for name, table in zip((names.COS, names.SIN), backend._rope, strict=True):
            self._set(name, self._shared(table))
        self._past, self._begins, self._filled = np.zeros(1, np.int32), np.zeros(2, np.int32), np.array(0, np.int32)
        self._block_begins, self._block_numbers = np.zeros(2, np.int32), np.arange(blocks, dtype=np.int32)
        said = (PAST, self._past), (BEGINS, self._begins), (FILLED, self._filled), (BLOCK_BEGINS, self._block_begins)
        for name, array in said:
            self._set(name, self._shared(array))
        hidden = model.hidden
        self._row, self._row_position, self._row_out = (
            np.zeros((1, hidden), np.float32), np.zeros((1, 1), np.int64), np.zeros((1, hidden), np.float32),
        )  # fmt: skip
        self._row_tensors = self._tensors(self._row, self._row_position, self._row_out)
        self._query = np.zeros((0, 0), np.float32)
        self._bound: Any = None

    def append(self, rows: Rows, positions: Ids, *, query: bool = False) -> Rows:
        count = len(rows)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} rows in a cache of {self.capacity}")
        if count == 1:
            self._row[:], self._row_position[:] = rows, positions
            tensors, out = self._row_tensors, self._row_out
        else:
            out = np.empty_like(rows)
            tensors = self._tensors(np.ascontiguousarray(rows), positions[None].copy(), out)
        self._bind(tensors)
        self._say(count)
        self._request.infer(share_outputs=True)
        if query:
            self._query = self._request.get_tensor(names.QUERY).data.copy()
        self.length += count
        return out

    def keep(self, length: int) -> None:
        assert length <= self.length, (length, self.length)
        self.length = length

    def attention(self, *, last_only: bool = False) -> Scores:
        keys = self._kv[-1, 0, : -(-self.length // BLOCK)].swapaxes(0, 1)
        key = keys.reshape(1, len(keys), -1, keys.shape[-1])[:, :, : self.length]
        return self._backend.scores(self._query[-1:] if last_only else self._query, _wide(key))

    def read(self, slots: Ids) -> NDArray[Any]:
        return self._kv[:, :, slots // BLOCK, :, slots % BLOCK]

    def write(self, slots: Ids, kv: NDArray[Any], *, length: int) -> None:
        self._kv[:, :, slots // BLOCK, :, slots % BLOCK] = kv
        self.length = length

    def _say(self, count: int) -> None:
        """Tell the attention where `count` rows go. Its buffers are made for the blocks in use: more would overflow."""
        filled = self.length + count
        self._past[0], self._begins[1], self._filled[...] = self.length, count, filled
        blocks = -(-filled // BLOCK)
        if blocks != self._block_begins[1]:
            self._block_begins[1] = blocks
            self._set(BLOCKS, self._shared(self._block_numbers[:blocks]))

    def _blocks(self, array: NDArray[Any]) -> Any:
        """A tensor over K or V of a layer."""
        if self._backend._kv == "bf16":
            return self._tensor(array, array.shape, self._backend._openvino.Type.bf16)
        return self._shared(array)

    def _shared(self, array: NDArray[Any]) -> Any:
        return self._tensor(array, shared_memory=True)

    def _set(self, name: str, tensor: Any) -> None:
        self._request.set_tensor(name, tensor)

    def _tensors(self, rows: Rows, positions: NDArray[np.int64], out: Rows) -> tuple[tuple[str, Any], ...]:
        """Tensors over the arrays' own memory, which must live as long as they are bound: they hold it."""
        arrays = ((names.HIDDEN, rows), (names.POSITIONS, positions), (names.HIDDEN_OUT, out))
        return tuple((name, self._shared(array)) for name, array in arrays)

    def _bind(self, tensors: tuple[tuple[str, Any], ...]) -> None:
        if tensors is self._bound:
            return
        for name, tensor in tensors:
            self._set(name, tensor)
        self._bound = tensors


def _wide(kv: NDArray[Any]) -> NDArray[Any]:
    """K or V as numbers: bfloat16, which numpy lacks, is held by its bits, the upper half of a float32's."""
    if kv.dtype == np.uint8:
        scale, zero = np.moveaxis(np.ascontiguousarray(kv[..., :ROW_SCALE_BYTES]).view(np.float32), -1, 0)
        numbers: NDArray[np.float32] = (kv[..., ROW_SCALE_BYTES:] - zero[..., None]) * scale[..., None]
        return numbers
    return (kv.astype(np.uint32) << 16).view(np.float32) if kv.dtype == np.uint16 else kv


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]
