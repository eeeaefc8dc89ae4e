"""A bundle's engines on one GPU, with their contexts and one buffer for each input and output."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.cuda import ALIGNMENT, Buffer, Cuda, MemoryPool
from vtx.runtime.backends.device_history import DeviceStateHistory
from vtx.runtime.backends.device_states import StatesPool, put
from vtx.runtime.backends.slots import LANES, HeldStates
from vtx.runtime.backends.tensorrt.engine import Context, EngineFile, GraphEngine, KernelCache, make_logger
from vtx.runtime.backends.tensorrt.regions import KVLayout
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import EngineSet
from vtx.runtime.bundle.spec import graphs, names
from vtx.runtime.bundle.spec.manifest import Manifest, StageSpec, TokenInput
from vtx.runtime.bundle.spec.model_spec import ModelSpec
from vtx.runtime.errors import ContextError
from vtx.runtime.vision.tokens import Ids, TokenStates

LANE_STATES = ("states of lanes", "new states of lanes")
WHOLE: dict[str, Any] = {names.PATCH_INDEX: np.int64, names.MERGED: np.int64}  # outputs that are not float32


class LoadedEngines:
    """The engines of every graph. All of them share their working memory and, by name, their inputs and outputs."""

    def __init__(self, bundle: Bundle, engines: EngineSet, trt: Any, cuda: Cuda) -> None:
        self._bundle = bundle
        self._set = engines
        self._cuda = cuda
        self.runtime = trt.Runtime(make_logger(trt))
        self._kernels = None
        if engines.flavour == fingerprint.RTX:
            name = f"{fingerprint.FOLDER}/{engines.target}/{fingerprint.KERNELS}"
            self._kernels = KernelCache(bundle, name)
            weakref.finalize(self, self._kernels.save)
        self._engines: dict[str, GraphEngine] = {}
        cure = fingerprint.build_command(bundle, engines.target)
        for graph in engines.engines:
            record = fingerprint.check_sources(bundle, engines, graph)
            with fingerprint.open_engine(bundle, engines, record) as opened:
                file = EngineFile(record.file, opened, cure)
                self._engines[graph] = GraphEngine(trt, self.runtime, file, cuda, self._kernels)
        self._scratch = Buffer(cuda, max(e.scratch for e in self._engines.values()), "the engines' working memory")
        self.buffers = {name: Buffer(cuda, nbytes, f"the tensor {name}") for name, nbytes in self._io_bytes().items()}
        self._contexts: dict[tuple[str, int], Context] = {}

    def new_context(self, graph: str, profile: int, *, captures: bool = False) -> Context:
        return self._engines[graph].context(profile, self._scratch, captures=captures)

    def context(self, graph: str, profile: int) -> Context:
        if (graph, profile) not in self._contexts:
            self._contexts[graph, profile] = self.new_context(graph, profile)
        return self._contexts[graph, profile]

    def longest(self, graph: str) -> int:
        return self._set.engines[graph].longest("tokens")

    def lanes(self, graph: str) -> int:
        """The most conversations that a run of a stage is of."""
        return max(profile.get(graphs.BATCH, (1, 1, 1))[2] for profile in self._set.engines[graph].profiles)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the states of one conversation in the stage that has the most."""
        m = self._bundle.manifest
        return 4 * m.model.state_numbers * max(len(stage.stateful) for stage in m.stages)

    def share_states(self, lanes: int) -> None:
        """Have buffers for states that runs of that many conversations take and give, if there are any."""
        for name in LANE_STATES if self._state_bytes else ():
            purpose = f"the states of layers of {lanes} conversations"
            self.buffers[name] = Buffer(self._cuda, lanes * self._state_bytes, purpose)

    @property
    def longest_side(self) -> int:
        """The most pixels of a side of an image that the vision graph takes."""
        m = self._bundle.manifest
        if not m.image.own_size:
            return max(m.image.size)
        return self._set.engines[m.dialects[self._set.dialect].vision].longest(graphs.HEIGHT)

    def address(self, name: str) -> int:
        return self.buffers[name].address

    def check_tokens(self, graph: str, tokens: int) -> None:
        """Raise ContextError if a graph's engine does not take `tokens` tokens at once."""
        longest = self.longest(graph)
        if tokens > longest:
            raise ContextError(
                f"the prompt takes {tokens} tokens at once, the engine of {graph} was built for at most {longest}; "
                f"ask for less, or {fingerprint.build_command(self._bundle, 'this')}"
            )

    def run(
        self, graph: str, inputs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, NDArray[Any]]:
        """Run a graph of one profile on arrays or states of the device; its outputs of these `shapes`, on the host."""
        context = self.context(graph, 0)
        results = {name: np.empty(shape, WHOLE.get(name, np.float32)) for name, shape in shapes.items()}
        addresses = {name: self.address(name) for name in (*inputs, *self._engines[graph].outputs)}
        for name, array in inputs.items():
            put(self._cuda, addresses[name], array)
        context.bind({name: array.shape for name, array in inputs.items()}, addresses)
        context.enqueue()
        for name, result in results.items():
            self._cuda.copy_out(result, addresses[name])
        self._cuda.wait()
        return results

    def close(self) -> None:
        if self._kernels is not None:
            self._kernels.save()
        self._contexts.clear()
        self._engines.clear()
        self.buffers.clear()

    def _io_bytes(self) -> dict[str, int]:
        """The largest size of every input and output but the caches, over all graphs, in bytes."""
        m = self._bundle.manifest
        files = m.dialects[self._set.dialect]
        longest = {graph: self.longest(graph) for graph in self._engines if graph != files.vision}
        most = max(longest[graph] for graph in files.stages)
        tower = m.model.tower
        if m.image.own_size:
            pixels = self.longest_side**2 * (1 if m.video is None else 2)
            tokens = self.longest_side**2 // (tower.patch * tower.square) ** 2
        else:
            pixels = math.prod(m.image.size)
            tokens = tower.tokens
        sizes = {
            names.IDS: 8 * longest[files.embed],
            names.HIDDEN: 4 * m.model.hidden * max(longest.values()),
            names.HIDDEN_OUT: 4 * m.model.hidden * most,
            names.TOTAL_SLOTS: 4 * LANES,
            **dict.fromkeys((names.POSITIONS, *sight_of(m.model)), 8 * most),
            **dict.fromkeys(map(names.source_slot, m.model.sources(m.model.shared or 1, m.model.layers)), 4 * LANES),
            names.PIXELS: 4 * 3 * pixels,
            names.LOGITS: 4 * m.model.vocab * longest[files.head],
            names.BEST: 4 * longest[files.head],
            names.ODDS: 8,
        }
        longest_input = max(tokens, max(longest.values()))
        sizes |= {names.token_input(declared.name): 4 * declared.width * longest_input for declared in m.token_inputs}
        for name, nbytes in self._tower_bytes(tokens).items():
            sizes[name] = max(sizes.get(name, 0), nbytes)
        if files.score:
            sizes[names.QUERY] = 4 * m.model.heads * m.model.head_dim * most
            sizes |= {name: 4 * m.max_context for name in (names.ATTENTION_SUM, names.ATTENTION_MAX)}
        if m.model.conv_layers:  # of one token; more are written where they are held
            sizes[names.STATE_ENDS] = 8 * HeldStates(m.model).ends
            sizes[names.STATE_OUT] = self._state_bytes
        kv_type = np.dtype(names.kv_type(self._set.dialect, m.kv_dtype))
        for stage in m.stages:
            if stage.cached:
                layout = KVLayout.of(m.model, stage, kv_type.itemsize)
                sizes[new_slots(stage)] = layout.nbytes(LANES if written_in_place(layout) else most)
        return sizes

    def _tower_bytes(self, tokens: int) -> dict[str, int]:
        """The same of what the graphs of towers and projector take and give, for `tokens` of an image."""
        m = self._bundle.manifest
        files = m.dialects[self._set.dialect]
        sizes = {names.TAU: 4} if files.vision_merges else {}
        for name, shape in vision_shapes(m, self._set.dialect, tokens).items():
            sizes[name] = np.dtype(WHOLE.get(name, np.float32)).itemsize * math.prod(shape)
        if files.text_tower and m.text_tower is not None:
            sizes[names.IDS] = 8 * self.longest(files.text_tower)
            sizes[names.TEXT_EMBEDDING] = 4 * m.text_tower.width
        if files.projector:
            sizes[names.TOWER_STATES] = 4 * m.model.tower.state_width * self.longest(files.projector)
        return sizes


