"""The queries of a stage's last tokens, on the device, and the score graph's runs over them."""

from __future__ import annotations

import numpy as np

from vtx.runtime.backends.tensorrt.cuda import Buffer
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.bundle.spec import names
from vtx.runtime.vision.tokens import Scores


class Queries:
    """Queries [tokens, heads * head_dim] float32 of the tokens last appended with them, for the score graph."""

    def __init__(self, context: TensorrtCacheContext) -> None:
        self._context, self._score, model = context, context.score, context.model
        self._width, self._key = model.heads * model.head_dim, (1, model.kv_heads, model.head_dim)
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

    def attention(self, key: int, slots: int, length: int, *, last_only: bool) -> Scores:
        """The attention of these tokens to the first `length` of the `slots` slots whose keys are at address `key`."""
        assert self._buffer is not None
        assert self._score is not None
        longest = self._context.engines.longest(self._score)
        total, most = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
        for start in range(self._count - 1 if last_only else 0, self._count, longest):
            end = min(start + longest, self._count)
            part = self._run(start, end, key, slots, length - (self._count - end))
            total += part[0]
            np.maximum(most, part[1], out=most)
        return total[:length], most[:length]

    def _run(self, start: int, end: int, key: int, slots: int, filled: int) -> Scores:
        """The scores of tokens `start` to `end`, the last of which fills slot `filled` - 1: none sees a later one."""
        assert self._buffer is not None
        assert self._score is not None
        engines, cuda = self._context.engines, self._context.cuda
        one, kv_heads, head_dim = self._key
        filled_slots = np.array([filled], np.int32)
        shared = (names.TOTAL_SLOTS, names.ATTENTION_SUM, names.ATTENTION_MAX)
        addresses = {names.QUERY: self.address(start), names.KEY: key}
        shapes = {names.QUERY: (end - start, self._width), names.KEY: (one, kv_heads, slots, head_dim)}
        context = engines.context(self._score, 0)
        cuda.copy_in(engines.address(names.TOTAL_SLOTS), filled_slots)
        context.bind(shapes, addresses | {name: engines.address(name) for name in shared})
        context.enqueue()
        total, most = np.empty(slots, np.float32), np.empty(slots, np.float32)
        cuda.copy_out(total, engines.address(names.ATTENTION_SUM))
        cuda.copy_out(most, engines.address(names.ATTENTION_MAX))
        cuda.wait()
        return total, most
