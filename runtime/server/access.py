"""A line for each request, with an id that its reply has, too."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from vtx.runtime.server.http import App, Receive, Scope, Send, header
from vtx.runtime.server.keys import SCOPE

GIVEN = re.compile(r"[\w.:-]{1,64}", re.ASCII)  # ids that clients may give
MOST_PATH = 200  # characters


class AccessLog:
    """Gives every request an id, its own `X-Request-Id` or a new one, and its end a line: text, or with `as_json` JSON.

    `write` gets the lines; a request whose client left before a reply began has the status 499. Nothing of what was
    asked or answered is in them.
    """

    def __init__(
        self,
        app: App,
        write: Callable[[str], None] | None,
        *,
        as_json: bool = False,
    ) -> None:
        self._app = app
        self._write = write
        self._as_json = as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        started = time.monotonic()
        id = given if GIVEN.fullmatch(given) else uuid.uuid4().hex
        status = 499
        sent = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if self._write is not None:
                self._write(self._line(scope, id, status, sent, 1000 * (time.monotonic() - started)))

    def _line(self, scope: Scope, id: str, status: int, sent: int, ms: float) -> str:
        # A trusted proxy may pass on whatever its client wrote.
        client = quote((scope.get("client") or ("-",))[0] or "-", safe=":.[]%")[:MOST_PATH]
        facts = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": client,
            "id": id,
            "method": scope["method"],
            "path": quote(scope["path"][:MOST_PATH]),
            "status": status,
            "bytes": sent,
            "ms": round(ms, 1),
        }
        if SCOPE in scope:
            facts["key"] = scope[SCOPE].name
        return json.dumps(facts) if self._as_json else " ".join(map(str, facts.values()))
