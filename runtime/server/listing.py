"""The addresses that tell which bundles a server has, in OpenAI's and Ollama's form, and what a key has used."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError
from vtx.runtime.host.machine import version
from vtx.runtime.server import ollama
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.http import read_json_body
from vtx.runtime.server.keys import ANYBODY, SCOPE, Keys
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai.fields import WHERE, FieldReader


class Listing:
    """Addresses about a server, for its clients."""

    def __init__(self, engines: Engines, keys: Keys, limits: Limits) -> None:
        self._engines = engines
        self._keys = keys
        self._limits = limits
        self.routes = [
            Route("/v1/models", endpoint=self._models),
            Route("/v1/models/{name:path}", endpoint=self._model),
            Route("/v1/usage", endpoint=self._usage),
            Route("/api/tags", endpoint=self._tags),
            Route("/api/ps", endpoint=self._loaded),
            Route("/api/show", endpoint=self._show, methods=["POST"]),
            Route("/api/version", endpoint=self._version),
        ]

    def _described(self, name: str) -> dict[str, Any]:
        """The object of the bundle that this name means. Raises Refusal."""
        known = self._engines.named(name)
        return next(model for model in self._engines.describe() if model["id"] == known)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._engines.describe()})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._described(request.path_params["name"]))

    async def _usage(self, request: Request) -> Response:
        return JSONResponse(self._keys.usage(request.scope.get(SCOPE, ANYBODY)))

    async def _tags(self, _: Request) -> Response:
        return JSONResponse({"models": list(map(ollama.described, self._engines.describe()))})

    async def _loaded(self, _: Request) -> Response:
        names = {engine.name for engine in self._engines.loaded}
        loaded = [model for model in self._engines.describe() if model["id"] in names]
        return JSONResponse({"models": list(map(ollama.described, loaded))})

    async def _show(self, request: Request) -> Response:
        body = await read_json_body(request.scope, request.receive, self._limits)
        data = parse_json(body, "the body", error=RequestError)
        fields = FieldReader().read(ollama.Named, data, WHERE)
        return JSONResponse(ollama.shown(self._described(fields.model or fields.name)))

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": version("vtx-edge")})
