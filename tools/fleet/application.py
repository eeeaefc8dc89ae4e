"""vtx-serve's addresses on Ray Serve: `serve run vtx.tools.fleet.application:app bundle=DIR replicas=2`.

A gateway reads each request and gives it to the replica that has its picture; each replica is the application of
vtx-serve. Ray Serve starts and ends replicas by the requests that wait, and replaces one that is ill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.server.app import api_key, make_app
from vtx.runtime.server.endpoints import error_body
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.http import ClientLeft, read_json_body
from vtx.runtime.server.refusal import Refusal, refusal_of
from vtx.runtime.server.settings import AppSettings
from vtx.tools.common.cluster import Cluster
from vtx.tools.common.loading import Loading
from vtx.tools.fleet.arguments import Fleet
from vtx.tools.fleet.gathering import OWN, gathered
from vtx.tools.fleet.routing import order, request_key

log = logging.getLogger(__name__)
PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
RETRY = 1  # seconds after which another replica answers
GATHER_SECONDS = 10.0  # for all replicas to tell their figures
AHEAD = 16  # parts of a reply that wait for a client to read


class PictureRouter(RequestRouter):  # type: ignore[misc]
    """Offers a request to replicas in the order of `routing`, by its argument `key`."""

    def initialize_state(self, least: int) -> None:
        """`least`: requests that a replica gets of its own pictures, however few the others have."""
        self._least = least

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = self.replica_queue_len_cache
        loads = {name: queues.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        key = "" if pending_request is None else pending_request.kwargs.get("key", "")
        return [[replicas[name]] for name in order(key, loads, least=self._least)]


class Replica:
    """The application of vtx-serve with its own models. Raises BundleError if a machine has another bundle."""

    def __init__(self, fleet: Fleet, digests: Mapping[str, str]) -> None:
        for name, path in fleet.bundles.items():
            if sha256(path / "vtx.json") != digests[name]:
                raise BundleError(f"{path} is another bundle on this machine; give every machine the same one")
        loading = Loading(fleet.device, threads=max(1, int(fleet.cores)))
        memory = int(fleet.memory * 1e9) or None
        self._limits = fleet.limits
        self._engines = Engines(fleet.bundles, loading.load, self._limits, memory)
        with self._engines.use(self._engines.acquire(self._engines.names[0])):
            pass
        self._app = make_app(self._engines, self._limits, AppSettings(fleet.keys(), local_hosts=False))

    def check_health(self) -> None:
        """Raise DeviceError, after which Ray Serve replaces this replica, if a model's thread is silent."""
        silence = max(self._engines.silences().values(), default=0.0)
        if silence >= self._limits.stall_seconds:
            raise DeviceError(f"a thread that computes gave no sign of life for {silence:.0f} s")

    async def forward(self, scope: dict[str, Any], body: bytes, key: str) -> AsyncGenerator[MutableMapping[str, Any]]:
        """The parts of the reply to a request, as ASGI has them. Left early, the request is cancelled."""
        parts = asyncio.Queue[MutableMapping[str, Any] | None](AHEAD)
        arrived = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            if arrived.is_set():
                await asyncio.Future()
            arrived.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def answer() -> None:
            try:
                await self._app(scope, receive, parts.put)
            finally:
                await parts.put(None)

        answering = asyncio.ensure_future(answer())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await answering
        finally:
            answering.cancel()
            while not parts.empty():  # room for its end
                parts.get_nowait()

    async def whole(self, scope: dict[str, Any]) -> tuple[int, str, bytes]:
        """The status, the type and the body of the reply to a request without a body."""
        begin, *parts = [part async for part in self.forward(scope, b"", "")]
        return begin["status"], dict(begin["headers"])[b"content-type"].decode(), b"".join(p["body"] for p in parts)

    def __del__(self) -> None:
        if hasattr(self, "_engines"):
            self._engines.close()


