"""HTTP connections with limits that uvicorn lacks: slow headers, idle connections, tiny chunks, half-closed clients."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.uploads import network_of

CONNECTIONS = 256  # in total; a request beyond them gets 503
MAX_IDLE = 192  # connections without a request that is being answered; beyond them the longest idle one is closed
MAX_IDLE_PER_CLIENT = 64
ARRIVAL_SECONDS = 0.2  # for the request of a new connection to be read, before connections count as too many
MAX_HEADER = 16 << 10  # bytes
HEADER_SECONDS = 10.0  # from the begin of a connection, or the first byte of a further request, to the header's end
FREE_CHUNKS = 1000  # of a body, before their size counts
CHUNK_BYTES = 1024  # the least mean size of the chunks beyond these
PROBE_SECONDS = 0.1  # between the first two probes of a half-closed connection; each further pause is twice as long
MAX_PROBE_SECONDS = 10.0


class BoundedConnection(h11.Connection):
    """HTTP/1.1 as h11 reads it, without bodies in very many chunks, each of which takes time."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER)
        self._chunks = self._bytes = 0
        self.error_status = 400  # of the last error

    def next_event(self) -> Any:
        try:
            return self._next_bounded_event()
        except h11.RemoteProtocolError as e:
            self.error_status = e.error_status_hint
            raise

    def _next_bounded_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            # h11 bounds what it waits for, not a header that has come at once.
            header = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if header > MAX_HEADER:
                raise h11.RemoteProtocolError("too large a header", error_status_hint=431)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class BoundedProtocol(H11Protocol):
    """A connection of uvicorn.

    It is closed if a header takes too long; so are the longest idle connections if there are too many, of one client or
    in total. A client that has closed its half of a connection still gets its answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._bounded = BoundedConnection()
        self.idle_since = self.loop.time()
        self.settled = False  # what had arrived with it has been read
        self._header: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None

    @property
    def network(self) -> str:
        """The client."""
        return "" if self.client is None else network_of(self.client[0])

    @property
    def idle(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()
        if len(self.connections) > 2 * CONNECTIONS:
            self._bound_idle()
        else:  # of many clients at once, requests have arrived that are not read yet, on a busy machine for long
            self.loop.call_later(ARRIVAL_SECONDS, self.loop.call_later, 0, self._settle)

    def _settle(self) -> None:
        """Count it if it is idle from now on: since it could be read, the loop has polled."""
        self.settled = True
        self._bound_idle()

    def _bound_idle(self) -> None:
        many = len(self.connections) > 2 * CONNECTIONS
        bounded = [c for c in self.connections if isinstance(c, BoundedProtocol)]
        idle = [c for c in bounded if c.idle and (c.settled or many)]
        idle.sort(key=lambda connection: connection.idle_since)
        own = [c for c in idle if c.network == self.network]
        for connections, most in ((own, MAX_IDLE_PER_CLIENT), (idle, MAX_IDLE)):
            for connection in connections[: max(0, len(connections) - most)]:
                connection.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_header()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def eof_received(self) -> bool:  # type: ignore[override]  # which asyncio asks for
        """Keep the connection of a client that sends nothing more and waits for its answer."""
        if self.idle or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        if self._probe is None and self.scope["http_version"] != "1.0":
            self._probe_client(PROBE_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop(self._header)
        self._stop(self._probe)

    def send_400_response(self, msg: str) -> None:
        if self._bounded.error_status == 431:
            self._refuse(431, f"the header is over {MAX_HEADER:,} bytes, the limit; send fewer or shorter fields")
            return
        self._refuse(400, f"{msg.rstrip('.')}; its header, its length or its chunks are wrong, too large or too many")

    def _await_header(self) -> None:
        """Require a header in time, also before its first byte."""
        if not self.idle:
            self._stop(self._header)
            self._header = None
        elif self._header is None:
            late = partial(self._refuse, 408, f"the header did not arrive within {HEADER_SECONDS:g} s, the limit")
            self._header = self.loop.call_later(HEADER_SECONDS, late)

    def _probe_client(self, pause: float) -> None:
        """Send an interim response, which clients ignore (RFC 9110, 15.2); one that has closed both halves resets it.

        Both kinds look alike until then, and nobody should compute for a client that has left.
        """
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
            self._probe = self.loop.call_later(pause, self._probe_client, min(2 * pause, MAX_PROBE_SECONDS))

    def _refuse(self, status: int, message: str) -> None:
        """End the connection, with a reply if none has begun."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(Refusal(status, message).body()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            reply = h11.Response(status_code=status, headers=list(headers.items()))
            for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
