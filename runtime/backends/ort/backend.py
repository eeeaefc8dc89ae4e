"""The onnxruntime backend: one session per graph, K/V updated in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.backends.backend import NOTHING, DeviceState
from vtx.runtime.backends.failures import cache_failure
from vtx.runtime.backends.host_graphs import HostBackend
from vtx.runtime.backends.memory import is_roomy, load_each
from vtx.runtime.backends.ort.cache import OrtCacheContext, OrtReadingCache, OrtStage, OrtStageCache
from vtx.runtime.backends.ort.graph import OrtGraph, OrtLoader
from vtx.runtime.backends.ort.library import check_release, import_onnxruntime, lacks, load_onnxruntime, session_options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import read_kv_scales, read_rope
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import cores, version
from vtx.runtime.installing import install
from vtx.runtime.precision import KV_DTYPES

if TYPE_CHECKING:
    from vtx.runtime.backends.ort.batch import OrtReadingBatch, OrtStageBatch
    from vtx.runtime.host.device import Device


class OrtBackend(HostBackend):
    device, dialect, compute = "cpu", "ort", "f32"
    providers: Mapping[str, Mapping[str, str]] = {"CPUExecutionProvider": {}}  # with their options, the first first
    memory: tuple[str, int] = ("cpu", 0)  # that holds K and V: onnxruntime's name, and the number of the device
    loads_in_parallel = True
    _batches: Sequence[OrtStageBatch | OrtReadingBatch]

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f32", _: int = 0) -> None:
        super().__init__(bundle)
        self._ort = load_onnxruntime()
        m = self._manifest
        files = self._graphs
        self.kv_slot_bytes, kv_dtype = m.kv_slot_bytes(self.dialect), names.kv_type(self.dialect, m.kv_dtype)
        check_release(self._ort, kv_dtype)
        self.threads = threads or cores()
        roomy = self.loads_in_parallel and is_roomy(bundle, "cpu")
        options = self._session_options(self.threads)
        self._loader = loader = OrtLoader(self._ort, bundle, options, self.providers, roomy)
        light = replace(loader, options=self._session_options(1))  # for graphs too small to share among threads
        self._embed = light.load(files.embed, graphs.embed(m))
        loads = [
            partial(loader.load, file, graphs.stage_of(m, spec, self.dialect))
            for spec, file in m.stage_files(self.dialect)
        ]
        loads.append(partial(loader.load, files.vision, graphs.vision(m, self.dialect)))
        loads.append(partial(loader.load, files.head, graphs.head(m, self.dialect)))
        # The head may be as large as many layers.
        sizes = [*(spec.layers for spec in m.stages), m.model.tower.layers, m.model.layers]
        with returning_memory(at_once=False) if roomy else nullcontext():  # once, after the last of them
            *stages, self._towers[files.vision], self._head = load_each(loads, self.threads if roomy else 1, sizes)
        self._gates = {k: light.load(file, graphs.gate(m)) for k, file in m.gate_files(self.dialect).items()}
        self._score = score = loader.load(files.score, graphs.score(m, self.dialect)) if files.score else None
        tables = read_rope(bundle)
        rope = self._in_memory(tables)
        scales = self._in_memory(read_kv_scales(bundle) if KV_DTYPES[kv_dtype].scaled else {})
        value = self._ort.OrtValue.ortvalue_from_numpy
        context = OrtCacheContext(
            value,
            m.model,
            kv_dtype,
            (tables[names.COS], tables[names.SIN]),
            rope,
            scales,
            score,
            m.token_inputs,
            self.memory,
        )
        self._stages = [self._new_stage(context, graph, spec) for graph, spec in zip(stages, m.stages, strict=True)]

    @staticmethod
    def obstacle(_: Bundle, __: int = 0) -> str | None:
        return None

    @staticmethod
    def state(_: Device) -> DeviceState:
        package = next((name for name in ("onnxruntime", "onnxruntime-gpu") if version(name)), None)
        if package is None:
            return DeviceState("cpu", False, False, f"onnxruntime is not installed: {install('cpu')}")
        try:
            onnxruntime = import_onnxruntime()
        except Exception as e:
            broken = f"{package} {version(package)} does not load ({e}); install it again"
            return DeviceState("cpu", True, False, broken)
        number = version(package) or onnxruntime.__version__
        return DeviceState("cpu", True, True, "; ".join((f"{package} {number}", *lacks(number))))

    @staticmethod
    def product(graph: bytes, compute: str, precision: str, threads: int) -> Callable[[Mapping[str, Any]], Any]:
        ort = load_onnxruntime()
        session = ort.InferenceSession(graph, session_options(ort, threads), providers=["CPUExecutionProvider"])
        return lambda inputs: session.run(None, inputs)[0]

    def _session_options(self, threads: int) -> Any:
        options = session_options(self._ort, threads)
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.enable_mem_pattern = False  # the number of tokens changes with every prompt
        options.enable_cpu_mem_arena = False  # each session's own would keep what the longest prompt took
        return options

    def _in_memory(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        make = self._ort.OrtValue.ortvalue_from_numpy
        return {name: make(array, *self.memory) for name, array in arrays.items()}

    def _new_stage(self, context: OrtCacheContext, graph: OrtGraph, spec: StageSpec) -> OrtStage:
        return OrtStage(context, graph, spec)

    def _load_tower(self, name: str, promised: graphs.GraphIO, image: ImageSettings | None) -> OrtGraph:
        return self._loader.load(name, promised)

    def _new_batches(self, lanes: int, capacity: int) -> list[OrtStageBatch | OrtReadingBatch]:
        from vtx.runtime.backends.ort.batch import OrtReadingBatch, OrtStageBatch

        self._check_batches()
        return [
            OrtStageBatch(stage, lanes, capacity) if stage.spec.keeps else OrtReadingBatch() for stage in self._stages
        ]

    def _check_batches(self) -> None:
        if not all(stage.graph.is_free(names.POSITIONS, 0) for stage in self._stages):
            raise DeviceError("this bundle's graphs take one conversation at a time; export it again")

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> OrtStageCache:
        try:
            if sources:
                return OrtReadingCache(self._stages[index], sources)
            if self._batches:
                return self._batches[index].stage(capacity)
            return OrtStageCache(self._stages[index], capacity)
        except MemoryError as e:
            raise cache_failure(capacity) from e

    def close(self) -> None:
        super().close()
        for stage in self._stages:
            stage.graph.close()
