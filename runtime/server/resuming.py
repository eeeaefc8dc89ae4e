"""Streams that a client takes up again where its connection broke off, by the id of the last event that it has."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from vtx.runtime.server.endpoints import ENDPOINTS, error_body
from vtx.runtime.server.http import App, ClientLeft, Receive, Scope, Send, header, until_left
from vtx.runtime.server.keys import ANYBODY, SCOPE
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal

ASKED = b"x-resumable"  # a request with this header, whatever its value, may be taken up again
LAST = b"last-event-id"
MAX_ENDED = 16  # streams that are kept after their end
_EVENT = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")


@dataclass(eq=False, slots=True)
class RecordedReply:
    """The parts of a reply to a tenant, of at most `most` bytes, that connections follow one after the other.

    `turns` counts the connections: the last one alone goes on.
    """

    tenant: str
    most: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begin: MutableMapping[str, Any] | None = None
    parts: list[MutableMapping[str, Any]] = field(default_factory=list)
    bytes: int = 0
    turns: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)  # nobody has followed it for too long

    @property
    def resumable(self) -> bool:
        """True once it has begun, if it is a stream of events."""
        if self.begin is None or self.begin["status"] != 200:
            return False
        kind: bytes = dict(self.begin["headers"]).get(b"content-type", b"")
        return kind.startswith(b"text/event-stream")

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Add a part; an event gets its id, by which the next one is its number. Raises ClientLeft beyond `most`."""
        if message["type"] == "http.response.start":
            self.begin = message
        elif self.resumable and (body := message.get("body", b"")):
            self.bytes += len(body)
            if self.bytes > self.most:
                raise ClientLeft
            number = b"" if body.startswith(b":") else f"id: {self.id}-{len(self.parts) + 1}\n".encode()
            self.parts.append({**message, "body": number + body})
        else:
            self.parts.append(message)
        self.changed.set()

    async def follow(self, send: Send, turn: int, start: int, seconds: float) -> None:
        """Send its parts from `start` on, to the end or until another connection follows; `seconds` for each."""
        await self._until(lambda: self.begin is not None)
        if self.begin is not None:
            await asyncio.wait_for(send(self.begin), seconds)
        while (part := await self._part(turn, start)) is not None:
            await asyncio.wait_for(send(part), seconds)
            start += 1
        if turn != self.turns:
            await send({"type": "http.response.body", "body": b""})

    async def _part(self, turn: int, number: int) -> MutableMapping[str, Any] | None:
        """The part of this number; None if there is none, or another connection follows."""
        await self._until(lambda: turn != self.turns or number < len(self.parts))
        return self.parts[number] if turn == self.turns and number < len(self.parts) else None

    async def _until(self, true: Callable[[], bool]) -> None:
        """Return once that is true, or no further parts come."""
        while not (true() or self.ended):
            self.changed.clear()
            await self.changed.wait()


class Resumable:
    """An application whose streams may be taken up again by the same tenant, if their request asked for that.

    An answer goes on for `Limits.resume_seconds` while nobody follows it, and is kept for as long after its end. A
    request with the header Last-Event-ID gets what comes after that event; its body is ignored.
    """

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._streams = dict[str, RecordedReply]()
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
        stream = RecordedReply(scope.get(SCOPE, ANYBODY).name, self._limits.stream)
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
                stream.ended = True
                stream.changed.set()

        self._streams[stream.id] = stream
        answering = asyncio.ensure_future(answer())
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        await arrived.wait()
        await self._follow(stream, 0, receive, send)

    async def _follow(self, stream: RecordedReply, start: int, receive: Receive, send: Send) -> None:
        """Send the parts from `start` on, to their end or until the client leaves or reads nothing more."""
        stream.turns += 1
        turn = stream.turns
        stream.changed.set()  # the connection before ends
        leaving = asyncio.ensure_future(until_left(receive))
        following = asyncio.ensure_future(stream.follow(send, turn, start, self._limits.write_seconds))
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

    def _abandon(self, stream: RecordedReply, turn: int) -> None:
        """End its answer, unless another connection has followed since."""
        if turn == stream.turns:
            stream.abandoned.set()

    def _keep(self, stream: RecordedReply) -> None:
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

    def _known(self, last: str, tenant: str) -> tuple[RecordedReply, int]:
        """The stream of an event, and the number of the part that comes after it. Raises Refusal (404)."""
        event = _EVENT.fullmatch(last)
        stream = self._streams.get(event[1]) if event else None
        if event and stream is not None and stream.tenant == tenant and stream.resumable:
            start = int(event[2])
            if start <= len(stream.parts):
                return stream, start
        raise Refusal(
            404,
            f"there is no stream with the event {last!r:.80}, or it is kept no longer; ask again without Last-Event-ID",
            code="stream_not_found",
        )