class Gateway:
    """Reads requests and passes them to the replica that the router chooses."""

    def __init__(self, replicas: Any, fleet: Fleet) -> None:
        self._replicas = replicas.options(method_name="forward", stream=True)
        self._limits = fleet.limits
        self._keys = fleet.keys()

    async def __call__(self, request: Request) -> Response:
        """The reply of a replica, or a refusal."""
        scope = {name: request.scope[name] for name in PASSED if name in request.scope}
        if request.url.path in OWN:
            return await self._gather(request, scope)
        body = b""
        try:
            if request.method == "POST" and self._knows(request):
                body = bytes(await read_json_body(request.scope, request.receive, self._limits))
        except (Refusal, ClientLeft) as e:
            return _refused(request, refusal_of(e))
        key = await asyncio.to_thread(request_key, body) if body else ""
        parts = aiter(self._replicas.remote(scope, body, key=key))
        try:
            begin = await anext(parts)
        except BackPressureError:
            return _refused(request, _later(429, "all replicas are at work and too many requests wait", "queue_full"))
        except RayError:
            log.exception("a replica failed")
            return _refused(request, _later(503, "the replica of this request has ended", "replica_ended"))
        reply = StreamingResponse(_content(parts), begin["status"])
        reply.raw_headers = list(begin["headers"])
        return reply

    def _knows(self, request: Request) -> bool:
        """True if the request has a key where one is needed; the body of others is not read before they are refused."""
        return not self._keys or self._keys.tenant(api_key(request.scope) or b"") is not None

    async def _gather(self, request: Request, scope: dict[str, Any]) -> Response:
        """The figures of all replicas as one reply, or the first refusal."""
        try:
            replies = await self._replicas.broadcast("whole", scope).results_async(timeout_s=GATHER_SECONDS)
        except (RayError, TimeoutError):
            log.exception("a replica failed")
            return _refused(request, _later(503, "a replica does not tell its figures", "replica_ended"))
        status, kind, body = next((reply for reply in replies if reply[0] != 200), replies[0])
        if status == 200:
            body = gathered(request.url.path, [reply[2] for reply in replies])
        return Response(body, status, media_type=kind)


def _refused(request: Request, refusal: Refusal) -> Response:
    return JSONResponse(error_body(request.url.path, refusal), refusal.status, headers=refusal.headers)


def _later(status: int, message: str, code: str) -> Refusal:
    return Refusal(status, f"{message}; try again in {RETRY} s", code=code, retry_after=RETRY)


async def _content(parts: Any) -> AsyncGenerator[bytes]:
    async for part in parts:
        yield part.get("body", b"")


def app(arguments: dict[str, Any]) -> Any:
    """The application that `serve run` deploys, by its arguments, which `Fleet` describes. Raises VtxError."""
    fleet = Fleet.read(arguments)
    limits = fleet.limits
    most = fleet.max_replicas or fleet.replicas
    digests = {name: sha256(path / "vtx.json") for name, path in fleet.bundles.items()}
    gpus = Cluster("auto", None if fleet.gpus < 0 else fleet.gpus).gpus_of(fleet.device)
    scaling = AutoscalingConfig(
        min_replicas=fleet.replicas,
        max_replicas=most,
        initial_replicas=fleet.replicas,
        target_ongoing_requests=fleet.parallel,
        upscale_delay_s=fleet.up_seconds,
        downscale_delay_s=fleet.down_seconds,
    )
    replica = serve.deployment(
        name="replica",
        autoscaling_config=scaling,
        max_ongoing_requests=fleet.parallel + fleet.queue,
        max_queued_requests=fleet.queue,
        ray_actor_options={"num_cpus": fleet.cores, "num_gpus": gpus},
        graceful_shutdown_timeout_s=limits.grace_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=PictureRouter, request_router_kwargs={"least": fleet.parallel}
        ),
    )
    gateway = serve.deployment(
        name="gateway",
        max_ongoing_requests=(most + 1) * (fleet.parallel + fleet.queue),
        ray_actor_options={"num_cpus": 0},
    )
    bound = replica(Replica).bind(fleet, digests)
    return gateway(Gateway).bind(bound, fleet)
