"""A server in this process, and what its clients write to it."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image

from vtx.runtime.api.load import load
from vtx.runtime.server.engines import Engines, Serving
from vtx.runtime.server.limits import Limits

WAIT = 60.0  # seconds for anything that should happen at once, on a busy machine


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The objects of a stream; it must have ended as OpenAI's do."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def text(self) -> str:
        """The text of a stream."""
        return "".join(c["delta"].get("content", "") for e in self.events for c in e.get("choices", ()))


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    engines: Engines

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def chat(self, body: Any, **headers: str) -> Response:
        """POST a body, as JSON where it is not bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content_type": "application/json", **headers}
        return self.request("POST", "/v1/chat/completions", content, **headers)

    def metrics(self) -> dict[str, float]:
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def until_active(self, count: int, what: str) -> None:
        """Wait until this many requests are computed."""
        until(lambda: self.metrics()["vtx_requests_active"] == count, what)

    def open_chat(self, body: Any, **headers: str) -> socket.socket:
        """A connection on which a request has been sent and nothing read."""
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection = socket.create_connection(("127.0.0.1", self.port), WAIT)
        connection.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection


@contextmanager
def serving(
    bundles: dict[str, Path],
    limits: Limits | None = None,
    *,
    memory: int | None = None,
    device: str = "cpu",
    choosers: Any = None,
    verify: Any = lambda _: None,
    aliases: Any = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve bundles, with these `AppSettings`, until the end of the block."""
    import uvicorn

    from vtx.runtime.server.app import make_app
    from vtx.runtime.server.protocol import CONNECTIONS, BoundedProtocol
    from vtx.runtime.server.settings import AppSettings

    limits = limits or Limits()
    serving = Serving(choosers=choosers or {}, verify=verify, aliases=aliases or {})
    engines = Engines(bundles, lambda folder: load(folder, device=device, threads=1), limits, memory, serving)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(engines, limits, AppSettings(**options)), log_level="error", ws="none", http=BoundedProtocol,
        limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Served(listening.getsockname()[1], engines)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def held(served: Served) -> Iterator[threading.Event]:
    """An answer begins within the block and stops at its second token for as long as it takes. Set once it has."""
    if not served.engines.loaded:
        assert served.chat(asking(user("red?"))).status == 200
    backend, released, stopped = served.engines.loaded[0].model.backend, threading.Event(), threading.Event()
    head, calls = backend.head, count()

    def wait(*args: Any) -> Any:
        if next(calls):
            stopped.set()
            assert released.wait(WAIT), "never released"
        return head(*args)

    with patch.object(backend, "head", wait):
        try:
            yield stopped
        finally:
            released.set()


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for what another thread does; fail after `WAIT`."""
    pause, waited = threading.Event(), 0.0
    while not true():
        assert waited < WAIT, what
        pause.wait(0.02)
        waited += 0.02


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def user(text: str, *images: Image.Image) -> dict[str, Any]:
    """A user's message in OpenAI's form, images first."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def asking(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request of eight tokens to the model `tiny`."""
    return {"model": "tiny", "messages": list(messages), "max_tokens": 8, "ignore_eos": True, **fields}
