"""The application: its addresses, who may ask, and the page."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vtx.runtime.server.chat import ChatCompletions
from vtx.runtime.server.compute.engines import Engines
from vtx.runtime.server.http import Receive, Scope, Send, header
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.metrics import CONTENT_TYPE, Metrics
from vtx.runtime.server.refusal import Refusal, refusal_of
from vtx.runtime.server.watchdog import Watchdog

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
OPEN = {"/livez", "/readyz", "/health", *PAGE}  # without a key: they tell nothing of anybody


def make_app(
    engines: Engines,
    limits: Limits,
    *,
    api_key: str | None = None,
    local_hosts: bool = True,
    image_hosts: Collection[str] = (),
    watchdog: Watchdog | None = None,
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application over `engines`, which it closes at its end.

    `local_hosts`: take only requests that name this machine in their Host header, as those of a browser do that was
    not led here from a page of somebody else. `image_hosts`: images may be given by their address there.
    `watchdog` runs as long as the application.
    """
    metrics = Metrics()
    chat = ChatCompletions(engines, limits, metrics, frozenset(image_hosts))

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": engines.describe()})

    def health(most: float, *, ready: bool) -> Response:
        longest = max(engines.silences().values(), default=0.0)
        status = "ok"
        if ready and engines.closed:
            status = "shutting down"
        elif longest >= most:
            status = "a thread that computes " + (
                "has ended" if longest == math.inf else f"gave no sign of life for {longest:.0f} s"
            )
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def live(_: Request) -> Response:
        return health(limits.stall_seconds, ready=False)

    async def ready(_: Request) -> Response:
        return health(limits.stall_seconds / 2, ready=True)

    async def figures(_: Request) -> Response:
        gauges = {**engines.gauges(), **{f"{name}_total": value for name, value in engines.counters().items()}}
        return Response(metrics.text(gauges), media_type=CONTENT_TYPE)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        with nullcontext() if watchdog is None else watchdog.running(asyncio.get_running_loop()):
            yield
            chat.close()
            engines.close()

    routes = [
        Route("/v1/chat/completions", endpoint=chat, methods=["POST"]),
        Route("/v1/models", endpoint=models),
        Route("/livez", endpoint=live),
        Route("/readyz", endpoint=ready),
        Route("/health", endpoint=ready),
        Route("/metrics", endpoint=figures),
        *(Route(path, endpoint=_page(*page)) for path, page in PAGE.items()),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _missing, 405: _missing, 500: _failed})
    return Guard(app, api_key, local_hosts=local_hosts)


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("vtx.runtime.server").joinpath("page", name).read_bytes()

    async def page(_: Request) -> Response:
        return Response(content, headers={**SECURITY, "content-type": kind})

    return page


async def _missing(request: Request, error: Any) -> Response:
    known = "POST /v1/chat/completions, GET /v1/models, /livez, /readyz, /health, /metrics and /"
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path:.80} is not served; there is {known}")
    return JSONResponse(refusal.body(), refusal.status, headers=getattr(error, "headers", None))


async def _failed(_: Request, error: Exception) -> Response:
    refusal = refusal_of(error)
    return JSONResponse(refusal.body(), refusal.status)


class Guard:
    """Lets requests pass that name this machine and carry the key, where these are asked for."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_key: str | None, *, local_hosts: bool
    ) -> None:
        self._app, self._key, self._local_hosts = app, None if api_key is None else api_key.encode(), local_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            reply: Any = JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
            await reply(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        if self._local_hosts and not is_local(header(scope, b"host")):
            return Refusal(
                421, "the Host header names another machine; ask for localhost, or start vtx-serve with --host"
            )
        if self._key is None or scope["path"] in OPEN:
            return None
        scheme, _, given = header(scope, b"authorization").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            return None
        return Refusal(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
        )


def is_local(host: str) -> bool:
    """Whether a Host header, or an address to listen at, means this machine alone."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("localhost", ""):
        return bool(name)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
