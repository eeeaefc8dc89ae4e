"""The TensorRT backend: engines of the bundle's graphs, K and V in device memory.

TensorRT and TensorRT-RTX are one API under two names. All work of a backend goes to one stream, one call after the
other; device memory for inputs and outputs is owned once, by tensor name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.backend import NOTHING, DeviceState, StageCache, Step
from vtx.runtime.backends.cuda import Buffer, Cuda, MemoryPool
from vtx.runtime.backends.device_states import StatesPool
from vtx.runtime.backends.driver import load_driver
from vtx.runtime.backends.memory import QUESTION_ROWS
from vtx.runtime.backends.slots import HeldStates
from vtx.runtime.backends.tensorrt.batch import TensorrtReadingBatch, TensorrtStageBatch
from vtx.runtime.backends.tensorrt.cache import TensorrtStageCache
from vtx.runtime.backends.tensorrt.loaded import LoadedEngines, TensorrtCacheContext, vision_shapes
from vtx.runtime.backends.tensorrt.reading import TensorrtReadingCache
from vtx.runtime.backends.tensorrt.step import TokenSteps
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import EngineSet
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.tensors import read_rope
from vtx.runtime.errors import BundleError, DeviceError, VtxError
from vtx.runtime.host.device import Device
from vtx.runtime.host.gpu import Gpu, find_gpu
from vtx.runtime.host.machine import version
from vtx.runtime.installing import install, pip_install
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, HiddenStates, Ids, ImageTokens, TokenStates

COMPUTE = {"float16": "f16", "float32": "f32"}  # engines compute in the type of K and V


def load_flavour(flavour: str) -> Any:
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError) as e:
        flavours = fingerprint.FLAVOURS[flavour]
        raise DeviceError(f"{flavours.title} is not installed; {install(flavours.extra)}") from e


def check_driver(flavour: str, gpu: Gpu | None) -> None:
    """Raise DeviceError if the GPU's driver is older than the CUDA of an installed TensorRT."""
    title = fingerprint.FLAVOURS[flavour].title
    package = flavour.replace("_", "-")
    driver = next((release for release in DRIVERS if version(f"{package}-cu{release}")), None)
    if gpu is not None and driver is not None and gpu.cuda[0] < driver:
        wheels = " and ".join(f"{package}-cu{release}" for release in DRIVERS)  # which write the same files
        other = (
            ""
            if flavour == fingerprint.RTX
            else f"; or remove {wheels}, then {pip_install()} {package}-cu{gpu.cuda[0]}"
        )
        raise DeviceError(
            f"this {title} is for CUDA {driver}, NVIDIA's driver here supports CUDA {gpu.cuda[0]}.{gpu.cuda[1]}; "
            f"install driver {DRIVERS[driver]} or newer{other}"
        )


DRIVERS = {13: 580, 12: 525}  # the first driver of each release of CUDA
NOT_BUILT = "TensorRT does not support native image resolution for this model"
ACTIONS = "vtx builds TensorRT engines for models that output actions, but does not run them yet"
NO_FRAMES = "TensorRT has no engine for the frames of videos of this model"


def has_engines(m: Manifest) -> bool:
    """True if vtx-build makes engines of the vision graph: of those of images of any size, for some layouts alone."""
    return not m.image.own_size or m.layout.name in ("native", "budget", "native_tiles", "slices", "longest")


def find_engines(bundle: Bundle, gpu: Gpu | None) -> tuple[EngineSet, Any]:
    """The bundle's engines for this machine and the module that runs them.

    Raises BundleError: the bundle holds no engines; DeviceError: none of them fits; the message says what was built,
    what this machine has, and the fix.
    """
    if not has_engines(bundle.manifest):
        raise DeviceError(f"{NOT_BUILT}; use --device cpu or openvino")
    engine_sets = [fingerprint.read_engines(bundle, target) for target in fingerprint.targets(bundle)]
    if not engine_sets:
        raise BundleError(f"{bundle.folder} holds no engines; {fingerprint.build_command(bundle, 'this')}")
    likely = sorted(engine_sets, key=lambda engines: gpu is None or engines.capability != gpu.capability)
    refusals: list[DeviceError] = []
    for engines in likely:
        try:
            module = load_flavour(engines.flavour)
            fingerprint.check_machine(bundle, engines, engines.flavour, module.__version__, gpu)
            check_driver(engines.flavour, gpu)
        except DeviceError as e:
            refusals.append(e)
        else:
            return engines, module
    raise refusals[0]


