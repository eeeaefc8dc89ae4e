"""K and V of one stage in device memory, and the stage's runs over them.

The buffer is [layers, 2, kv_heads, slots, head_dim] with as many slots as the engine was built for; each layer's K and
V are bound as input and output at one address. Decoding one token is recorded into a CUDA graph once and launched from
then on: three small arrays in, the stage, one token's hidden state out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.backends.tensorrt.cuda import Buffer, Graph
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import HiddenStates, Ids, Scores, TokenStates

DECODE, PREFILL = 0, -1  # of an engine's profiles, which may be one and the same


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """K/V of some slots, [layers, 2, kv_heads, count, head_dim], on the device."""

    buffer: Buffer
    count: int


class TensorrtStageCache(SlotCounter):
    """`StageCache` on the device. `capacity` is the requested one; the buffer `kv` is as long as the engine wants."""

    reserved_whole = True

    def __init__(self, context: TensorrtCacheContext, spec: StageSpec, graph: str, capacity: int) -> None:
        super().__init__(capacity)
        self._context, self._spec, self._graph = context, spec, graph
        model, cuda = context.model, context.cuda
        self._slots, self._slot_bytes = context.max_context, context.slot_bytes
        self._heads = len(spec.cached) * 2 * model.kv_heads  # of the buffer, each with all slots
        self._layer_bytes = model.kv_heads * self._slots * self._slot_bytes
        purpose = f"the KV cache of layers {spec.first} to {spec.last}"
        self.kv = Buffer(cuda, self._heads * self._slots * self._slot_bytes, purpose)
        cuda.zero(self.kv)  # masked slots must still be numbers
        self._queries = Queries(context)
        self._row, self._row_out = (cuda.pinned((1, model.hidden), np.float32) for _ in range(2))
        self._position = cuda.pinned((1, 1), np.int64)
        self._row_inputs = {name: cuda.pinned((1, width), np.float32) for name, width in context.widths(spec).items()}
        self._total = cuda.pinned((1,), np.int32)
        self._decode = context.engines.new_context(graph, DECODE)
        self._bind(self._decode, 1)
        self._recorded: Graph | None = None
        self._ran = False

    def _run(self, tokens: TokenStates, positions: Ids, *, query: bool) -> HiddenStates:
        with self._context.lock:
            self._total[0] = self.length + len(tokens)
            if len(tokens) == 1 and not query:
                return self._decode_one(tokens, positions)
            engines, cuda, count = self._context.engines, self._context.cuda, len(tokens)
            engines.check_tokens(self._graph, count)
            context = self._decode if count == 1 else engines.context(self._graph, PREFILL)
            self._bind(context, count, self._queries.room(count) if query else None)
            out = np.empty((count, self._context.model.hidden), np.float32)
            inputs = self._context.inputs_of(self._spec, tokens, positions)
            for name, array in inputs.items():
                cuda.copy_in(engines.address(name), array)
            cuda.copy_in(engines.address(names.TOTAL_SLOTS), self._total)
            context.enqueue()
            cuda.copy_out(out, engines.address(names.HIDDEN_OUT))
            cuda.wait()
        return out

    def attention(self, *, last_only: bool = False) -> Scores:
        key = self.kv.address + (len(self._spec.cached) - 1) * 2 * self._layer_bytes
        with self._context.lock:
            return self._queries.attention(key, self._slots, self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        context, model = self._context, self._context.model
        keys = np.empty((model.kv_heads, self._slots, model.head_dim), context.kv_dtype)
        with context.lock:
            context.cuda.copy_out(keys, self.kv.address + (len(self._spec.cached) - 1) * 2 * self._layer_bytes)
            context.cuda.wait()
        return keys[:, : self.length].astype(np.float32)

    def read(self, slots: Ids) -> SavedSlots:
        with self._context.lock:
            nbytes = max(1, self._heads * len(slots) * self._slot_bytes)
            kept = SavedSlots(Buffer(self._context.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, kept, out=True)
        return kept

    def write(self, slots: Ids, kv: SavedSlots, *, length: int) -> None:
        assert len(slots) == kv.count
        with self._context.lock:
            self._move(slots, kv, out=False)
        self.length = length

    def _move(self, slots: Ids, kept: SavedSlots, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        unit, cuda = self._slot_bytes, self._context.cuda
        cache_pitch, packed_pitch = self._slots * unit, kept.count * unit
        for start, first, count in runs(slots):
            cache, packed = self.kv.address + first * unit, kept.buffer.address + start * unit
            ends = [(packed, packed_pitch), (cache, cache_pitch)]
            (to, to_pitch), (source, pitch) = ends if out else reversed(ends)
            cuda.copy_rows(to, to_pitch, source, pitch, count * unit, self._heads)
        cuda.wait()

    def _bind(self, context: Context, count: int, query: int | None = None) -> None:
        address = self._context.engines.address
        addresses = {
            **{name: address(name) for name in (names.HIDDEN, names.HIDDEN_OUT, names.POSITIONS, names.TOTAL_SLOTS)},
            **{name: buffer.address for name, buffer in self._context.rope.items()},
        }
        if self._spec.query:
            addresses[names.QUERY] = query or address(names.QUERY)
        for number, layer in enumerate(self._spec.cached):
            key = self.kv.address + number * 2 * self._layer_bytes
            addresses |= {name(layer): key for name in (names.past_key, names.present_key)}
            addresses |= {name(layer): key + self._layer_bytes for name in (names.past_value, names.present_value)}
        shapes = {names.HIDDEN: (count, self._context.model.hidden), names.POSITIONS: (1, count)}
        for name, width in self._context.widths(self._spec).items():
            shapes[names.token_input(name)] = (count, width)
            addresses[names.token_input(name)] = address(names.token_input(name))
        context.bind(shapes, addresses)

    def _decode_one(self, tokens: TokenStates, positions: Ids) -> HiddenStates:
        """One token: the first run is queued, the second recorded, and later ones launch the recording."""
        self._row[:], self._position[:] = tokens.hidden, positions
        for name, row in self._row_inputs.items():
            row[:] = tokens.inputs[name]
        self._bind(self._decode, 1)
        if self._recorded is None and self._ran and self._decode.capturable:
            with self._context.cuda.capture() as graph:
                self._queue_one()
            self._recorded = graph
        if self._recorded is not None:
            self._recorded.launch()
        else:
            self._queue_one()
        self._context.cuda.wait()
        self._ran = True
        return self._row_out.copy()

    def _queue_one(self) -> None:
        cuda, address = self._context.cuda, self._context.engines.address
        cuda.copy_in(address(names.HIDDEN), self._row)
        cuda.copy_in(address(names.POSITIONS), self._position)
        cuda.copy_in(address(names.TOTAL_SLOTS), self._total)
        for name, row in self._row_inputs.items():
            cuda.copy_in(address(names.token_input(name)), row)
        self._decode.enqueue()
        cuda.copy_out(self._row_out, address(names.HIDDEN_OUT))


def runs(slots: Ids) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots: (index among `slots`, first slot, number of slots)."""
    if not len(slots):
        return []
    starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, int(slots[a]), b - a) for a, b in pairwise(starts)]
