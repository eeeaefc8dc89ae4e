"""Ends a server whose threads stopped working, and notifies systemd of one whose threads work."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from vtx.runtime.errors import RequestError
from vtx.runtime.scheduler.scheduler import Heartbeat

LOOK_SECONDS = 2.0  # between two looks, at most
log = logging.getLogger(__name__)
Notify = Callable[[str], None]


class Watchdog:
    """Looks at each thread's seconds of silence, by its name, and calls `end` if they reach `limit`.

    While none has, systemd gets `WATCHDOG=1` by `notify` at every look. Silence ends the process at the second look
    in a row, so that a process that was stopped and continued goes on.
    """

    def __init__(
        self,
        silences: Callable[[], Mapping[str, float]],
        limit: float,
        end: Callable[[str], None],
        notify: Notify,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._silences = silences
        self._limit = limit
        self._end = end
        self._notify = notify
        self._every = min(look_seconds, limit / 4)
        self.connections = Heartbeat()
        self._silent = False
        self._closing = threading.Event()

    def look(self) -> None:
        """Judge the threads as they are now."""
        silences = {**self._silences(), "the thread of the connections": self.connections.silence}
        name, longest = max(silences.items(), key=lambda item: item[1])
        if longest < self._limit:
            self._silent = False
            self._tell("WATCHDOG=1")
        elif not self._silent:
            self._silent = True
        else:
            self._end(
                f"{name} gave no sign of life for {self._limit:g} s, the limit of --stall-timeout; the server ends"
            )

    @contextmanager
    def running(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Look until the end of the block, from a thread of its own; `loop` serves the connections."""

        def run() -> None:
            while not self._closing.wait(self._every):
                loop.call_soon_threadsafe(self.connections.beat)
                self.look()

        thread = threading.Thread(target=run, name="vtx-serve watchdog", daemon=True)
        self.connections.beat()
        self._notify("READY=1")
        thread.start()
        try:
            yield
        finally:
            self._tell("STOPPING=1")
            self._closing.set()
            thread.join()

    def _tell(self, state: str) -> None:
        try:
            self._notify(state)
        except OSError as e:
            log.warning("systemd could not be notified: %s", e)


def systemd(environ: Mapping[str, str] = os.environ) -> tuple[Notify, float]:
    """The function that notifies systemd, and its time limit in seconds; without systemd nothing is sent.

    Raises RequestError if $NOTIFY_SOCKET or $WATCHDOG_USEC has a value that systemd does not set.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    limit = environ.get("WATCHDOG_USEC", "")
    if limit and not (limit.isascii() and limit.isdigit() and int(limit)):
        raise RequestError(f"WATCHDOG_USEC is {limit!r:.40}; it must be a whole number of microseconds above 0")
    if not address:
        return lambda _: None, LOOK_SECONDS
    if address[0] not in "/@" or not hasattr(socket, "AF_UNIX"):
        raise RequestError(f"NOTIFY_SOCKET is {address!r:.80}; only Unix sockets, /PATH or @NAME, are supported")
    target = "\0" + address[1:] if address[0] == "@" else address
    for_us = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))

    def notify(state: str) -> None:
        if state == "WATCHDOG=1" and not (limit and for_us):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), target)

    return notify, int(limit) / 2e6 if limit and for_us else LOOK_SECONDS
