"""The queries of a stage's last tokens, on the device, and the score graph's runs over them."""

from __future__ import annotations

import numpy as np

from vtx.runtime.backends.cuda import Buffer
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import Scores


class Queries:
    """Queries [tokens, heads * head_dim] float32 of the tokens last appended with them, for the score graph."""

    def __init__(self, context: TensorrtCacheContext) -> None:
        self._context = context
        self._score = context.score
        model = context.model
        self._width = model.heads * model.head_dim
        self._buffer: Buffer | None = None
        self._count = 0

    def room(self, count: int) -> None:
        """Make room for the queries of `count` tokens; `address` tells where each goes."""
        nbytes = 4 * count * self._width
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = Buffer(self._context.cuda, nbytes, "the tokens' queries")
        self._count = count

    def address(self, token: int) -> int:
        """The address of that token's query."""
        assert self._buffer is not None
        return self._buffer.address + 4 * self._width * token

    def attention(self, key: int, shape: tuple[int, ...], length: int, *, last_only: bool) -> Scores:
        """The attention of these tokens to the `length` slots whose keys of this shape are at address `key`."""
        assert self._buffer is not None
        assert self._score is not None
        engines = self._context.engines
        cuda = self._context.cuda
        context = engines.context(self._score, 0)
        longest = engines.longest(self._score)
        shared = {n: engines.address(n) for n in (names.TOTAL_SLOTS, names.ATTENTION_SUM, names.ATTENTION_MAX)}
        total, most, part = (np.zeros(length, np.float32) for _ in range(3))
        for start in range(self._count - 1 if last_only else 0, self._count, longest):
            end = min(start + longest, self._count)
            filled = np.array([length - (self._count - end)], np.int32)  # its last token fills the last of these slots
            shapes = {names.QUERY: (end - start, self._width), names.KEY: shape}
            cuda.copy_in(shared[names.TOTAL_SLOTS], filled)
            context.bind(shapes, {names.QUERY: self.address(start), names.KEY: key, **shared})
            context.enqueue()
            for name, add, out in ((names.ATTENTION_SUM, np.add, total), (names.ATTENTION_MAX, np.maximum, most)):
                cuda.copy_out(part, shared[name])
                cuda.wait()
                add(out, part, out=out)
        return total, most
