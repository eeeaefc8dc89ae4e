"""The OpenVINO backend: one compiled graph a stage, K and V in blocks, one infer request a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import NOTHING, DeviceState
from vtx.runtime.backends.failures import cache_failure, load_failure
from vtx.runtime.backends.host_graphs import HostBackend
from vtx.runtime.backends.memory import is_roomy, load_each
from vtx.runtime.backends.openvino.batch import OpenvinoStageBatch
from vtx.runtime.backends.openvino.cache import FEW, OpenvinoCacheContext, OpenvinoStageCache
from vtx.runtime.backends.openvino.graph import ENGINE, OpenvinoGraph, StageGraph, ports
from vtx.runtime.backends.openvino.growing import OpenvinoGrowingCache, OpenvinoReadingCache
from vtx.runtime.backends.openvino.integers import bring_to_int8, multiply_integers
from vtx.runtime.backends.openvino.narrow import keep_narrow, releasing_pages, weight_block
from vtx.runtime.backends.openvino.paged import page_caches, select_outputs
from vtx.runtime.backends.openvino.states import StateTensors
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.tensors import read_kv_scales, read_rope
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.device import Device
from vtx.runtime.host.machine import cores, version
from vtx.runtime.installing import install
from vtx.runtime.precision import KV_DTYPES, PRECISIONS
from vtx.runtime.vision.tokens import TokenStates

DIALECT = "plain"


def load_openvino() -> Any:
    """The openvino module, or DeviceError with the command that installs it."""
    try:
        import openvino
    except ImportError as e:
        raise DeviceError(f"openvino is not installed; {install('openvino')}") from e
    return openvino


def arithmetic(compute: str, precision: str, threads: int, block: int | None = None) -> dict[str, Any]:
    """The engine's settings for products with weights stored in `precision`, in `compute` arithmetic.

    `block`: the number of weights that share a scale, if it is not a row. Products are of integers only if no more
    values of a hidden state share one.
    """
    row = PRECISIONS[precision]
    group = row.openvino_group
    if block is not None and row.bits is not None:
        group = block if row.bits == 4 else min(block, group)
    return {
        "INFERENCE_PRECISION_HINT": "f32" if compute == "int8" else compute,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # or the graphs of two processes compete for the same cores
    }


def kv_type(compute: str, kv_dtype: str) -> str:
    """The type in which the engine keeps K and V of a bundle with `kv_dtype`, in `compute` arithmetic."""
    row = KV_DTYPES[kv_dtype]
    return "bf16" if compute == "bf16" and not row.scaled else row.openvino


def key_scales(bundle: Bundle) -> dict[int, NDArray[np.float32]]:
    """The scales of each layer's keys [1, kv_heads, 1, head_dim]; none unless K and V are kept in integers."""
    m = bundle.manifest
    if not KV_DTYPES[m.kv_dtype].scaled:
        return {}
    scales = read_kv_scales(bundle)
    return {layer: scales[names.key_scale(layer)] for stage in m.stages for layer in stage.cached}


def most_tokens(precision: str, compute: str) -> int | None:
    return PRECISIONS[precision].openvino_tokens.get(compute)


