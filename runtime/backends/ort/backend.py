"""The onnxruntime backend: one session per graph, K/V updated in place."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.backends.engines import EXPANDED, DeviceState, merit_on_cpu
from vtx.runtime.backends.failures import cache_failure
from vtx.runtime.backends.lanes import CACHES_OF_ONE
from vtx.runtime.backends.loading import is_roomy, load_each
from vtx.runtime.backends.ort.batch import OrtStageBatch
from vtx.runtime.backends.ort.cache import OrtCacheContext, OrtStageCache
from vtx.runtime.backends.ort.graph import OrtGraph, OrtLoader
from vtx.runtime.backends.ort.library import check_release, import_onnxruntime, lacks, load_onnxruntime, session_options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.tensors.kv_scales import read_kv_scales
from vtx.runtime.bundle.tensors.rope import read_rope
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.machine import cores, version
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, TokenStates


class OrtBackend:
    """`Backend` on onnxruntime's CPU provider."""

    device = "cpu"
    providers: Sequence[str] = ("CPUExecutionProvider",)
    memory = "cpu"  # onnxruntime's word for where K and V lie
    loads_side_by_side = True

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self._ort = load_onnxruntime()
        self._manifest = m = bundle.manifest
        check_release(self._ort, m.kv_dtype)
        self.dialect, self.compute = "ort", "f32"
        self.threads = threads or cores()
        self.kv_slot_bytes = m.kv_slot_bytes()
        self._graphs = graphs = m.dialects["ort"]
        roomy = self.loads_side_by_side and is_roomy(bundle, EXPANDED)
        options = self._session_options(self.threads)
        self._loader = loader = OrtLoader(self._ort, bundle, options, self.providers, roomy)
        light = replace(loader, options=self._session_options(1))  # for graphs too small to share among threads
        self._embed = light.load(graphs.embed, contract.embed(m))
        loads = [partial(loader.load, file, contract.stage(m, spec, "ort")) for spec, file in m.stage_files("ort")]
        loads.append(partial(loader.load, graphs.head, contract.head(m)))
        sizes = [*(spec.layers for spec in m.stages), m.model.layers]  # the head may be as large as many layers
        *self._stages, self._head = load_each(loads, self.threads if roomy else 1, sizes)
        self._gates = {k: light.load(file, contract.gate(m)) for k, file in m.gate_files("ort").items()}
        self._score = loader.load(graphs.score, contract.score(m, "ort")) if graphs.score else None
        self._batches: list[OrtStageBatch] = []
        self._vision: OrtGraph | None = None
        self._video: OrtGraph | None = None
        self._text_tower: OrtGraph | None = None
        self._vision_lock = threading.Lock()
        self._context = self._cache_context(bundle)

    @staticmethod
    def merit(bundle: Bundle) -> tuple[int, str] | None:
        return merit_on_cpu(bundle.manifest, openvino=False)

    @staticmethod
    def obstacle(_: Bundle) -> str | None:
        return None

    @staticmethod
    def state(_: Device) -> DeviceState:
        package = next((name for name in ("onnxruntime", "onnxruntime-gpu") if version(name)), None)
        if package is None:
            return DeviceState("cpu", False, False, 'onnxruntime is not installed: pip install "vtx-edge[cpu]"')
        try:
            onnxruntime = import_onnxruntime()
        except Exception as e:
            broken = f"{package} {version(package)} does not load ({e}); install it again"
            return DeviceState("cpu", True, False, broken)
        number = version(package) or onnxruntime.__version__
        return DeviceState("cpu", True, True, "; ".join((f"{package} {number}", *lacks(number))))

    @classmethod
    def of(cls, bundle: Bundle, threads: int | None, _: str) -> OrtBackend:
        return cls(bundle, threads)

    def _session_options(self, threads: int) -> Any:
        options = session_options(self._ort, threads)
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.enable_mem_pattern = False  # the number of tokens changes with every prompt
        options.enable_cpu_mem_arena = False  # each session's own would keep what the longest prompt took
        return options

    def _cache_context(self, bundle: Bundle) -> OrtCacheContext:
        m, tables = self._manifest, read_rope(bundle)
        rope = dict(zip((names.COS, names.SIN), tables, strict=True))
        scales = read_kv_scales(bundle) if m.kv_dtype == "int8" else {}
        return OrtCacheContext(
            self._ort, m.model, m.kv_dtype, tables, self._placed(rope), self._placed(scales), self._score,
            m.token_inputs, self.memory,
        )  # fmt: skip

    def _placed(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """OrtValues where the caches lie."""
        make = self._ort.OrtValue.ortvalue_from_numpy
        return {name: make(array, self.memory, 0) for name, array in arrays.items()}

    def embed(self, ids: NDArray[np.int64]) -> TokenStates:
        outputs = self._embed.run({names.IDS: contract.embeddable(self._manifest, ids)})
        return contract.embedded(self._embed.name, outputs, len(ids))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        with self._vision_lock:
            if self._vision is None:
                self._vision = self._loader.load(self._graphs.vision, contract.vision(self._manifest, self.dialect))
            graph = self._vision
        inputs = {names.PIXELS: pixels, **contract.vision_extras(self._manifest, self.dialect, extras)}
        return ImageTokens.of(graph.run(inputs))

    def video(self, pixels: NDArray[np.float32]) -> ImageTokens:
        if self._graphs.video is None:
            return self.vision(pixels)
        with self._vision_lock:
            if self._video is None:
                self._video = self._loader.load(self._graphs.video, contract.video(self._manifest))
            graph = self._video
        return ImageTokens.of(graph.run({names.PIXELS: pixels}))

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        return contract.of_each(self._head.name, self._head.run({names.HIDDEN: hidden})[names.LOGITS], len(hidden))

    def gate(self, k: int, hidden: HiddenStates) -> NDArray[np.float32]:
        return self._gates[k].run({names.HIDDEN: hidden})[names.ODDS]

    def text_tower(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with self._vision_lock:
            if self._text_tower is None:
                assert self._graphs.text_tower is not None, "the manifest declares no text tower"
                self._text_tower = self._loader.load(self._graphs.text_tower, contract.text_tower(self._manifest))
            graph = self._text_tower
        return contract.of_each(graph.name, graph.run({names.IDS: ids})[names.TEXT_EMBEDDING], 1)

    def stage(self, index: int, capacity: int) -> OrtStageCache:
        try:
            if self._batches:
                return self._batches[index].stage(capacity)
            return OrtStageCache(self._context, self._stages[index], self._manifest.stages[index], capacity)
        except MemoryError as e:
            raise cache_failure(capacity) from e

    def share_caches(self, conversations: int) -> None:
        if not all(graph.is_free(names.POSITIONS, 0) for graph in self._stages):
            raise DeviceError("this bundle's graphs take one conversation at a time; export it again")
        slots, lanes = self._manifest.max_context, CACHES_OF_ONE * conversations
        try:
            self._batches = [
                OrtStageBatch(self._context, graph, spec, lanes, slots)
                for graph, spec in zip(self._stages, self._manifest.stages, strict=True)
            ]
        except MemoryError as e:
            raise cache_failure(lanes * slots) from e

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        return all(isinstance(cache, OrtStageCache) and cache.lane is not None for cache in caches)

    def append_each(
        self, index: int, caches: Sequence[StageCache], tokens: TokenStates, positions: Ids
    ) -> HiddenStates:
        taken = [cache for cache in caches if isinstance(cache, OrtStageCache)]
        return self._batches[index].append_each(taken, tokens, positions)

    def close(self) -> None:
        self._batches = []
        with self._vision_lock:
            loaded = [self._embed, self._head, *self._stages, *self._gates.values(), self._score]
            loaded += [self._vision, self._video, self._text_tower]
        for graph in loaded:
            if graph is not None:
                graph.close()
