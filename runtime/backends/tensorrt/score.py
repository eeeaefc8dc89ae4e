"""The queries of a stage's last rows, on the device, and the score graph's runs over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import Scores

if TYPE_CHECKING:
    from vtx.runtime.backends.tensorrt.backend import TensorrtBackend


class Queries:
    """Queries [rows, heads * head_dim] float32 of the rows last appended with them; `score` is the graph they ask."""

    def __init__(self, backend: TensorrtBackend, score: str | None) -> None:
        self._backend, self._score = backend, score
        model = backend._manifest.model
        self._width, self._key = model.heads * model.head_dim, (1, model.kv_heads, model.head_dim)
        self._rows: Buffer | None = None
        self._count = 0

    def room(self, count: int) -> int:
        """The address where the queries of `count` rows are to be written."""
        nbytes = 4 * count * self._width
        if self._rows is None or self._rows.nbytes < nbytes:
            self._rows = Buffer(self._backend.cuda, nbytes, "the rows' queries")
        self._count = count
        return self._rows.address

    def attention(self, key: int, slots: int, length: int, *, last_only: bool) -> Scores:
        """What the rows give to the first `length` of the `slots` slots whose keys lie at address `key`."""
        assert self._rows is not None
        assert self._score is not None
        most_rows = self._backend.longest(self._score)
        total, most = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
        for start in range(self._count - 1 if last_only else 0, self._count, most_rows):
            end = min(start + most_rows, self._count)
            part = self._run(start, end, key, slots, length - (self._count - end))
            total += part[0]
            np.maximum(most, part[1], out=most)
        return total[:length], most[:length]

    def _run(self, start: int, end: int, key: int, slots: int, filled: int) -> Scores:
        """The scores of rows `start` to `end`, the last of which fills slot `filled` - 1: none sees a later one."""
        assert self._rows is not None
        assert self._score is not None
        backend, cuda, place = self._backend, self._backend.cuda, self._backend.place
        one, kv_heads, head_dim = self._key
        told = np.array([filled], np.int32)
        shared = (names.TOTAL_SLOTS, names.ATTENTION_SUM, names.ATTENTION_MAX)
        places = {names.QUERY: self._rows.address + 4 * self._width * start, names.KEY: key}
        shapes = {names.QUERY: (end - start, self._width), names.KEY: (one, kv_heads, slots, head_dim)}
        context = backend.context(self._score, 0)
        cuda.copy_in(place(names.TOTAL_SLOTS), told)
        context.bind(shapes, places | {name: place(name) for name in shared})
        context.enqueue()
        total, most = np.empty(slots, np.float32), np.empty(slots, np.float32)
        cuda.copy_out(total, place(names.ATTENTION_SUM))
        cuda.copy_out(most, place(names.ATTENTION_MAX))
        cuda.wait()
        return total, most