class OpenvinoBackend(HostBackend):
    """`Backend` on OpenVINO's CPU plugin, from the bundle's `plain` graphs.

    `compute` is the type of the arithmetic: "f32"; "bf16" on processors that have it; or "int8": matrices of int8
    multiply integers, and all else is float32, in the tower bfloat16 if the processor has it. Stages of int4 are held
    in int8 too, for many tokens at once.
    """

    device, dialect, runs_of_each = "openvino", DIALECT, True

    def __init__(self, bundle: Bundle, threads: int | None = None, compute: str = "f32", _: int = 0) -> None:
        openvino = load_openvino()
        if DIALECT not in bundle.manifest.dialects:
            raise DeviceError(
                f"this bundle holds no graphs of the {DIALECT!r} dialect, which OpenVINO reads; "
                f"export it with --dialect ort,{DIALECT}"
            )
        super().__init__(bundle)
        m = self._manifest
        files = self._graphs
        self.compute = compute
        self.threads = threads or cores()
        self._core = openvino.Core()
        able = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if compute == "bf16" and "BF16" not in able:
            raise DeviceError(f"this processor computes {', '.join(able)}, not bf16; leave out --compute bf16")
        kv = kv_type(compute, m.kv_dtype)
        by_slot = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if kv == "u8" else {}
        self._cache_settings = {"KV_CACHE_PRECISION": kv, **by_slot}
        self.tower_settings = {"INFERENCE_PRECISION_HINT": "bf16"} if compute == "int8" and "BF16" in able else {}
        # In bf16 the engine widens integers as it multiplies them, which for one token takes longer than to round it.
        rounds = compute == "bf16" and PRECISIONS[m.head_precision].bits is not None and m.action is None
        head_settings = {"INFERENCE_PRECISION_HINT": "f32"} if rounds else {}
        self._embed = self._graph(files.embed, graphs.embed(m), m.precision)
        self._gates = {k: self._graph(file, graphs.gate(m), m.precision) for k, file in m.gate_files(DIALECT).items()}
        score = self._graph(files.score, graphs.score(m, DIALECT), m.precision) if files.score else None
        rope = read_rope(bundle)
        key_type = np.dtype(names.kv_type(DIALECT, m.kv_dtype))
        self._score = score
        most = most_tokens(m.precision, compute)
        self._context = OpenvinoCacheContext(
            openvino, m.model, kv, rope, score, key_type, most, m.token_inputs, key_scales(bundle)
        )
        self.kv_slot_bytes = self._context.slot_bytes
        roomy = is_roomy(bundle, "openvino", compute)
        self._head, *self.stages = self._load(head_settings, self.threads if roomy else 1)

    def _load(self, head_settings: Mapping[str, Any], threads: int) -> list[Any]:
        """The graphs of the head and of each stage, on so much as `threads` at once."""
        m = self._manifest
        first = {names.HIDDEN: np.zeros((1, m.model.hidden), np.float32)}
        head = partial(
            self._graph,
            self._graphs.head,
            graphs.head(m, DIALECT),
            m.head_precision,
            None if m.action else first,  # an expert's slots are not known yet
            settings=head_settings,
        )
        loads: list[Callable[[], Any]] = [head]
        loads += [partial(self._load_stage, *stage) for stage in m.stage_files(DIALECT)]
        sizes = [m.model.layers, *(spec.layers for spec in m.stages)]  # the head may be as large as many layers
        return load_each(loads, threads, sizes)

    @staticmethod
    def obstacle(_: Bundle, __: int = 0) -> str | None:
        return None

    @staticmethod
    def state(_: Device) -> DeviceState:
        number = version("openvino")
        if not number:
            return DeviceState("openvino", False, False, f"not installed: {install('openvino')}")
        return DeviceState("openvino", True, True, f"openvino {number}")

    @staticmethod
    def product(graph: bytes, compute: str, precision: str, threads: int) -> Callable[[Mapping[str, Any]], Any]:
        core = load_openvino().Core()
        model = core.read_model(graph, b"")
        int8 = None
        if compute == "int8":
            int8 = bring_to_int8(model)
            multiply_integers(model)
        request = core.compile_model(model, "CPU", arithmetic(compute, precision, threads)).create_infer_request()

        def run(inputs: Mapping[str, Any], _: Any = int8) -> Any:  # the weights' memory lasts as long as the function
            request.infer(inputs, share_inputs=True, share_outputs=True)
            return request.get_tensor("y").data

        return run

    def _read(self, name: str, promised: graphs.GraphIO) -> Any:
        with self._bundle.graph_path(name) as path:
            try:
                model = self._core.read_model(os.fspath(path))
            except RuntimeError as e:
                raise load_failure(ENGINE, name, e) from e
        inputs = ports(model.inputs, promised.inputs)
        outputs = ports(model.outputs, promised.outputs)
        contract.check(name, inputs, outputs, promised)
        keep_narrow(model, self.compute)
        return model

    def _compile(self, name: str, model: Any, precision: str, **settings: Any) -> Any:
        computing = arithmetic(self.compute, precision, self.threads, weight_block(model))
        if self.compute == "int8":
            multiply_integers(model)
        try:
            return self._core.compile_model(model, "CPU", {**self._cache_settings, **computing, **settings})
        except (RuntimeError, MemoryError) as e:
            raise load_failure(ENGINE, name, e) from e

    def _graph(
        self,
        name: str,
        promised: graphs.GraphIO,
        precision: str,
        first: Mapping[str, NDArray[Any]] | None = None,
        image: ImageSettings | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> OpenvinoGraph:
        """Load a graph. `first`: inputs of a run at once, since the engine packs weights when a free-sized graph runs.

        `precision`: of its weights. `image`: a tower is compiled for the size of all images, if they have one: the
        engine then chooses kernels for it. `settings`: further ones of the engine.
        """
        model = self._read(name, promised)
        if image is not None and not image.own_size:
            model.reshape({names.PIXELS: [-1 if self._manifest.action else 1, 3, *image.size]})
        with releasing_pages(model):
            compiled = self._compile(name, model, precision, **(settings or {}))
        graph = OpenvinoGraph(name, compiled, promised.outputs, model)
        if first is not None:
            graph.run(first)
        return graph

    def _load_stage(self, spec: StageSpec, file: str) -> StageGraph | OpenvinoGraph:
        m = self._manifest
        if m.model.two_way == "prompt" or not spec.keeps:
            return self._graph(file, graphs.stage_of(m, spec, DIALECT), m.precision)

        def read() -> tuple[Any, StateTensors]:
            model = self._read(file, graphs.stage_of(m, spec, DIALECT))
            sliding = m.model.sliding.layers if m.model.sliding else ()
            page_caches(
                model,
                spec.cached,
                m.model.heads,
                sliding,
                both_ways=m.model.two_way is not None,
                key_scales=self._context.key_scales,
            )
            select_outputs(model, whole=spec.last not in spec.cached)
            return model, StateTensors.of(model)

        model, states = read()
        many = read()[0] if self.compute == "int8" and PRECISIONS[m.precision].bits == 4 else None
        matrices = [] if many is None else bring_to_int8(many)
        with ExitStack() as pages:
            pages.enter_context(releasing_pages(model))
            for_many = None
            if many is not None:
                pages.enter_context(releasing_pages(many))
                for_many = self._compile(file, many, "int8")
            stage = StageGraph(file, self._compile(file, model, m.precision), for_many, matrices, states)
            cache = OpenvinoStageCache(self._context, stage, spec, FEW + 2)
            inputs = {declared.name: np.zeros((FEW + 1, declared.width), np.float32) for declared in m.token_inputs}
            tokens = TokenStates(np.zeros((FEW + 1, m.model.hidden), np.float32), inputs)
            cache.append(tokens.part(0, 1), np.zeros(1, np.int64))
            if for_many is not None:
                cache.append(tokens, np.arange(FEW + 1))
            if m.model.two_way is not None:
                cache.check_both_ways(tokens.part(0, 2))
        return stage

    def _load_tower(self, name: str, promised: graphs.GraphIO, image: ImageSettings | None) -> OpenvinoGraph:
        settings = None if image is None else self.tower_settings
        return self._graph(name, promised, self._manifest.vision_precision, image=image, settings=settings)

    def _new_batches(self, lanes: int, capacity: int) -> list[OpenvinoStageBatch]:
        stages = list(zip(self.stages, self._manifest.stages, strict=True))
        if any(isinstance(graph, OpenvinoGraph) for graph, _ in stages):
            return []  # their caches are no blocks: one by one
        return [OpenvinoStageBatch(self._context, graph, spec, lanes, capacity) for graph, spec in stages]

    def stage(
        self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING
    ) -> OpenvinoStageCache | OpenvinoGrowingCache | OpenvinoReadingCache:
        batch = self._batches[index] if self._batches else None
        pool = batch.pool if isinstance(batch, OpenvinoStageBatch) else None
        graph = self.stages[index]
        spec = self._manifest.stages[index]
        try:
            if isinstance(graph, OpenvinoGraph):
                if sources:
                    return OpenvinoReadingCache(self._context, graph, spec, sources)
                return OpenvinoGrowingCache(self._context, graph, spec, capacity)
            return OpenvinoStageCache(self._context, graph, spec, capacity, pool)
        except MemoryError as e:
            raise cache_failure(capacity) from e

    def close(self) -> None:
        super().close()
        for stage in self.stages:
            stage.close()
