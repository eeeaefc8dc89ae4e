"""The application: its addresses, its access control, and the page."""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vtx.runtime.server.access import AccessLog
from vtx.runtime.server.endpoints import ENDPOINTS, Endpoints, error_body
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.http import App, Receive, Scope, Send, header
from vtx.runtime.server.keys import ANYBODY, SCOPE, Keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.listing import Listing
from vtx.runtime.server.metrics import CONTENT_TYPE, Metrics
from vtx.runtime.server.refusal import Refusal, refusal_of
from vtx.runtime.server.resuming import Resumable
from vtx.runtime.server.settings import AppSettings

PACKAGE = "vtx.runtime.server"
PAGE = dict.fromkeys(("/", "/page.css", "/page.js", "/charts.js", "/history.js"), PACKAGE)
SHEETS = set(PAGE) - {"/"}
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache",
}  # fmt: skip
OPEN = {"/livez", "/readyz", "/health", *PAGE}  # need no key: they contain nobody's data


def make_app(engines: Engines, limits: Limits, settings: AppSettings | None = None) -> App:
    """The ASGI application over `engines`, which it closes at its end."""
    settings = settings or AppSettings()
    metrics = Metrics()
    traffic = settings.traffic
    keys = Keys.of(settings.api_keys)
    endpoints = Endpoints(engines, limits, metrics, settings, keys)

    async def health(request: Request) -> Response:
        alive = request.url.path == "/livez"  # the others say whether it is ready for requests
        longest = max(engines.silences().values(), default=0.0)
        status = "ok"
        if not alive and (engines.closed or traffic.draining):
            status = "shutting down"
        elif longest >= limits.stall_seconds / (1 if alive else 2):
            status = "a thread that computes " + (
                "has ended" if longest == math.inf else f"gave no sign of life for {longest:.0f} s"
            )
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metered(request: Request) -> Response:
        keys.check_metrics(request.scope.get(SCOPE, ANYBODY))
        current = {**engines.figures(), **endpoints.figures(), **settings.figures()}
        return Response(metrics.text(current), media_type=CONTENT_TYPE)

    async def slots(request: Request) -> Response:
        keys.check_metrics(request.scope.get(SCOPE, ANYBODY))
        return JSONResponse(endpoints.slots())

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        watchdog = settings.watchdog
        with nullcontext() if watchdog is None else watchdog.running(asyncio.get_running_loop()):
            yield
            endpoints.close()
            engines.close()

    routes = [
        *(Route(path, endpoint=endpoints, methods=["POST"]) for path in ENDPOINTS),
        *Listing(engines, keys, limits).routes,
        *(Route(path, endpoint=health) for path in ("/livez", "/readyz", "/health")),
        Route("/metrics", endpoint=metered),
        Route("/slots", endpoint=slots),
        *page_routes(PAGE),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={404: _refuse, 405: _refuse, 500: _refuse, Refusal: _refuse},
    )
    guarded = Guard(Resumable(app, limits), keys, local_hosts=settings.local_hosts)
    logged = Versioned(AccessLog(guarded, settings.access, as_json=settings.access_json), app.routes)
    if not settings.origins:
        return logged
    return CORSMiddleware(
        logged, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
    )


def page_routes(packages: Mapping[str, str]) -> list[Route]:
    """Routes to the files of a page: each path, of a file in the folder `page` of the package, "/" of index.html.

    index.html follows head.html, which pages share.
    """
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

    def route(path: str, package: str) -> Route:
        name = path[1:] or "index.html"
        content = files(package).joinpath("page", name).read_bytes()
        if path == "/":
            content = files(PACKAGE).joinpath("page", "head.html").read_bytes() + content
        headers = {**SECURITY, "content-type": f"{kinds[name.rpartition('.')[2]]}; charset=utf-8"}

        async def file(_: Request) -> Response:
            return Response(content, headers=headers)

        return Route(path, endpoint=file)

    return [route(path, package) for path, package in packages.items()]


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        refusal = refusal_of(error)
        return JSONResponse(error_body(request.url.path, refusal), refusal.status)
    paths = [(route.path, "POST" in route.methods) for route in request.app.routes]
    known = ", ".join(f"{'POST' if posted else 'GET'} {path}" for path, posted in paths if path not in SHEETS)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path:.80} is not served; there is {known}")
    return JSONResponse(error_body(request.url.path, refusal), refusal.status, headers=error.headers)


class Versioned:
    """An application that answers at its addresses under /v1 without their /v1, too."""

    def __init__(self, app: App, routes: Sequence[Any]) -> None:
        self._app = app
        self._names = {route.path.split("/")[2] for route in routes if route.path.startswith("/v1/")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].split("/")[1:2] and scope["path"].split("/")[1] in self._names:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await self._app(scope, receive, send)


class Guard:
    """Refuses requests that do not name this machine, if `local_hosts`, or that have none of the `keys`, if any.

    The others get the key's tenant into their scope. Paths in `unguarded` need no key.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        *,
        local_hosts: bool,
        unguarded: Collection[str] = OPEN,
    ) -> None:
        self._app = app
        self._keys = keys
        self._local_hosts = local_hosts
        self._unguarded = frozenset(unguarded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http":
            key = api_key(scope)
            tenant = None if key is None else self._keys.tenant(key)
            if self._local_hosts and not is_local(header(scope, b"host")):
                refusal = Refusal(
                    421, "the Host header names another machine; ask for localhost, or choose another --host"
                )
            elif tenant is not None:
                scope[SCOPE] = tenant
            elif self._keys and scope["path"] not in self._unguarded:
                refusal = Refusal(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as X-Api-Key: KEY",
                    code="invalid_api_key",
                )
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            reply: Any = JSONResponse(error_body(scope["path"], refusal), refusal.status, headers=refusal.headers)
            await reply(scope, receive, send)


def api_key(scope: Scope) -> bytes | None:
    """The key that a request has, as a bearer's or, as Anthropic's clients send it, by itself."""
    scheme, _, credentials = header(scope, b"authorization").partition(" ")
    if scheme.lower() != "bearer":
        credentials = header(scope, b"x-api-key")
    return credentials.strip().encode("latin-1") or None


def is_local(host: str) -> bool:
    """True if a Host header, or an address to listen at, means this machine alone."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("localhost", ""):
        return bool(name)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
