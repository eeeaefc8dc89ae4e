"""One token through the embedding, every stage and the head in the GPU's memory, with one wait at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vtx.runtime.backends.backend import Step
from vtx.runtime.backends.cuda import Buffer, Cuda
from vtx.runtime.backends.ort.cache import OrtCacheContext
from vtx.runtime.backends.ort.cuda_cache import OrtCudaCache
from vtx.runtime.backends.ort.graph import OrtGraph
from vtx.runtime.bundle.spec import names


class OrtCudaSteps:
    """The steps of a backend's conversations: the embedding and the head, bound to one token's buffers.

    The logits stay in the GPU's memory unless they are asked for.
    """

    def __init__(self, context: OrtCacheContext, cuda: Cuda, embed: OrtGraph, head: OrtGraph, vocab: int) -> None:
        self._context = context
        self._cuda = cuda
        self._embed = embed
        self._head = head
        hidden = context.model.hidden
        self._ids = np.zeros(1, np.int64)
        self._best = np.zeros(1, np.int32)
        self._state = np.zeros(hidden, np.float32)
        self._logits = np.zeros(vocab, np.float32)
        self._buffers = dict[str, Buffer]()
        sizes = {names.HIDDEN: hidden}
        sizes |= {
            names.token_input(declared.name): declared.width for declared in context.token_inputs if declared.of_text
        }
        self._embedding, self._choice = (graph.session.io_binding() for graph in (embed, head))
        self._bind(self._embedding.bind_input, names.IDS, np.dtype(np.int64), (1,))
        for name, width in sizes.items():
            self._bind(self._embedding.bind_output, name, np.dtype(np.float32), (1, width))
        self._bind(self._choice.bind_input, names.HIDDEN, np.dtype(np.float32), (1, hidden))
        self._bind(self._choice.bind_output, names.LOGITS, np.dtype(np.float32), (1, vocab))
        self._bind(self._choice.bind_output, names.BEST, np.dtype(np.int32), (1,))

    def _bind(self, bind: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        if name not in self._buffers:
            self._buffers[name] = Buffer(self._cuda, dtype.itemsize * int(np.prod(shape)), "one token")
        bind(name, *self._context.memory, dtype, shape, self._buffers[name].address)

    def run(self, caches: Sequence[OrtCudaCache], token: int, positions: Sequence[int], *, logits: bool) -> Step:
        """Run a token behind each stage's filled slots, for which there is room."""
        cuda = self._cuda
        address = {name: buffer.address for name, buffer in self._buffers.items()}
        options = caches[0].stage.unsynchronised
        self._ids[0] = token
        cuda.copy_in(address[names.IDS], self._ids)
        self._embed.run_bound(self._embedding, options)
        hidden = address[names.HIDDEN]
        for cache, position in zip(caches, positions, strict=True):
            hidden = cache.queue_token({**address, names.HIDDEN: hidden}, position)
        cuda.copy_rows(address[names.HIDDEN], self._state.nbytes, hidden, self._state.nbytes, self._state.nbytes, 1)
        self._head.run_bound(self._choice, options)
        cuda.copy_out(self._state, hidden)
        cuda.copy_out(self._best, address[names.BEST])
        if logits:
            cuda.copy_out(self._logits, address[names.LOGITS])
        cuda.wait()
        return Step(int(self._best[0]), self._state.copy(), self._logits.copy() if logits else None)
