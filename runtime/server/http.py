"""A request's body within limits of size and time, and a reply to a client that may be slow or gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal, no_room

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed the connection, or reads nothing more."""


def header(scope: Scope, name: bytes) -> str:
    """A header's value; empty if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _read(body: bytearray, receive: Receive, limits: Limits, hold: Callable[[int], bool]) -> None:
    size = 0
    more = True
    room = True
    while more and size <= 2 * limits.body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        room = room and hold(size if size <= limits.body else 0)
        if room and size <= limits.body:
            body.extend(piece)
        else:
            body.clear()
    if size > limits.body:
        raise Refusal(413, f"the request is over {limits.body:,} bytes, the limit; send fewer or smaller images")
    if not room:
        raise no_room("the bodies of other requests take all memory for them")


async def read_json_body(
    scope: Scope, receive: Receive, limits: Limits, hold: Callable[[int], bool] = lambda _: True
) -> bytearray:
    """The body of a request that says it is JSON, or is not a page's and says nothing.

    One that is too large is read, up to twice the limit, and dropped. So is one for which `hold`, called with the bytes
    so far, has no room. Raises Refusal if it has another type or is compressed (415), too large (413), too slow (408)
    or without room (429); ClientLeft if the client did not send all of it.
    """
    body = bytearray()
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    # Pages in a browser may leave out the type, but not their origin; LiteLLM leaves out both.
    if kind != "application/json" and (kind or header(scope, b"origin")):
        raise Refusal(415, "the body must be JSON, with the header Content-Type: application/json")
    if header(scope, b"content-encoding").strip().lower() not in ("", "identity"):
        raise Refusal(415, "the body must not be compressed; send it without the header Content-Encoding")
    try:
        await asyncio.wait_for(_read(body, receive, limits, hold), limits.body_seconds)
    except asyncio.TimeoutError as e:
        body.clear()
        raise Refusal(
            408, f"the request did not arrive within {limits.body_seconds:g} s, the limit; send it faster"
        ) from e
    except BaseException:
        body.clear()  # which the traceback would keep
        raise
    return body


async def until_left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """The reply to one request: JSON, or events. `status` is 0 until it has begun.

    `lines`: a stream has a line of JSON for each event, else they are server-sent events.
    """

    def __init__(self, send: Send, limits: Limits, *, lines: bool = False) -> None:
        self._send = send
        self._seconds = limits.write_seconds
        self._lines = lines
        self.status = 0

    async def json(self, status: int, value: Mapping[str, Any], headers: dict[str, str] | None = None) -> None:
        """All of it at once."""
        body = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        await self._begin(status, {"content-type": "application/json", "content-length": str(len(body))}, headers)
        await self._put({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Begin a stream."""
        kind = "application/x-ndjson" if self._lines else "text/event-stream; charset=utf-8"
        headers = {"content-type": kind, "cache-control": "no-cache"}
        await self._begin(200, headers, {"x-accel-buffering": "no"})

    async def event(self, value: Mapping[str, Any]) -> None:
        """One event, an object as JSON, under the name of its `type` if it has one."""
        text = f"{json.dumps(value, ensure_ascii=False)}\n"
        if not self._lines:
            name = f"event: {value['type']}\n" if "type" in value else ""
            text = f"{name}data: {text}\n"
        await self._put({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})

    async def events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Several events."""
        for value in values:
            await self.event(value)

    async def comment(self, text: str) -> None:
        """A comment of the stream, which clients ignore; lines of JSON have none."""
        if self._lines:
            return
        await self._put({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    async def end_events(self, last: str) -> None:
        """The end of a stream, after a `last` event, if it is not empty."""
        body = f"data: {last}\n\n".encode() if last else b""
        await self._put({"type": "http.response.body", "body": body})

    async def _begin(self, status: int, headers: dict[str, str], more: dict[str, str] | None) -> None:
        pairs = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers | (more or {})).items()]
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        try:
            await asyncio.wait_for(self._send(message), self._seconds)
        except (asyncio.TimeoutError, OSError) as e:
            raise ClientLeft from e