def new_slots(spec: StageSpec) -> str:
    """The buffer for new K and V of a stage that its engine cannot write where they belong."""
    return f"new K and V of layers {spec.first} to {spec.last}"


def sight_of(model: ModelSpec) -> list[str]:
    """The inputs of stages for the slots that each token sees, [1, tokens] int64."""
    slides = model.sliding is not None
    both_ways = model.two_way is not None
    return [names.FIRST_SLOT] * slides + [names.SEEN_SLOTS] * both_ways


def written_in_place(layout: KVLayout) -> bool:
    """True if every slot has an address that TensorRT takes, so that engines write new K and V where they belong."""
    return not any(row % ALIGNMENT for row in layout.rows)


def vision_shapes(m: Manifest, dialect: str, tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the vision graph's outputs for one image of this number of tokens."""
    free = {graphs.IMAGES: 1, graphs.TOKENS: tokens, graphs.STATES: m.model.tower.states}
    outputs = graphs.vision(m, dialect).outputs
    return {
        name: tuple(size if isinstance(size, int) else free[size] for size in tensor.shape)
        for name, tensor in outputs.items()
    }


@dataclass(frozen=True, slots=True)
class TensorrtCacheContext:
    """Shared by the caches of a bundle. `kv_dtype` is the engines' type of K and V; `score`: a graph's file.

    `tables` are the rotary tables on the host, for tokens whose positions have several parts: then `turned` holds the
    rows of these tokens.
    """

    engines: LoadedEngines
    cuda: Cuda
    model: ModelSpec
    kv_dtype: np.dtype[Any]
    max_context: int
    rope: Mapping[str, Buffer]
    score: str | None
    states: StatesPool
    token_inputs: tuple[TokenInput, ...] = ()
    tables: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    turned: Mapping[str, Buffer] = field(default_factory=dict)

    @property
    def pool(self) -> MemoryPool:
        """Memory that goes from one conversation to the next."""
        return self.states.memory

    def new_states(self, spec: StageSpec) -> DeviceStateHistory | None:
        return DeviceStateHistory(spec, self.model, self.cuda, self.pool) if spec.stateful else None

    def layout(self, spec: StageSpec) -> KVLayout:
        return KVLayout.of(self.model, spec, self.kv_dtype.itemsize)

    def widths(self, spec: StageSpec) -> dict[str, int]:
        """Numbers per token of each token input that a stage reads."""
        return {declared.name: declared.width for declared in self.token_inputs if declared.name in spec.inputs}

    def inputs_of(self, spec: StageSpec, tokens: TokenStates, positions: Ids) -> dict[str, Any]:
        return {
            names.HIDDEN: tokens.hidden,
            names.POSITIONS: positions.astype(np.int64),
            **{names.token_input(n): tokens.inputs[n] for n in spec.inputs},
        }
