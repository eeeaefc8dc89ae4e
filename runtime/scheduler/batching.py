"""The next token of several answers, and the ends of prompts, in one pass through the stages, if the engine can."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeGuard

from vtx.runtime.api.model import Model
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.backends.backend import Backend, BatchBackend
from vtx.runtime.errors import DeviceError, VtxError
from vtx.runtime.session.generate import run_ahead
from vtx.runtime.session.session import Session

log = logging.getLogger(__name__)
FAILURES = 8  # passes in a row, after which no more are tried


def batches(backend: Backend) -> TypeGuard[BatchBackend]:
    """True for a backend that runs several conversations in one pass, also inside a wrapper that passes calls on."""
    return hasattr(backend, "append_each")


class Batching:
    """Decodes ahead for streams of one model, at most `most` in a pass; their next step then finds its logits.

    `obstacle`: the reason why this model decodes one at a time; None if it decodes together. `passes` and `tokens`
    count. A step computes its token itself if no pass did; once several passes in a row failed, no more are tried.
    """

    def __init__(self, model: Model, most: int, conversations: int) -> None:
        self.most = most
        self._backend = model.backend
        self.obstacle: str | None = None
        if most <= 1:
            self.obstacle = "--max-batch is 1"
        elif not batches(model.backend):
            self.obstacle = f"{model.backend.device} computes one conversation at a time"
        else:
            try:
                model.backend.share_caches(conversations)
            except DeviceError as e:
                self.obstacle = str(e)
        self.passes = 0
        self.tokens = 0
        self._failed = 0  # passes in a row

    @property
    def joins_prompts(self) -> bool:
        """True if prompts should leave their ends waiting: some engines run several in one pass.

        Others run each by itself, and then decode their answers together from the first token on.
        """
        return self.obstacle is None

    def decode(self, streams: Sequence[AnswerStream]) -> None:
        """Run a token, or the end of its prompt, of each stream that waits for that."""
        backend = self._backend
        if self.obstacle is not None or not batches(backend) or len(streams) < 2:
            return
        with ExitStack() as locks:
            paused = [locks.enter_context(stream.paused()) for stream in streams]
            sessions = [session for session in paused if session is not None]
            if not backend.runs_of_each:
                sessions = [session for session in sessions if len(session.to_run) == 1]
            together = [session for session in sessions if backend.reaches(session.decoding_caches)]
            for first in range(0, len(together), self.most):
                batch = together[first : first + self.most]
                if self.obstacle is not None or len(batch) < 2:
                    return
                self._run(backend, batch)

    def _run(self, backend: BatchBackend, batch: Sequence[Session]) -> None:
        """Run a batch in one pass; after `FAILURES` in a row there is an `obstacle`."""
        try:
            run_ahead(backend, batch)
        except VtxError as e:
            log.warning("%d answers could not be decoded together and are decoded in turn: %s", len(batch), e)
            self._failed += 1
            if self._failed == FAILURES:
                self.obstacle = f"{FAILURES} passes in a row failed: {e}"
                log.warning("from now on answers are decoded in turn: %s", self.obstacle)
            return
        self._failed = 0
        self.passes += 1
        self.tokens += len(batch)
