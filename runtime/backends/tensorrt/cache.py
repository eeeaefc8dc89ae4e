"""K and V of one stage in device memory, and the stage's runs over them.

The buffer is [layers, 2, kv_heads, slots, head_dim] with as many slots as the engine was built for; each layer's K and
V are bound as input and output at one address. Decoding one token is recorded into a CUDA graph once and launched from
then on: three small arrays in, the stage, one row out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.tensorrt.cuda import Buffer, Graph
from vtx.runtime.backends.tensorrt.engine import Context
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import Ids, Rows, Scores

if TYPE_CHECKING:
    from vtx.runtime.backends.tensorrt.backend import TensorrtBackend

DECODE, PREFILL = 0, -1  # of an engine's profiles, which may be one and the same


@dataclass(frozen=True, slots=True)
class Kept:
    """K/V of some slots, [layers, 2, kv_heads, count, head_dim], on the device."""

    buffer: Buffer
    count: int


class TensorrtStageCache:
    """`StageCache` on the device. `capacity` is what was asked for; the buffer is as long as the engine wants it."""

    def __init__(self, backend: TensorrtBackend, spec: StageSpec, graph: str, score: str | None, capacity: int) -> None:
        self._backend, self._spec, self._graph = backend, spec, graph
        self.length, self.capacity = 0, capacity
        manifest = backend._manifest
        model, self._slots = manifest.model, manifest.max_context
        self._hidden = model.hidden
        self._slot_bytes = model.head_dim * np.dtype(names.kv_type(backend.dialect, manifest.kv_dtype)).itemsize
        self._heads = spec.layers * 2 * model.kv_heads  # rows of slots in the buffer
        self._layer_bytes = model.kv_heads * self._slots * self._slot_bytes
        what = f"the KV cache of layers {spec.first} to {spec.last}"
        self._kv = Buffer(backend.cuda, self._heads * self._slots * self._slot_bytes, what)
        backend.cuda.zero(self._kv)  # what is masked must still be a number
        self._queries = Queries(backend, score)
        self._row = backend.cuda.pinned((1, model.hidden), np.float32)
        self._row_out = backend.cuda.pinned((1, model.hidden), np.float32)
        self._position = backend.cuda.pinned((1, 1), np.int64)
        self._total = backend.cuda.pinned((1,), np.int32)
        self._decode = backend.engine(graph).context(DECODE, backend.scratch)
        self._bind(self._decode, 1)
        self._recorded: Graph | None = None
        self._ran = False

    def append(self, rows: Rows, positions: Ids, *, query: bool = False) -> Rows:
        count = len(rows)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} rows in a cache of {self.capacity}")
        with self._backend.lock:
            self._total[0] = self.length + count
            out = self._one(rows, positions) if count == 1 and not query else self._many(rows, positions, query=query)
        self.length += count
        return out

    def keep(self, length: int) -> None:
        assert length <= self.length, (length, self.length)
        self.length = length

    def attention(self, *, last_only: bool = False) -> Scores:
        key = self._kv.address + (self._spec.layers - 1) * 2 * self._layer_bytes
        with self._backend.lock:
            return self._queries.attention(key, self._slots, self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        backend, manifest = self._backend, self._backend._manifest
        model, dtype = manifest.model, np.dtype(names.kv_type(backend.dialect, manifest.kv_dtype))
        keys = np.empty((model.kv_heads, self._slots, model.head_dim), dtype)
        with backend.lock:
            backend.cuda.copy_out(keys, self._kv.address + (self._spec.layers - 1) * 2 * self._layer_bytes)
            backend.cuda.wait()
        return keys[:, : self.length].astype(np.float32)

    def read(self, slots: Ids) -> Kept:
        with self._backend.lock:
            nbytes = max(1, self._heads * len(slots) * self._slot_bytes)
            kept = Kept(Buffer(self._backend.cuda, nbytes, "K/V set aside"), len(slots))
            self._move(slots, kept, out=True)
        return kept

    def write(self, slots: Ids, kv: Kept, *, length: int) -> None:
        assert len(slots) == kv.count
        with self._backend.lock:
            self._move(slots, kv, out=False)
        self.length = length

    def _move(self, slots: Ids, kept: Kept, *, out: bool) -> None:
        """Copy runs of neighbouring slots between the cache and a packed buffer of `kept.count` slots."""
        unit, cuda = self._slot_bytes, self._backend.cuda
        cache_pitch, kept_pitch = self._slots * unit, kept.count * unit
        for start, first, count in runs(slots):
            cache, packed = self._kv.address + first * unit, kept.buffer.address + start * unit
            places = [(packed, kept_pitch), (cache, cache_pitch)]
            (to, to_pitch), (source, pitch) = places if out else reversed(places)
            cuda.copy_rows(to, to_pitch, source, pitch, count * unit, self._heads)
        cuda.wait()

    def _bind(self, context: Context, count: int, query: int | None = None) -> None:
        backend, place = self._backend, self._backend.place
        places = {
            names.HIDDEN: place(names.HIDDEN),
            names.HIDDEN_OUT: place(names.HIDDEN_OUT),
            names.POSITIONS: place(names.POSITIONS),
            names.TOTAL_SLOTS: place(names.TOTAL_SLOTS),
            **{name: buffer.address for name, buffer in backend.rope.items()},
        }
        if self._spec.query:
            places[names.QUERY] = query or place(names.QUERY)
        for number, layer in enumerate(range(self._spec.first, self._spec.last + 1)):
            key = self._kv.address + number * 2 * self._layer_bytes
            places |= {name(layer): key for name in (names.past_key, names.present_key)}
            places |= {name(layer): key + self._layer_bytes for name in (names.past_value, names.present_value)}
        context.bind({names.HIDDEN: (count, self._hidden), names.POSITIONS: (1, count)}, places)

    def _one(self, rows: Rows, positions: Ids) -> Rows:
        """One row: the first run as it comes, the second recorded, from then on launched."""
        self._row[:], self._position[:] = rows, positions
        self._bind(self._decode, 1)
        if self._recorded is None and self._ran and self._decode.capturable:
            with self._backend.cuda.capture() as graph:
                self._queue_one()
            self._recorded = graph
        if self._recorded is not None:
            self._recorded.launch()
        else:
            self._queue_one()
        self._backend.cuda.wait()
        self._ran = True
        return self._row_out.copy()

    def _queue_one(self) -> None:
        cuda, place = self._backend.cuda, self._backend.place
        cuda.copy_in(place(names.HIDDEN), self._row)
        cuda.copy_in(place(names.POSITIONS), self._position)
        cuda.copy_in(place(names.TOTAL_SLOTS), self._total)
        self._decode.enqueue()
        cuda.copy_out(self._row_out, place(names.HIDDEN_OUT))

    def _many(self, rows: Rows, positions: Ids, *, query: bool) -> Rows:
        backend, cuda, count = self._backend, self._backend.cuda, len(rows)
        backend.check_rows(self._graph, count)
        context = self._decode if count == 1 else backend.context(self._graph, PREFILL)
        self._bind(context, count, self._queries.room(count) if query else None)
        out = np.empty((count, self._hidden), np.float32)
        rows, placed = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(positions, np.int64)
        cuda.copy_in(backend.place(names.HIDDEN), rows)
        cuda.copy_in(backend.place(names.POSITIONS), placed)
        cuda.copy_in(backend.place(names.TOTAL_SLOTS), self._total)
        context.enqueue()
        cuda.copy_out(out, backend.place(names.HIDDEN_OUT))
        cuda.wait()
        return out


def runs(slots: Ids) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots: (place among `slots`, first slot, how many)."""
    if not len(slots):
        return []
    starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, int(slots[a]), b - a) for a, b in pairwise(starts)]
