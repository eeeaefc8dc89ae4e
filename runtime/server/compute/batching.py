"""The next token of several answers in one pass through the stages, where the engine can do that."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from vtx.runtime.api.model import Model
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends.backend import BatchBackend
from vtx.runtime.errors import DeviceError, VtxError
from vtx.runtime.session.generate import decode_ahead
from vtx.runtime.session.session import Session

log = logging.getLogger(__name__)
FAILURES = 8  # passes in a row, after which no more are tried


class Batching:
    """Decodes ahead for streams of one model, at most `most` in a pass; their next step then finds its logits.

    `obstacle` says why this model decodes one at a time, None where it decodes together. `passes` and `tokens` count.
    Steps compute for themselves what no pass did; where several passes in a row fail, no more are tried.
    """

    def __init__(self, model: Model, most: int, conversations: int) -> None:
        self.most, self._backend = most, model.backend
        self.obstacle = _share(model, conversations) if most > 1 else "--max-batch is 1"
        self.passes, self.tokens = 0, 0
        self._failed = 0  # passes in a row

    def decode(self, streams: Sequence[AnswerStream]) -> None:
        """Run a token of each stream that waits for one."""
        backend = self._backend
        if self.obstacle is not None or not isinstance(backend, BatchBackend) or len(streams) < 2:
            return
        with ExitStack() as held:
            paused = [held.enter_context(stream.paused()) for stream in streams]
            sessions = [session for session in paused if session is not None]
            together = [session for session in sessions if backend.reaches(session.decoding_caches)]
            for first in range(0, len(together), self.most):
                if self.obstacle is None:
                    self._pass(backend, together[first : first + self.most])

    def _pass(self, backend: BatchBackend, sessions: Sequence[Session]) -> None:
        if len(sessions) < 2:
            return
        try:
            decode_ahead(backend, sessions)
        except VtxError as e:
            log.warning("%d answers could not be computed together and are in turn: %s", len(sessions), e)
            self._failed += 1
            if self._failed == FAILURES:
                self.obstacle = f"{FAILURES} passes in a row failed: {e}"
                log.warning("from now on answers are decoded in turn: %s", self.obstacle)
            return
        self._failed = 0
        self.passes += 1
        self.tokens += len(sessions)


def _share(model: Model, conversations: int) -> str | None:
    """Why the model's conversations cannot be computed together."""
    backend = model.backend
    if not isinstance(backend, BatchBackend):
        return f"{backend.device} computes one conversation at a time"
    try:
        backend.share_caches(conversations)
    except DeviceError as e:
        return str(e)
    return None
