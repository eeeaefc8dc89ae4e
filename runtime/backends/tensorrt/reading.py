"""A stage whose layers have no K and V of their own, and read those of earlier stages in their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vtx.runtime.backends.device_states import put
from vtx.runtime.backends.slots import ReadingCounter
from vtx.runtime.backends.tensorrt.binding import DECODE, PREFILL, BoundStage
from vtx.runtime.backends.tensorrt.cache import DeviceSlots, TensorrtStageCache
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.regions import part
from vtx.runtime.backends.tensorrt.step import RECORDINGS
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

Memories = Mapping[int, DeviceSlots]  # by the layer whose K and V are read


class ReadingStage(BoundStage):
    """All that is bound to the memory of a stage's sources. It keeps their addresses, not the memory itself."""

    def __init__(self, shared: TensorrtCacheContext, spec: StageSpec, graph: str, sources: Memories) -> None:
        super().__init__(shared, spec, graph, map(names.source_slot, sources))
        self._addresses = {
            name(layer): part(memory.regions, layer, half)
            for layer, memory in sources.items()
            for half, name in enumerate((names.past_key, names.past_value))
        }
        self.bind(self.decode, 1, {layer: memory.capacity for layer, memory in sources.items()})

    def bind(self, to: Context, tokens: int, slots: Mapping[int, int]) -> None:
        """Bind a context for `tokens` tokens, the last of each source's filled slots, of which `slots` are read."""
        shapes, addresses = self.bind_tokens(tokens)
        model = self._shared.model
        for layer, count in slots.items():
            shape = (1, count, model.kv_heads, model.heads_of(layer))
            shapes |= {names.past_key(layer): shape, names.past_value(layer): shape}
        to.bind(shapes, addresses | self._addresses)


class TensorrtReadingCache(ReadingCounter):
    """The cache of a stage whose layers keep nothing: they read K and V of `sources`, caches by layer.

    `placed` is the one whose slots are within a window.
    """

    reads = True

    def __init__(
        self, context: TensorrtCacheContext, spec: StageSpec, graph: str, sources: Mapping[int, TensorrtStageCache]
    ) -> None:
        super().__init__()
        self._context = context
        self._spec = spec
        self._graph = graph
        self.sources = sources
        slides = context.model.slides
        sliding = [cache for layer, cache in sources.items() if slides(layer)]
        self.placed = (sliding or [*sources.values()])[0]  # none may slide: then the graph does not use first slots

    @property
    def memory(self) -> ReadingStage:
        """All that is bound to the sources' memory, which the last of them holds for the next conversation over it."""
        memories = {layer: cache.memory for layer, cache in self.sources.items()}
        readers: dict[tuple[int, ...], Any] = [*memories.values()][-1].readers
        key = (self._spec.first, *(memory.number for memory in memories.values()))
        if key not in readers:
            if len(readers) == RECORDINGS:
                readers.clear()
            readers[key] = ReadingStage(self._context, self._spec, self._graph, memories)
        reader: ReadingStage = readers[key]
        return reader

    def make_room(self, slots: int) -> None:
        """The sources do."""

    def fill(self, length: int) -> None:
        """Nothing is held."""

    def begin_token(self, position: int) -> None:
        """Have what a token at that position is told, which is to fill the next slot of each source."""
        values = {names.POSITIONS: position}
        values |= {names.source_slot(layer): cache.length for layer, cache in self.sources.items()}
        if self.placed.window is not None:
            values[names.FIRST_SLOT] = int(self.placed.first_slots(np.array([position]), self.placed.length + 1)[0])
        self.memory.tell(values)

    def end_token(self) -> None:
        """Nothing is held."""

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        shared = self._context
        count = len(tokens)
        engines = self._context.engines
        engines.check_tokens(self._graph, count)
        with shared.cuda:
            out = shared.states.empty(count)
            filled = {layer: c.length for layer, c in self.sources.items()}
            context = engines.context(self._graph, DECODE if count == 1 else PREFILL)
            self.memory.bind(context, count, filled)
            inputs = shared.inputs_of(self._spec, tokens, positions)
            if self.placed.window is not None:
                inputs[names.FIRST_SLOT] = self.placed.first_slots(positions, self.placed.length)
            for layer, slots in filled.items():
                inputs[names.source_slot(layer)] = np.array([slots - 1], np.int32)
            for name, array in inputs.items():
                put(shared.cuda, engines.address(name), array)
            context.enqueue()
            nbytes = count * shared.states.row_bytes
            shared.cuda.copy_rows(out.row(0), nbytes, engines.address(names.HIDDEN_OUT), nbytes, nbytes, 1)
            shared.cuda.wait()
        return out.as_states()
