"""K and V of one stage in device memory, for engines whose caches grow: the `plain` dialect, TensorRT before 10.15.

Such an engine reads a past of [1, kv_heads, slots, head_dim] for each layer and writes a present that is longer by the
rows' number, so there are two buffers that take turns, each laid out for exactly as many slots as it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.tensorrt.cache import DECODE, PREFILL, Kept, runs
from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.backends.tensorrt.score import Queries
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.vision.tokens import Ids, Rows, Scores

if TYPE_CHECKING:
    from vtx.runtime.backends.tensorrt.backend import TensorrtBackend


class GrowingStageCache:
    """`StageCache` of two buffers [layers * 2, kv_heads, slots, head_dim]; slots are dropped when next used."""

    def __init__(self, backend: TensorrtBackend, spec: StageSpec, graph: str, score: str | None, capacity: int) -> None:
        self._backend, self._spec, self._graph = backend, spec, graph
        self.length, self.capacity = 0, capacity
        manifest, model = backend._manifest, backend._manifest.model
        self._hidden, self._kv_heads, self._head_dim = model.hidden, model.kv_heads, model.head_dim
        self._unit = (
            model.head_dim * np.dtype(names.kv_type(backend.dialect, manifest.kv_dtype)).itemsize
        )  # bytes of a slot of a head
        self._part = model.kv_heads * capacity * self._unit  # of a layer's K or V
        what = f"the KV cache of layers {spec.first} to {spec.last}"
        nbytes = 2 * spec.layers * self._part
        self._now, self._next = Buffer(backend.cuda, nbytes, what), Buffer(backend.cuda, nbytes, what)
        self._queries = Queries(backend, score)
        self._held = 0  # slots that `_now` is laid out for

    def append(self, rows: Rows, positions: Ids, *, query: bool = False) -> Rows:
        count = len(rows)
        if self.length + count > self.capacity:
            raise AssertionError(f"{self.length} + {count} rows in a cache of {self.capacity}")
        with self._backend.lock:
            self._lay_out(self.length)
            out = self._run(rows, positions, self._queries.room(count) if query else None)
            self._now, self._next = self._next, self._now
            self._held += count
        self.length += count
        return out

    def keep(self, length: int) -> None:
        assert length <= self.length, (length, self.length)
        self.length = length

    def attention(self, *, last_only: bool = False) -> Scores:
        with self._backend.lock:
            self._lay_out(self.length)
            key = self._now.address + (self._spec.layers - 1) * 2 * self._part
            return self._queries.attention(key, self.length, self.length, last_only=last_only)

    def keys(self) -> NDArray[np.float32]:
        backend = self._backend
        dtype = np.dtype(names.kv_type(backend.dialect, backend._manifest.kv_dtype))
        keys = np.empty((self._kv_heads, self.length, self._head_dim), dtype)
        with backend.lock:
            self._lay_out(self.length)
            backend.cuda.copy_out(keys, self._now.address + (self._spec.layers - 1) * 2 * self._part)
            backend.cuda.wait()
        return keys.astype(np.float32)

    def read(self, slots: Ids) -> Kept:
        count = len(slots)
        with self._backend.lock:
            self._lay_out(self.length)
            nbytes = max(1, 2 * self._spec.layers * self._kv_heads * count * self._unit)
            kept = Kept(Buffer(self._backend.cuda, nbytes, "K/V set aside"), count)
            for part in range(2 * self._spec.layers):
                for start, first, run in runs(slots):
                    self._copy(kept.buffer, part, count, start, self._now, part, self._held, first, run, kept=True)
            self._backend.cuda.wait()
        return kept

    def write(self, slots: Ids, kv: Kept, *, length: int) -> None:
        assert len(slots) == kv.count
        with self._backend.lock:
            self._lay_out(length)
            for part in range(2 * self._spec.layers):
                for start, first, run in runs(slots):
                    self._copy(self._now, part, length, first, kv.buffer, part, kv.count, start, run, kept=False)
            self._backend.cuda.wait()
        self.length = length

    def _lay_out(self, length: int) -> None:
        """Lay the buffer out for `length` slots; the first that it held stay."""
        if self._held == length:
            return
        stay = min(self._held, length)
        if stay:
            for part in range(2 * self._spec.layers):
                self._copy(self._next, part, length, 0, self._now, part, self._held, 0, stay)
            self._backend.cuda.wait()
        self._now, self._next, self._held = self._next, self._now, length

    def _copy(
        self, to: Buffer, to_part: int, to_slots: int, to_slot: int,
        source: Buffer, part: int, slots: int, slot: int, count: int, *, kept: bool | None = None,
    ) -> None:  # fmt: skip
        """`count` slots of a part, between buffers of so many slots; `kept`: `to` (or else `source`) is packed."""
        packed = self._kv_heads * self._unit
        to_at = to.address + to_part * (packed * to_slots if kept is True else self._part) + to_slot * self._unit
        at = source.address + part * (packed * slots if kept is False else self._part) + slot * self._unit
        pitches = to_slots * self._unit, slots * self._unit
        self._backend.cuda.copy_rows(to_at, pitches[0], at, pitches[1], count * self._unit, self._kv_heads)

    def _run(self, rows: Rows, positions: Ids, query: int | None) -> Rows:
        backend, cuda, place, count = self._backend, self._backend.cuda, self._backend.place, len(rows)
        backend.check_rows(self._graph, count)
        context = backend.context(self._graph, DECODE if count == 1 else PREFILL)
        places = {name: place(name) for name in (names.HIDDEN, names.HIDDEN_OUT, names.POSITIONS)}
        places |= {name: buffer.address for name, buffer in backend.rope.items()}
        if self._spec.query:
            places[names.QUERY] = query or place(names.QUERY)
        shapes: dict[str, tuple[int, ...]] = {names.HIDDEN: (count, self._hidden), names.POSITIONS: (1, count)}
        shapes |= {name: (backend._manifest.max_context, self._head_dim // 2) for name in backend.rope}
        past = (1, self._kv_heads, self._held, self._head_dim)
        for number, layer in enumerate(range(self._spec.first, self._spec.last + 1)):
            for half, (before, after) in enumerate(_CACHES):
                offset = (2 * number + half) * self._part
                places |= {before(layer): self._now.address + offset, after(layer): self._next.address + offset}
                shapes[before(layer)] = past
        context.bind(shapes, places)
        rows, placed = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(positions, np.int64)
        cuda.copy_in(places[names.HIDDEN], rows)
        cuda.copy_in(places[names.POSITIONS], placed)
        context.enqueue()
        out = np.empty((count, self._hidden), np.float32)
        cuda.copy_out(out, places[names.HIDDEN_OUT])
        cuda.wait()
        return out


_CACHES = ((names.past_key, names.present_key), (names.past_value, names.present_value))
