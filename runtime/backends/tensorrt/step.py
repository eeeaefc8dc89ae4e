"""One token through the embedding, every stage and the head on the device: one launch, one wait.

Ids and positions go in, the best token and its hidden state come out; the logits stay on the device unless they are
asked for. The first step over a conversation's memory is queued, the second recorded into a CUDA graph, and later ones
launch it. K and V of the token are copied behind the filled slots afterwards, since their address changes, and states
of layers to where they are held. Layers that read K and V of others come after that, in a second launch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from vtx.runtime.backends.backend import Step
from vtx.runtime.backends.tensorrt.binding import BoundStage
from vtx.runtime.backends.tensorrt.loaded import TensorrtCacheContext
from vtx.runtime.bundle.spec import names

log = logging.getLogger(__name__)
RECORDINGS = 4  # that a stage's memory keeps, each with other memory of the stages before it


class DecodingCache(Protocol):
    """A stage's cache as a step needs it; `reads`: K and V of other caches, so that it runs when they have theirs."""

    reads: bool

    @property
    def memory(self) -> BoundStage: ...

    def begin_token(self, position: int) -> None:
        """Ready the memory for a token at that position, which is to fill the next slot."""

    def end_token(self) -> None:
        """Queue copies of what the token's run gave to where it is held; the slot is counted later."""


class TokenSteps:
    """The steps of a backend's conversations, by the graphs `embed` and `head`, and every stage's memory."""

    def __init__(self, shared: TensorrtCacheContext, embed: str, head: str, vocab: int) -> None:
        cuda = shared.cuda
        engines = shared.engines
        hidden = shared.model.hidden
        self._shared = shared
        self._ids = cuda.pinned((1,), np.int64)
        self._best = cuda.pinned((1,), np.int32)
        self._state = cuda.pinned((hidden,), np.float32)
        self._logits = cuda.pinned((vocab,), np.float32)
        # the stages' token inputs that the embedding does not give, which are zeros for text
        self._zeros = {
            names.token_input(declared.name): cuda.pinned((1, declared.width), np.float32)
            for declared in shared.token_inputs
            if not declared.of_text
        }
        self._embed, self._head = (engines.new_context(graph, 0, captures=True) for graph in (embed, head))
        for context, name, shape in ((self._embed, names.IDS, (1,)), (self._head, names.HIDDEN, (1, hidden))):
            tensors = (*context.engine.inputs, *context.engine.outputs)
            context.bind({name: shape}, {tensor: engines.address(tensor) for tensor in tensors})

    def run(self, caches: Sequence[DecodingCache], token: int, positions: Sequence[int], *, logits: bool) -> Step:
        """Run a token behind each stage's filled slots, for which there is room."""
        cuda = self._shared.cuda
        stages = [cache.memory for cache in caches]
        self._ids[0] = token
        for cache, position in zip(caches, positions, strict=True):
            cache.begin_token(position)
        keeping = sum(not cache.reads for cache in caches)  # the first ones
        for first, end in ((0, keeping), (keeping, len(caches))):
            if first < end:
                self._launch(stages[first:end], begins=first == 0, ends=end == len(caches))
            for cache in caches[first:end]:
                cache.end_token()
        if logits:
            cuda.copy_out(self._logits, self._shared.engines.address(names.LOGITS))
        cuda.wait()
        return Step(int(self._best[0]), self._state.copy(), self._logits.copy() if logits else None)

    def _launch(self, stages: Sequence[BoundStage], *, begins: bool, ends: bool) -> None:
        recordings = stages[-1].recordings
        key = tuple(stage.number for stage in stages)
        graph = recordings.get(key)
        if graph is None and key in recordings and self._embed.records:
            contexts = (self._embed, *(stage.decode for stage in stages), self._head)
            capturable = all(context.capturable for context in contexts)
            work = partial(self._queue, stages, begins=begins, ends=ends)
            graph = (capturable and self._shared.cuda.record(work)) or False
            if not graph:
                log.warning("decoding cannot be recorded into a CUDA graph; this conversation's tokens are queued")
        elif key not in recordings and len(recordings) == RECORDINGS:
            recordings.clear()
        recordings[key] = graph
        if graph:
            graph.launch()
        else:
            self._queue(stages, begins=begins, ends=ends)

    def _queue(self, stages: Sequence[BoundStage], *, begins: bool, ends: bool) -> None:
        """Queue the embedding if a token `begins`, these stages, and the head if it `ends`."""
        cuda = self._shared.cuda
        address = self._shared.engines.address
        hidden = address(names.HIDDEN)
        hidden_out = address(names.HIDDEN_OUT)
        nbytes = self._state.nbytes
        if begins:
            cuda.copy_in(address(names.IDS), self._ids)
            for name, zeros in self._zeros.items():
                cuda.copy_in(address(name), zeros)
            self._embed.enqueue()
        for stage in stages:
            for name, value_name in stage.told.items():
                cuda.copy_in(address(name), value_name)
            stage.decode.enqueue()
            stage.turn()
            cuda.copy_rows(hidden, nbytes, hidden_out, nbytes, nbytes, 1)
        if ends:
            self._head.enqueue()
            cuda.copy_out(self._state, hidden)
            cuda.copy_out(self._best, address(names.BEST))
