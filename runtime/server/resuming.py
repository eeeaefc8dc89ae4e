"""Streams that a client takes up again where its connection broke off, by the id of the last event that it has."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter, deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from vtx.runtime.server.endpoints import ENDPOINTS, error_body
from vtx.runtime.server.http import App, Receive, Scope, Send, header, until_left
from vtx.runtime.server.keys import ANYBODY, SCOPE
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal

ASKED = b"x-resumable"  # a request with this header, whatever its value, may be taken up again
LAST = b"last-event-id"
MAX_ENDED = 32  # streams that are kept after their end
_EVENT = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")


@dataclass(eq=False, slots=True)
class Stream:
    """The parts of a reply to a tenant, `first` of them gone, that connections follow one after the other.

    `turns` counts the connections: the last one alone goes on, and has got `sent` parts. `bytes` are those of the
    parts that are here, at most about `most`: then a part waits until an earlier one was sent.
    """

    tenant: str
    most: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begin: MutableMapping[str, Any] | None = None
    parts: deque[MutableMapping[str, Any]] = field(default_factory=deque)
    first: int = 0
    sent: int = 0
    bytes: int = 0
    turns: int = 0
    ended: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)  # nobody has followed it for too long

    @property
    def resumable(self) -> bool:
        """True once it has begun, if it is a stream of events."""
        if self.begin is None or self.begin["status"] != 200:
            return False
        kind: bytes = dict(self.begin["headers"]).get(b"content-type", b"")
        return kind.startswith(b"text/event-stream")

    @property
    def size(self) -> int:
        """All parts so far."""
        return self.first + len(self.parts)

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Add a part; an event gets its id, by which the next one is its number."""
        async with self.changed:
            if message["type"] == "http.response.start":
                self.begin = message
            else:
                body = message.get("body", b"")
                if self.resumable and body and not body.startswith(b":"):
                    body = f"id: {self.id}-{self.size + 1}\n".encode() + body
                    message = {**message, "body": body}
                while self.bytes and self.bytes + len(body) > self.most:
                    await self.changed.wait_for(lambda: self.first < self.sent)
                    self.first += 1
                    self.bytes -= len(self.parts.popleft().get("body", b""))
                self.parts.append(message)
                self.bytes += len(body)
            self.changed.notify_all()

    async def end(self) -> None:
        """No further parts come."""
        async with self.changed:
            self.ended = True
            self.changed.notify_all()

    def join(self, start: int) -> int:
        """The turn of a connection that follows it from part `start` on, in place of the one before."""
        self.turns += 1
        self.sent = start
        return self.turns

    async def follow(self, send: Send, turn: int, seconds: float) -> None:
        """Send its parts to the end, or until another connection follows, or a part takes too long."""
        async with self.changed:
            self.changed.notify_all()  # the connection before ends
            await self.changed.wait_for(lambda: self.begin is not None or self.ended)
        if self.begin is None:  # its client left before a reply began
            return
        await asyncio.wait_for(send(self.begin), seconds)
        while (part := await self._next(turn)) is not None:
            await asyncio.wait_for(send(part), seconds)
            async with self.changed:
                if turn == self.turns:
                    self.sent += 1
                    self.changed.notify_all()
        if turn != self.turns:
            await send({"type": "http.response.body", "body": b""})

    async def _next(self, turn: int) -> MutableMapping[str, Any] | None:
        """The next part to send; None if there is none, or another connection follows."""
        async with self.changed:
            await self.changed.wait_for(lambda: turn != self.turns or self.ended or self.sent < self.size)
            if turn != self.turns or self.sent == self.size:
                return None
            return self.parts[self.sent - self.first]


class Resumable:
    """An application whose streams may be taken up again by the same tenant, if their request asked for that.

    An answer goes on for `Limits.resume_seconds` while nobody follows it, and is kept for as long after its end. A
    request with the header Last-Event-ID gets what comes after that event; its body is ignored.
    """

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._streams = dict[str, Stream]()
        self._answering = set[asyncio.Task[None]]()  # which the loop alone would forget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ENDPOINTS
        if answers and (last := header(scope, LAST)):
            try:
                stream, start = self._known(last, scope.get(SCOPE, ANYBODY).name)
            except Refusal as refusal:
                reply: Any = JSONResponse(error_body(scope["path"], refusal), refusal.status)
                await reply(scope, receive, send)
            else:
                await self._follow(stream, start, receive, send)
        elif answers and header(scope, ASKED):
            await self._begin(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a stream that outlives its connection."""
        stream = Stream(scope.get(SCOPE, ANYBODY).name, self._limits.stream)
        arrived = asyncio.Event()

        async def read() -> MutableMapping[str, Any]:
            if arrived.is_set():
                await stream.abandoned.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                arrived.set()
            return message

        async def answer() -> None:
            try:
                await self._app(scope, read, stream.put)
            finally:
                arrived.set()
                self._keep(stream)
                await stream.end()

        self._streams[stream.id] = stream
        answering = asyncio.ensure_future(answer())
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        await arrived.wait()
        await self._follow(stream, 0, receive, send)

    async def _follow(self, stream: Stream, start: int, receive: Receive, send: Send) -> None:
        """Send the parts from `start` on, to their end or until the client leaves or reads nothing more."""
        turn = stream.join(start)
        leaving = asyncio.ensure_future(until_left(receive))
        following = asyncio.ensure_future(stream.follow(send, turn, self._limits.write_seconds))
        try:
            await asyncio.wait({leaving, following}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            following.cancel()
            await asyncio.gather(leaving, following, return_exceptions=True)
            if stream.resumable:
                asyncio.get_running_loop().call_later(self._limits.resume_seconds, self._abandon, stream, turn)
            else:
                self._abandon(stream, turn)

    def _abandon(self, stream: Stream, turn: int) -> None:
        """End its answer, unless another connection has followed since."""
        if turn == stream.turns:
            stream.abandoned.set()

    def _keep(self, stream: Stream) -> None:
        """Keep a whole stream for a while; of too many, the oldest of the tenant that has most goes."""
        if not stream.resumable or not stream.parts or stream.parts[-1].get("more_body", False):
            del self._streams[stream.id]
            return
        stream.ended = True
        asyncio.get_running_loop().call_later(self._limits.resume_seconds, self._streams.pop, stream.id, None)
        ended = [other for other in self._streams.values() if other.ended]
        if len(ended) > MAX_ENDED:
            [(tenant, _)] = Counter(other.tenant for other in ended).most_common(1)
            del self._streams[next(other.id for other in ended if other.tenant == tenant)]

    def _known(self, last: str, tenant: str) -> tuple[Stream, int]:
        """The stream of an event, and the number of the part that comes after it. Raises Refusal (404)."""
        event = _EVENT.fullmatch(last)
        stream = self._streams.get(event[1]) if event else None
        if event and stream is not None and stream.tenant == tenant and stream.resumable:
            start = int(event[2])
            if stream.first <= start <= stream.size:
                return stream, start
        raise Refusal(
            404,
            f"there is no stream with the event {last!r:.80}, or it is kept no longer; ask again without Last-Event-ID",
            code="stream_not_found",
        )
