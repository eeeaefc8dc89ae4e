"""A page with the newest picture of each source and the answers about it, served while vtx-watch runs."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from PIL import ImageOps
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vtx.runtime.errors import VtxError
from vtx.runtime.server.app import PACKAGE, SECURITY, Guard, page_routes
from vtx.runtime.server.http import App, ClientLeft, Receive, Reply, Scope, Send, until_left
from vtx.runtime.server.keys import Keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.protocol import CONNECTIONS, BoundedProtocol
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.server.uploads import network_of
from vtx.runtime.vision.image import load_image
from vtx.tools.watch.watch import Watched

SIDE = 1280  # of the JPEG pictures
QUALITY = 80
RECENT = 256  # events that are kept for pages that read slowly
STREAMS = 64  # of events; further ones get 503
STREAMS_PER_CLIENT = 16
LOOK_SECONDS = 0.1  # between two looks for new events
RETRY_SECONDS = 15  # until a page may have been closed
QUIET_SECONDS = 15.0  # after which a stream without events gets a comment
END_SECONDS = 5.0  # for the last replies to be sent
ASSETS = {**dict.fromkeys(("/", "/live.js", "/live.css"), "vtx.tools.watch"), "/page.css": PACKAGE}


class Page:
    """The content of the page: pictures of the `watched` sources, made when they are asked for, and events.

    Of events the last answer to each question, the last status, and the `RECENT` last ones are kept. `formats` are
    those of pictures.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        self.watched: Mapping[str, Watched] = {}
        self.closed = False
        self._formats = formats
        self._answers = dict[tuple[str, str], dict[str, Any]]()
        self._status = dict[str, Any]()
        self._recent = deque[dict[str, Any]](maxlen=RECENT)
        self._count = 0
        self._lock = threading.Lock()
        self._drawing = threading.Lock()
        self._pictures = dict[str, tuple[str, bytes]]()  # the last JPEG of each source, with its tag

    def tell(self, line: bytes) -> None:
        """Show an event, a line of JSON; from any thread."""
        event = json.loads(line)
        with self._lock:
            self._recent.append(event)
            self._count += 1
            if event["event"] == "answer":
                self._answers[event["source"], event["question"]] = event
            elif event["event"] == "status":
                self._status = event
            elif event["event"] == "config":
                self._answers = {key: last for key, last in self._answers.items() if key[0] in self.watched}

    def since(self, number: int | None) -> tuple[int, list[dict[str, Any]]]:
        """The number of events so far, and those after the first `number`.

        None, or one for which they are no longer kept: the sources and their questions, the last answers and status.
        """
        with self._lock:
            if number is not None and (new := self._count - number) <= len(self._recent):
                return self._count, list(self._recent)[len(self._recent) - new :]
            sources = [
                {
                    "name": name,
                    "kind": watched.config.kind,
                    "state": watched.source.state,
                    "questions": [{"name": question.name, "ask": question.ask} for question in watched.config.question],
                }
                for name, watched in list(self.watched.items())
            ]
            answers = [last for key, last in self._answers.items() if key[0] in self.watched]
            status = [self._status] if self._status else []
            return self._count, [{"event": "watched", "sources": sources, "answers": answers}, *status]

    def picture(self, name: str) -> tuple[str, bytes] | None:
        """The newest frame of a source as JPEG, after a tag that changes with the frame; None: it gave none yet.

        Raises Refusal: there is no such source; VtxError or OSError: the frame cannot be read.
        """
        watched = self.watched.get(name)
        if watched is None:
            raise Refusal(404, f"there is no source {name!r:.70}; there is {', '.join(self.watched)}")
        frame = watched.newest.last
        if frame is None:
            return None
        tag = f'"{frame.number}-{frame.at}"'
        with self._drawing:
            if (entry := self._pictures.get(name)) is not None and entry[0] == tag:
                return entry
            image = load_image(frame.read(), self._formats)
            file = io.BytesIO()
            if max(image.size) > SIDE:
                image = ImageOps.contain(image, (SIDE, SIDE))
            image.save(file, "jpeg", quality=QUALITY)
            picture = tag, file.getvalue()
            self._pictures = {n: entry for n, entry in self._pictures.items() if n in self.watched} | {name: picture}
        return picture


class _Events:
    """The events as a stream, as long as its reader stays."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._clients = Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, Limits())
        client = network_of((scope.get("client") or ("",))[0])
        if self._clients.total() >= STREAMS or self._clients[client] >= STREAMS_PER_CLIENT:
            refusal = Refusal(503, "too many pages are open; close one", retry_after=RETRY_SECONDS)
            await reply.json(refusal.status, refusal.body(), refusal.headers)
            return
        departure = asyncio.ensure_future(until_left(receive))
        number = None
        quiet = 0.0
        self._clients[client] += 1
        try:
            await reply.begin_events()
            while not departure.done() and not self._page.closed:
                number, events = self._page.since(number)
                await reply.events(events)
                quiet = 0.0 if events else quiet + LOOK_SECONDS
                if quiet >= QUIET_SECONDS:
                    await reply.comment("no event")
                    quiet = 0.0
                await asyncio.wait({departure}, timeout=LOOK_SECONDS)
            await reply.end_events("")
        except ClientLeft:
            pass
        finally:
            self._clients[client] -= 1
            departure.cancel()


def make_live_app(page: Page, keys: Collection[str] = (), *, local_hosts: bool = True) -> App:
    """The ASGI application of `page`. Without one of `keys`, if there are any, it gives neither pictures nor events.

    `local_hosts`: accept only requests that name this machine in their Host header.
    """

    async def picture(request: Request) -> Response:
        try:
            found = await run_in_threadpool(page.picture, request.path_params["name"])
        except (VtxError, OSError) as e:
            # Its message may name a file of this machine.
            damaged = Refusal(503, "the newest picture cannot be read; the status says why")
            refusal = e if isinstance(e, Refusal) else damaged
            return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
        if found is None:
            return Response(status_code=204, headers=SECURITY)
        tag, content = found
        headers = {**SECURITY, "content-type": "image/jpeg", "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    routes = [
        *page_routes(ASSETS),
        Route("/events", endpoint=_Events(page)),
        Route("/pictures/{name}", endpoint=picture),
    ]
    return Guard(Starlette(routes=routes), Keys.of(keys), local_hosts=local_hosts, unguarded=ASSETS)


@contextmanager
def serving(page: Page, at: socket.socket, keys: Collection[str], *, local_hosts: bool) -> Iterator[None]:
    """Serve the page at a socket that listens, in a thread of its own."""
    app = make_live_app(page, keys, local_hosts=local_hosts)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        http=BoundedProtocol,
        limit_concurrency=CONNECTIONS,
        proxy_headers=False,
        timeout_graceful_shutdown=int(END_SECONDS / 2),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]}, name="vtx-watch page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        page.closed = server.should_exit = True
        thread.join(END_SECONDS)