class TensorrtBackend:
    """`Backend` on one NVIDIA GPU."""

    runs_of_each = False

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        compute: str | None = None,
        number: int = 0,
        *,
        gpu: Gpu | None = None,
    ) -> None:
        self.device = "tensorrt"
        self._bundle = bundle
        self._manifest = bundle.manifest
        self.engine_set, trt = find_engines(bundle, gpu or find_gpu(number))
        self.dialect = self.engine_set.dialect
        self.kv_slot_bytes = self._manifest.kv_slot_bytes(self.dialect)
        kv_type = names.kv_type(self.dialect, self._manifest.kv_dtype)
        self.compute = COMPUTE[kv_type]
        self.cuda = Cuda(load_driver(), number)
        self._graphs = self._manifest.dialects[self.dialect]
        with self.cuda:
            self._check_memory()
            self.engines = LoadedEngines(bundle, self.engine_set, trt, self.cuda)
            rope = {}
            tables = read_rope(bundle)
            for name, table in tables.items():
                rope[name] = Buffer(self.cuda, table.nbytes, "the rotary tables")
                self.cuda.copy_in(rope[name].address, table)
                self.cuda.wait()
            turned = {}  # of tokens whose positions have several parts
            if self._manifest.model.rope.sections:
                turned = {n: Buffer(self.cuda, t.nbytes, "the tokens' rotary tables") for n, t in tables.items()}
        self._caches = TensorrtCacheContext(
            engines=self.engines,
            cuda=self.cuda,
            model=self._manifest.model,
            kv_dtype=np.dtype(kv_type),
            max_context=self._manifest.max_context,
            rope=rope,
            score=self._graphs.score,
            states=StatesPool(self.cuda, self._manifest.model.hidden, MemoryPool(self.cuda)),
            token_inputs=self._manifest.token_inputs,
            tables=tables,
            turned=turned,
        )
        self._steps: TokenSteps | None = None  # once a token was decoded
        self._batches: Sequence[TensorrtStageBatch | TensorrtReadingBatch] = []

    @staticmethod
    def obstacle(bundle: Bundle, number: int = 0) -> str | None:
        if bundle.manifest.action is not None:
            return f"{ACTIONS}; run the bundle with --device cpu or openvino"
        try:
            find_engines(bundle, find_gpu(number))
        except VtxError as e:
            return str(e)
        return None

    @staticmethod
    def state(machine: Device) -> DeviceState:
        flavours = [
            f"{flavour_of_module.title} {version(module.replace('_', '-')) or '(version unknown)'}"
            for module, flavour_of_module in fingerprint.FLAVOURS.items()
            if find_spec(module)
        ]
        if not flavours:
            package = f"JetPack's own, and {install('jetson')}" if machine.jetson else install("rtx")
            return DeviceState("tensorrt", False, False, f"TensorRT is not installed: {package}")
        return DeviceState.on_gpu("tensorrt", ", ".join(flavours), machine)

    def embed(self, ids: Ids) -> TokenStates:
        graph = self._graphs.embed
        m = self._manifest
        shapes = {names.HIDDEN: (len(ids), m.model.hidden)}
        shapes |= {
            names.token_input(declared.name): (len(ids), declared.width)
            for declared in m.token_inputs
            if declared.of_text
        }
        self.engines.check_tokens(graph, len(ids))
        with self.cuda:
            outputs = self.engines.run(graph, {names.IDS: contract.embeddable(m, ids)}, shapes)
        return contract.embedded(graph, outputs, len(ids))

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        inputs = {names.PIXELS: pixels, **contract.vision_extras(self._manifest, self.dialect, extras)}
        m = self._manifest
        longest = self.engines.longest_side
        unit = m.model.tower.patch * m.model.tower.square
        height, width = pixels.shape[2:]
        if max(height, width) > longest:
            smaller = "a smaller --max-pixels, " if m.layout.name == "native" else "an image less long, "
            raise DeviceError(
                f"the image is {width} x {height} pixels as the tower sees it, and this engine takes {longest} a side; "
                f"use {smaller}--device cpu or openvino"
            )
        tokens = height * width // unit**2 if m.image.own_size else m.model.tower.tokens
        with self.cuda:
            outputs = self.engines.run(self._graphs.vision, inputs, vision_shapes(m, self.dialect, tokens))
        return ImageTokens.of(outputs, self._manifest.model.tower)

    def video(self, pixels: NDArray[np.float32]) -> ImageTokens:
        if self._manifest.video is not None and self._manifest.video.own_graph:
            raise DeviceError(f"{NO_FRAMES}; ask about videos with --device cpu, cuda or openvino")
        return self.vision(pixels)

    def head(self, hidden: HiddenStates) -> NDArray[np.float32]:
        vocab = self._manifest.model.vocab
        most = self.engines.longest(self._graphs.head)
        parts = [hidden[start : start + most] for start in range(0, len(hidden), most)]
        run = self._run
        return np.concatenate([run(self._graphs.head, {names.HIDDEN: p}, names.LOGITS, (len(p), vocab)) for p in parts])

    def gate(self, k: int, hidden: HiddenStates) -> NDArray[np.float32]:
        graph = self._manifest.gate_files(self.dialect)[k]
        return self._run(graph, {names.HIDDEN: hidden}, names.ODDS, (2,))

    def text_tower(self, ids: Ids) -> NDArray[np.float32]:
        graph = self._graphs.text_tower
        spec = self._manifest.text_tower
        assert graph is not None, "the manifest declares no text tower"
        assert spec is not None
        return self._run(graph, {names.IDS: ids}, names.TEXT_EMBEDDING, (1, spec.width))

    def project(self, states: HiddenStates) -> HiddenStates:
        graph = self._graphs.projector
        assert graph is not None, "the bundle has no graph of the projector"
        return self._run(graph, {names.TOWER_STATES: states}, names.HIDDEN, (len(states), self._manifest.model.hidden))

    def stage(
        self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING
    ) -> TensorrtStageCache | TensorrtReadingCache:
        spec, graph = self._manifest.stage_files(self.dialect)[index]
        with self.cuda:
            if not spec.keeps:
                return TensorrtReadingCache(self._caches, spec, graph, sources)
            return TensorrtStageCache(self._caches, spec, graph, capacity)

    def step(
        self,
        caches: Sequence[TensorrtStageCache | TensorrtReadingCache],
        token: int,
        positions: Sequence[int],
        *,
        logits: bool,
    ) -> Step:
        contract.embeddable(self._manifest, np.array([token]))
        with self.cuda:
            for cache in caches:
                cache.make_room(cache.length + 1)
            if self._steps is None:
                graphs = self._graphs
                self._steps = TokenSteps(self._caches, graphs.embed, graphs.head, self._manifest.model.vocab)
            done = self._steps.run(caches, token, positions, logits=logits)
        for cache in caches:
            cache.fill(cache.length + 1)
        return done

    def share_caches(self, conversations: int) -> None:
        stages = self._manifest.stage_files(self.dialect)
        lanes = min(self.engines.lanes(graph) for _, graph in stages)
        if lanes < 2:
            raise DeviceError(
                f"these engines take one conversation at a time; {fingerprint.build_command(self._bundle, 'this')} "
                "--batch 8"
            )
        with self.cuda:
            self.engines.share_states(lanes)
        of_layers = dict[int, TensorrtStageBatch]()
        batches = list[TensorrtStageBatch | TensorrtReadingBatch]()
        for spec, graph in stages:
            if spec.keeps:
                batch = TensorrtStageBatch(self._caches, spec, graph, lanes)
                of_layers |= dict.fromkeys(spec.cached, batch)
                batches.append(batch)
            else:
                sources = {layer: of_layers[layer] for layer in self._manifest.model.sources(spec.first, spec.last)}
                batches.append(TensorrtReadingBatch(self._caches, spec, graph, sources))
        self._batches = batches

    def reaches(self, caches: Sequence[StageCache]) -> bool:
        return bool(self._batches)

    def append_each(
        self, index: int, caches: Sequence[StageCache], tokens: TokenStates, positions: Ids, counts: Sequence[int]
    ) -> HiddenStates:
        assert max(counts) == 1, "a run is of one token of each"
        with self.cuda:
            return self._batches[index].append_parts(caches, tokens, positions)

    def close(self) -> None:
        with suppress(DeviceError), self.cuda:  # the device may be gone
            self.cuda.wait()  # an error may have left work behind that runs in the engines
            self._batches = []
            self._steps = None
            self._caches.pool.unused.clear()
            self.engines.close()

    def _run(self, graph: str, inputs: Mapping[str, NDArray[Any]], output: str, shape: tuple[int, ...]) -> HiddenStates:
        """Run a graph of one profile on host arrays; its one output, float32 on the host."""
        self.engines.check_tokens(graph, len(next(iter(inputs.values()))))
        with self.cuda:
            out: HiddenStates = self.engines.run(graph, inputs, {output: shape})[output]
        return out

    def _check_memory(self) -> None:
        """Raise DeviceError if the engines and the caches of a short question exceed the free memory of the device."""
        m = self._manifest
        engines = sum(record.bytes for record in self.engine_set.engines.values())
        slots = min(m.max_context, m.layout.max_tokens + QUESTION_ROWS)
        caches = slots * sum(len(stage.cached) for stage in m.stages) * self.kv_slot_bytes
        if m.model.conv_layers:
            caches += 4 * m.model.state_numbers * len(m.model.conv_layers) * HeldStates(m.model).ends
        free, total = self.cuda.memory()
        if engines + caches > free:
            raise DeviceError(
                f"the engines take {size(engines)} and K/V of one image and a question, {slots} slots, {size(caches)}; "
                f"{size(free)} of {size(total)} of the device is free; export with a smaller --precision, or end other "
                "programs on the GPU"
            )
