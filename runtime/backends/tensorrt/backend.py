"""The TensorRT backend: engines of the bundle's `trt` graphs, K and V in device memory, updated in place.

TensorRT and TensorRT-RTX are one API under two names. All work of a backend goes to one stream, one call after the
other; device memory for inputs and outputs is owned once, by tensor name.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.cuda import Buffer, Cuda, load_cuda
from vtx.runtime.backends.tensorrt.engine import Context, Engine
from vtx.runtime.backends.tensorrt.growing import GrowingStageCache
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import EngineSet
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.tensors.rope import read_rope
from vtx.runtime.errors import BundleError, ContextError, DeviceError
from vtx.runtime.host.gpu import Gpu, find_gpu
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, Ids, ImageTokens, Rows

WHOLE: dict[str, Any] = {names.PATCH_INDEX: np.int64, names.MERGED: np.int64}  # outputs that are no float32
COMPUTE = {"float16": "f16", "float32": "f32"}  # `trt` engines compute in the type of K and V


def load_flavour(flavour: str) -> Any:
    """The Python module of a flavour, or DeviceError with what to install."""
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError) as e:
        extra = {"tensorrt_rtx": "rtx", "tensorrt": "tensorrt"}[flavour]
        name = fingerprint.FLAVOUR_NAMES[flavour]
        raise DeviceError(f'{name} is not installed; pip install "vtx-edge[{extra}]"') from e


def find_engines(bundle: Bundle, gpu: Gpu | None) -> tuple[EngineSet, Any]:
    """The bundle's engines for this machine and the module that runs them.

    Raises:
        BundleError: the bundle holds no engines.
        DeviceError: none of them fits; the message says what was built, what this is, and what mends it.

    """
    known = [fingerprint.read_engines(bundle, target) for target in fingerprint.targets(bundle)]
    if not known:
        raise BundleError(f"{bundle.folder} holds no engines; {fingerprint.build_command(bundle, 'this')}")
    likely = sorted(known, key=lambda engines: gpu is None or engines.capability != gpu.capability)
    refusals: list[DeviceError] = []
    for engines in likely:
        try:
            module = load_flavour(engines.flavour)
            fingerprint.check_machine(bundle, engines, engines.flavour, module.__version__, gpu)
        except DeviceError as e:
            refusals.append(e)
        else:
            return engines, module
    raise refusals[0]


class TensorrtBackend:
    """`Backend` on one NVIDIA GPU."""

    def __init__(self, bundle: Bundle, gpu: Gpu | None = None) -> None:
        self.device = "tensorrt"
        self._bundle, self._manifest = bundle, bundle.manifest
        self.engines, trt = find_engines(bundle, gpu or find_gpu())
        self.grows = not names.SLOTS[self.engines.dialect]
        self.dialect = self.engines.dialect
        self.kv_slot_bytes = self._manifest.kv_slot_bytes(self.dialect)
        kv_type = names.kv_type(self.dialect, self._manifest.kv_dtype)
        self.compute = "f32" if self.grows else COMPUTE[kv_type]
        self.lock = threading.RLock()
        self.cuda = Cuda(load_cuda())
        self._trt, self._runtime = trt, trt.Runtime(_logger(trt))
        self._check_memory()
        self._graphs = self._manifest.dialects[self.dialect]
        self._loaded = {graph: self._load(graph) for graph in self.engines.engines}
        self.scratch = Buffer(self.cuda, max(e.scratch for e in self._loaded.values()), "the engines' working memory")
        self._io = {name: Buffer(self.cuda, nbytes, f"the tensor {name}") for name, nbytes in self._io_bytes().items()}
        self._contexts: dict[tuple[str, int], Context] = {}
        self.rope = self._load_rope()

    # --- the graphs ---

    def embed(self, ids: Ids) -> Rows:
        hidden = self._manifest.model.hidden
        return self._run(self._graphs.embed, {names.IDS: ids}, names.HIDDEN, (len(ids), hidden))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        inputs = {names.PIXELS: pixels, **contract.vision_extras(self._manifest, self.dialect, extras)}
        return ImageTokens.of(self._run_all(self._graphs.vision, inputs, self._vision_shapes()))

    def _vision_shapes(self) -> dict[str, tuple[int, ...]]:
        model, graphs = self._manifest.model, self._graphs
        of_tokens = [names.PATCH_INDEX, names.MERGED, names.SIMILARITY] if graphs.vision_merges else []
        of_tokens += [names.CLS_ATTENTION] if graphs.vision_attention else []
        of_tokens += [names.CLS_ATTENTION_LAST] if graphs.vision_last_attention else []
        shapes = dict.fromkeys(of_tokens, (model.tower.tokens,))
        return {names.FEATURES: (1, model.tower.tokens, model.hidden), **shapes}

    def head(self, rows: Rows) -> NDArray[np.float32]:
        vocab, most = self._manifest.model.vocab, self.longest(self._graphs.head)
        parts = [rows[start : start + most] for start in range(0, len(rows), most)]
        run = self._run
        return np.concatenate([run(self._graphs.head, {names.HIDDEN: p}, names.LOGITS, (len(p), vocab)) for p in parts])

    def gate(self, k: int, rows: Rows) -> NDArray[np.float32]:
        graph = self._manifest.gate_files(self.dialect)[k]
        return self._run(graph, {names.HIDDEN: rows}, names.ODDS, (2,))

    def stage(self, index: int, capacity: int) -> TensorrtStageCache | GrowingStageCache:
        spec, graph = self._manifest.stage_files(self.dialect)[index]
        with self.lock:
            kind = GrowingStageCache if self.grows else TensorrtStageCache
            return kind(self, spec, graph, self._graphs.score, capacity)

    def close(self) -> None:
        with self.lock:
            self._contexts.clear()
            self._loaded.clear()
            self._io.clear()

    # --- what caches need ---

    def engine(self, graph: str) -> Engine:
        return self._loaded[graph]

    def context(self, graph: str, profile: int) -> Context:
        """The one context that all share for a graph and a profile."""
        if (graph, profile) not in self._contexts:
            self._contexts[graph, profile] = self._loaded[graph].context(profile, self.scratch)
        return self._contexts[graph, profile]

    def longest(self, graph: str) -> int:
        """The most rows that a graph's engine takes at once."""
        return self.engines.engines[graph].longest("tokens")

    def place(self, name: str) -> int:
        """The address of the memory for the input or output of that name, which all graphs share."""
        return self._io[name].address

    def check_rows(self, graph: str, rows: int) -> None:
        longest = self.longest(graph)
        if rows > longest:
            raise ContextError(
                f"the prompt takes {rows} rows at once, the engine of {graph} was built for at most {longest}; "
                f"ask for less, or {fingerprint.build_command(self._bundle, 'this')}"
            )

    def _run(self, graph: str, inputs: Mapping[str, NDArray[Any]], output: str, shape: tuple[int, ...]) -> Rows:
        """Run a graph of one profile on host arrays; its one output, float32 on the host."""
        rows: Rows = self._run_all(graph, inputs, {output: shape})[output]
        return rows

    def _run_all(
        self, graph: str, inputs: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, NDArray[Any]]:
        """Run a graph of one profile on host arrays; all its outputs, on the host."""
        rows = next(iter(inputs.values()))
        with self.lock:
            context = self.context(graph, 0)
            if graph != self._graphs.vision:
                self.check_rows(graph, len(rows))
            results = {name: np.empty(shape, WHOLE.get(name, np.float32)) for name, shape in shapes.items()}
            places = {name: self.place(name) for name, array in inputs.items()}
            held = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
            for name, array in held.items():
                self.cuda.copy_in(places[name], array)
            places |= {name: self.place(name) for name in results}
            context.bind({name: array.shape for name, array in inputs.items()}, places)
            context.enqueue()
            for name, result in results.items():
                self.cuda.copy_out(result, places[name])
            self.cuda.wait()
        return results

    def _load(self, graph: str) -> Engine:
        record = fingerprint.check_sources(self._bundle, self.engines, graph)
        cure = fingerprint.build_command(self._bundle, self.engines.target)
        with fingerprint.open_engine(self._bundle, self.engines, record) as file:
            return Engine(self._trt, self._runtime, record.file, file, self.cuda, cure)

    def _io_bytes(self) -> dict[str, int]:
        """The largest size of every input and output but the caches, over all graphs, in bytes."""
        m, graphs = self._manifest, self._graphs
        rows = {graph: self.longest(graph) for graph in self._loaded if graph != graphs.vision}
        most = max(rows[graph] for graph in graphs.stages)
        sizes = {
            names.IDS: 8 * rows[graphs.embed],
            names.HIDDEN: 4 * m.model.hidden * max(rows.values()),
            names.HIDDEN_OUT: 4 * m.model.hidden * most,
            names.POSITIONS: 8 * most,
            names.TOTAL_SLOTS: 4,
            names.PIXELS: 4 * 3 * m.image.height * m.image.width,
            names.FEATURES: 4 * m.model.tower.tokens * m.model.hidden,
            names.LOGITS: 4 * m.model.vocab * rows[graphs.head],
            names.ODDS: 8,
        }
        if graphs.vision_merges:
            sizes |= {names.TAU: 4, names.PATCH_INDEX: 8 * m.model.tower.tokens, names.MERGED: 8 * m.model.tower.tokens}
            sizes[names.SIMILARITY] = 4 * m.model.tower.tokens
        if graphs.vision_attention:
            sizes[names.CLS_ATTENTION] = 4 * m.model.tower.tokens
        if graphs.vision_last_attention:
            sizes[names.CLS_ATTENTION_LAST] = 4 * m.model.tower.tokens
        if graphs.score:
            sizes[names.QUERY] = 4 * m.model.heads * m.model.head_dim * most
            sizes |= {name: 4 * m.max_context for name in (names.ATTENTION_SUM, names.ATTENTION_MAX)}
        return sizes

    def _load_rope(self) -> dict[str, Buffer]:
        buffers = {}
        for name, table in zip((names.COS, names.SIN), read_rope(self._bundle), strict=True):
            buffers[name] = Buffer(self.cuda, table.nbytes, "the rotary tables")
            self.cuda.copy_in(buffers[name].address, table)
            self.cuda.wait()
        return buffers

    def _check_memory(self) -> None:
        """Raise DeviceError where the engines and one cache a stage exceed what the device has free."""
        m = self._manifest
        engines = sum(record.bytes for record in self.engines.engines.values())
        slot = m.model.layers * self.kv_slot_bytes * (2 if self.grows else 1)
        caches = m.max_context * slot
        free, total = self.cuda.memory()
        if engines + caches > free:
            fitting = max(0, free - engines) // slot
            cure = (
                f"--max-context {fitting} would fit" if fitting > m.layout.max_tokens else "even the engines do not fit"
            )
            raise DeviceError(
                f"the engines take {size(engines)} and a context of {m.max_context} slots {size(caches)}, "
                f"{size(free)} of {size(total)} of the device is free; {cure}; export with it or with a smaller "
                "--precision, or end other programs on the GPU"
            )


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps the first error as the reason of a failure; the rest is silence."""

        def __init__(self) -> None:
            super().__init__()
            self.first = ""

        def log(self, severity: Any, message: str) -> None:
            if severity <= self.ERROR and not self.first:
                self.first = " ".join(message.split())[:300]

    return Logger()
