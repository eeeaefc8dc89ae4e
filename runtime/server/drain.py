"""A server that lets its running answers end before it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from vtx.runtime.server.settings import Traffic

LOOK_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which a signal drains: no request is let in any more, those inside end within `grace` seconds.

    It still listens meanwhile, so that a load balancer sees /readyz fail. `close` ends the answers that are left, each
    with an error that its client gets. A second signal does not wait.
    """

    def __init__(self, config: uvicorn.Config, traffic: Traffic, close: Callable[[], None], grace: float) -> None:
        super().__init__(config)
        self._traffic = traffic
        self._close = close
        self._grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain first; called by uvicorn for SIGINT and SIGTERM."""
        again, self._traffic.draining = self._traffic.draining, True
        if again or not self._traffic.inside:
            super().handle_exit(sig, frame)
        else:
            threading.Thread(target=self._drain, args=(sig, frame), name="vtx-serve drain", daemon=True).start()

    def _drain(self, sig: int, frame: FrameType | None) -> None:
        end = time.monotonic() + self._grace
        while self._traffic.inside and time.monotonic() < end and not self.should_exit:
            time.sleep(LOOK_SECONDS)
        if self._traffic.inside:
            self._close()
        super().handle_exit(sig, frame)
