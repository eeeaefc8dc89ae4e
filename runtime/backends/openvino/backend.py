"""The OpenVINO backend: one compiled graph a stage, K and V in blocks that one infer request a cache fills."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.backends.engines import ENGINES, DeviceState, merit_on_cpu
from vtx.runtime.backends.failures import cache_failure, load_failure
from vtx.runtime.backends.lanes import CACHES_OF_ONE
from vtx.runtime.backends.loading import is_roomy, load_each
from vtx.runtime.backends.openvino.batch import OpenvinoStageBatch
from vtx.runtime.backends.openvino.cache import FEW, OpenvinoCacheContext, OpenvinoStageCache
from vtx.runtime.backends.openvino.graph import ENGINE, OpenvinoGraph, Ports, StageGraph
from vtx.runtime.backends.openvino.integers import bring_to_int8, multiply_integers
from vtx.runtime.backends.openvino.narrow import LEAST_BLOCK, int4_block, keep_narrow, letting_go
from vtx.runtime.backends.openvino.paged import page_caches, select_outputs
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors.rope import read_rope
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.machine import cores, version
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, TokenStates

DIALECT = "plain"
KV_TYPES = {"float32": "f32", "float16": "f16", "int8": "u8"}  # numpy's and OpenVINO's
# Values of a hidden state that share a scale in products of integers; with int4 no fewer than weights that share one.
QUANTISED_ROWS = {"int8": 128, "int4": LEAST_BLOCK}
# The most hidden states that a stage takes in one run, by weights and arithmetic: more were measured to be slower
# (docs/measurements/openvino.md).
ROWS_OF_A_RUN = {("int4", "f32"): 256, ("int4", "bf16"): 256, ("int8", "bf16"): 256}


def load_openvino() -> Any:
    """The openvino module, or DeviceError with the command that installs it."""
    try:
        import openvino
    except ImportError as e:
        raise DeviceError('openvino is not installed; pip install "vtx-edge[openvino]"') from e
    return openvino


def arithmetic(compute: str, precision: str, threads: int, int4_block: int = LEAST_BLOCK) -> dict[str, Any]:
    """The engine's settings for products with weights stored in `precision`, in `compute` arithmetic.

    `int4_block`: of the weights of int4, how many share a scale.
    """
    rows = QUANTISED_ROWS.get(precision, 0)
    return {
        "INFERENCE_PRECISION_HINT": "f32" if compute == "int8" else compute,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": max(rows, int4_block) if precision == "int4" else rows,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # or the graphs of two processes fight over the same cores
    }


class OpenvinoBackend:
    """`Backend` on OpenVINO's CPU plugin, from the bundle's `plain` graphs.

    `compute` is the type of the arithmetic: "f32"; "bf16" on processors that have it; or "int8": matrices of int8
    multiply integers, and all else is float32, in the tower bfloat16 where the processor has it. Stages of int4 are
    held in int8 too, for many tokens at once.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f32") -> None:
        openvino = load_openvino()
        self._bundle, self._manifest = bundle, bundle.manifest
        if DIALECT not in self._manifest.dialects:
            raise DeviceError(
                f"this bundle holds no graphs of the {DIALECT!r} dialect, which OpenVINO reads; "
                f"export it with --dialect ort,{DIALECT}"
            )
        self.device, self.dialect, self.compute = "openvino", DIALECT, compute
        self.threads = threads or cores()
        self._core = openvino.Core()
        kept, model = KV_TYPES[self._manifest.kv_dtype], self._manifest.model
        self._kv = "bf16" if compute == "bf16" and kept != "u8" else kept
        able = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._kept = self._choose_cache_settings(able)
        self.tower_settings = {"INFERENCE_PRECISION_HINT": "bf16"} if compute == "int8" and "BF16" in able else {}
        self._graphs = graphs = self._manifest.dialects[DIALECT]
        self._row = np.zeros((1, model.hidden), np.float32)
        self._roomy = is_roomy(bundle, ENGINES["openvino"].compute[compute])
        self._embed = self._graph(graphs.embed, contract.embed(self._manifest))
        gates = self._manifest.gate_files(DIALECT)
        self._gates = {k: self._graph(file, contract.gate(self._manifest)) for k, file in gates.items()}
        score = self._graph(graphs.score, contract.score(self._manifest, DIALECT)) if graphs.score else None
        rope = dict(zip((names.COS, names.SIN), read_rope(bundle), strict=True))
        key_type = names.kv_type(DIALECT, self._manifest.kv_dtype)
        most_rows = ROWS_OF_A_RUN.get((self._manifest.precision, compute))
        self._context = OpenvinoCacheContext(
            openvino, model, self._kv, rope, score, np.dtype(key_type), most_rows, self._manifest.token_inputs
        )
        self.kv_slot_bytes = self._context.slot_bytes
        self._head, self.stages = self._compile_decoder()
        self._batches: list[OpenvinoStageBatch] = []
        self._vision: OpenvinoGraph | None = None
        self._video: OpenvinoGraph | None = None
        self._text_tower: OpenvinoGraph | None = None
        self._vision_lock = threading.Lock()

    @staticmethod
    def merit(bundle: Bundle) -> tuple[int, str]:
        return merit_on_cpu(bundle.manifest, openvino=True)

    @staticmethod
    def obstacle(_: Bundle) -> str | None:
        return None

    @staticmethod
    def state(_: Device) -> DeviceState:
        number = version("openvino")
        if not number:
            return DeviceState("openvino", False, False, 'not installed: pip install "vtx-edge[openvino]"')
        return DeviceState("openvino", True, True, f"openvino {number}")

    @classmethod
    def of(cls, bundle: Bundle, threads: int | None, compute: str) -> OpenvinoBackend:
        return cls(bundle, threads, compute)

    def _choose_cache_settings(self, able: Sequence[str]) -> dict[str, Any]:
        if self.compute == "bf16" and "BF16" not in able:
            raise DeviceError(f"this processor computes {', '.join(able)}, not bf16; leave out --compute bf16")
        by_row = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if self._kv == "u8" else {}
        return {"KV_CACHE_PRECISION": self._kv, **by_row}

    def _read(self, name: str, promised: contract.Contract) -> Any:
        with self._bundle.graph_path(name) as path:
            try:
                model = self._core.read_model(os.fspath(path))
            except RuntimeError as e:
                raise load_failure(ENGINE, name, e) from e
        contract.check(name, Ports(model, promised), promised)
        keep_narrow(model, self.compute)
        return model

    def _graph(
        self, name: str, promised: contract.Contract, precision: str | None = None,
        first: Mapping[str, NDArray[Any]] | None = None,
    ) -> OpenvinoGraph:  # fmt: skip
        """`precision`: of its weights, where it is not the decoder's.

        `first`: inputs to run once, since the engine packs the weights of a graph of any size when it first runs.
        """
        model = self._read(name, promised)
        with letting_go(model, at_once=not self._roomy):
            graph = OpenvinoGraph(name, self._engine(name, model, precision), promised[1])
            if first is not None:
                graph.run(first)
        return graph

    def _compile_decoder(self) -> tuple[OpenvinoGraph, list[StageGraph]]:
        m, precision = self._manifest, self._manifest.head_precision
        first = {names.HIDDEN: self._row}
        loads: list[Callable[[], Any]] = [partial(self._graph, self._graphs.head, contract.head(m), precision, first)]
        loads += [partial(self._compile_stage, *stage) for stage in m.stage_files(DIALECT)]
        sizes = [m.model.layers, *(spec.layers for spec in m.stages)]  # the head may be as large as many layers
        head, *stages = load_each(loads, self.threads if self._roomy else 1, sizes)
        return head, stages

    def _compile_stage(self, spec: StageSpec, file: str) -> StageGraph:
        model = self._read_stage(spec, file)
        many, held = self._read_for_many(spec, file)
        with ExitStack() as pages:
            for read in (model, many):
                if read is not None:
                    pages.enter_context(letting_go(read, at_once=read is many or not self._roomy))
            for_many = None if many is None else self._engine(file, many, "int8")
            stage = StageGraph(file, self._engine(file, model), for_many, held)
            cache = OpenvinoStageCache(self._context, stage, spec, FEW + 2)
            inputs = {each.name: np.zeros((FEW + 1, each.width), np.float32) for each in self._manifest.token_inputs}
            tokens = TokenStates(self._row.repeat(FEW + 1, 0), inputs)
            cache.append(tokens.part(0, 1), np.zeros(1, np.int64))
            if stage.for_many is not None:
                cache.append(tokens, np.arange(FEW + 1))
        return stage

    def _read_stage(self, spec: StageSpec, file: str) -> Any:
        model = self._read(file, contract.stage(self._manifest, spec, DIALECT))
        page_caches(model, spec.cached, self._manifest.model.heads)
        select_outputs(model)
        return model

    def _read_for_many(self, spec: StageSpec, file: str) -> tuple[Any, Sequence[NDArray[np.int8]]]:
        """A stage of int4 in int8, where products are of integers, and its new weights; else None."""
        if self.compute != "int8" or self._manifest.precision != "int4":
            return None, ()
        model = self._read_stage(spec, file)
        return model, bring_to_int8(model)

    def _engine(self, name: str, model: Any, precision: str | None = None, **further: Any) -> Any:
        computing = arithmetic(self.compute, precision or self._manifest.precision, self.threads, int4_block(model))
        if self.compute == "int8":
            multiply_integers(model)
        try:
            return self._core.compile_model(model, "CPU", {**self._kept, **computing, **further})
        except (RuntimeError, MemoryError) as e:
            raise load_failure(ENGINE, name, e) from e

    def embed(self, ids: Ids) -> TokenStates:
        outputs = self._embed.run({names.IDS: contract.embeddable(self._manifest, ids)})
        return contract.embedded(self._embed.name, outputs, len(ids))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        with self._vision_lock:
            if self._vision is None:
                promised = contract.vision(self._manifest, DIALECT)
                self._vision = self._compile_tower(self._graphs.vision, promised, self._manifest.image)
            graph = self._vision
        inputs = {
            names.PIXELS: np.ascontiguousarray(pixels),
            **contract.vision_extras(self._manifest, DIALECT, extras),
        }
        return ImageTokens.of(graph.run(inputs))

    def video(self, pixels: NDArray[np.float32]) -> ImageTokens:
        name, declared = self._graphs.video, self._manifest.video
        if name is None or declared is None:
            return self.vision(pixels)
        with self._vision_lock:
            if self._video is None:
                self._video = self._compile_tower(name, contract.video(self._manifest), declared.image)
            graph = self._video
        return ImageTokens.of(graph.run({names.PIXELS: np.ascontiguousarray(pixels)}))

    def _compile_tower(self, name: str, promised: contract.Contract, image: ImageSettings) -> OpenvinoGraph:
        """Compiled for images of one size, where they have one: the engine then chooses kernels for it."""
        model = self._read(name, promised)
        if not image.own_size:
            model.reshape({names.PIXELS: [1, 3, image.height, image.width]})
        with letting_go(model, at_once=not self._roomy):
            engine = self._engine(name, model, self._manifest.vision_precision, **self.tower_settings)
            return OpenvinoGraph(name, engine, promised[1])

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        found = self._head.run({names.HIDDEN: np.ascontiguousarray(hidden)})[names.LOGITS]
        return contract.of_each(self._head.name, found, len(hidden))

    def gate(self, k: int, hidden: HiddenStates) -> NDArray[np.float32]:
        return self._gates[k].run({names.HIDDEN: np.ascontiguousarray(hidden)})[names.ODDS]

    def text_tower(self, ids: Ids) -> NDArray[np.float32]:
        with self._vision_lock:
            if self._text_tower is None:
                assert self._graphs.text_tower is not None, "the manifest declares no text tower"
                promised, precision = contract.text_tower(self._manifest), self._manifest.vision_precision
                self._text_tower = self._graph(self._graphs.text_tower, promised, precision)
            graph = self._text_tower
        found = graph.run({names.IDS: np.ascontiguousarray(ids)})[names.TEXT_EMBEDDING]
        return contract.of_each(graph.name, found, 1)

    def stage(self, index: int, capacity: int) -> OpenvinoStageCache:
        pool = self._batches[index].pool if self._batches else None
        try:
            return OpenvinoStageCache(self._context, self.stages[index], self._manifest.stages[index], capacity, pool)
        except MemoryError as e:
            raise cache_failure(capacity) from e

    def share_caches(self, conversations: int) -> None:
        slots = self._manifest.max_context
        try:
            self._batches = [
                OpenvinoStageBatch(self._context, graph, spec, CACHES_OF_ONE * conversations, slots)
                for graph, spec in zip(self.stages, self._manifest.stages, strict=True)
            ]
        except MemoryError as e:
            raise cache_failure(CACHES_OF_ONE * conversations * slots) from e

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        return all(isinstance(cache, OpenvinoStageCache) and cache.lane is not None for cache in caches)

    def append_each(
        self, index: int, caches: Sequence[StageCache], tokens: TokenStates, positions: Ids
    ) -> HiddenStates:
        taken = [cache for cache in caches if isinstance(cache, OpenvinoStageCache)]
        return self._batches[index].append_each(taken, tokens, positions)

    def close(self) -> None:
        self._batches = []
        with self._vision_lock:
            loaded = [
                self._embed,
                self._head,
                *self._gates.values(),
                self._context.score,
                self._vision,
                self._video,
                self._text_tower,
            ]
        for graph in (*loaded, *self.stages):
            if graph is not None:
                graph.close()
