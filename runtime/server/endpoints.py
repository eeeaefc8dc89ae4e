"""The addresses that compute: from a request to its answer, whole or token by token."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.scheduler.choosing import Chosen
from vtx.runtime.scheduler.engine import AnswerRequest, Engine
from vtx.runtime.scheduler.scheduler import ClosedError, Done, Event, Piece
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.http import ClientLeft, Receive, Reply, Scope, Send, header, read_json_body, until_left
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.metrics import Metrics
from vtx.runtime.server.openai import completions, embeddings, responses
from vtx.runtime.server.openai.chat import ChatObjects
from vtx.runtime.server.openai.objects import Objects
from vtx.runtime.server.openai.request import ChatRequest, Translate, read_request
from vtx.runtime.server.refusal import Refusal, no_memory, refusal_of, shutting_down
from vtx.runtime.server.remote import RemoteImage, fetch
from vtx.runtime.server.tracing import Answered, Tracing
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.vision.image import ImageSource, image_size
from vtx.runtime.vision.video import Video

log = logging.getLogger(__name__)
T = TypeVar("T")
CHAT, TOKENIZE, EMBEDDINGS = "/v1/chat/completions", "/tokenize", "/v1/embeddings"
CLIENT_LEFT = 499  # in the metrics only
RETRY_SECONDS = 2
READERS = 2  # threads that parse requests and decode images
VIDEO_READERS = 1  # threads that decode videos, which takes longer
LATE_SECONDS = 1.0  # after its deadline, for an answer that ends there to arrive
FETCHERS = 8  # threads that fetch images


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address: its fields as those of a chat completion, with other `names` in errors, and its objects."""

    translate: Translate | None
    objects: type[Objects] = ChatObjects
    names: Mapping[str, str] = field(default_factory=dict)


ENDPOINTS = {
    CHAT: Endpoint(None),
    "/v1/completions": Endpoint(completions.chat_fields, completions.CompletionObjects, {"messages": "prompt"}),
    "/v1/responses": Endpoint(responses.chat_fields, responses.ResponseObjects, responses.NAMES),
    EMBEDDINGS: Endpoint(embeddings.chat_fields, names=embeddings.NAMES),
    TOKENIZE: Endpoint(None),  # vLLM's address: a chat completion of which only the prompt's tokens are given
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose images are read and whose prompt `ids` are known to fit, before anything is computed."""

    chat: ChatRequest
    images: tuple[PreparedImage, ...]
    ids: NDArray[np.int64]


@dataclass(slots=True)
class Traffic:
    """`inside`: requests that are read, computed or wait. While `draining` no more are let in."""

    inside: int = 0
    draining: bool = False


class Endpoints:
    """An ASGI application for `ENDPOINTS`. Images are fetched from `hosts` only. `close` ends its threads."""

    def __init__(
        self, engines: Engines, limits: Limits, metrics: Metrics, hosts: Collection[str] = (),
        *, lenient: bool = False, traffic: Traffic | None = None, tracing: Tracing | None = None,
    ) -> None:  # fmt: skip
        self._lenient, self._traffic, self._tracing = lenient, traffic or Traffic(), tracing
        self._engines, self._limits, self._metrics, self._hosts = engines, limits, metrics, hosts
        self._readers: Executor = ThreadPoolExecutor(READERS, "vtx-serve-read")
        self._video_readers: Executor = ThreadPoolExecutor(VIDEO_READERS, "vtx-serve-video")
        self._loader: Executor = ThreadPoolExecutor(1, "vtx-serve-load")
        self._fetchers: Executor = ThreadPoolExecutor(FETCHERS, "vtx-serve-fetch")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. An error ends this one only."""
        reply, endpoint = Reply(send, self._limits), ENDPOINTS[scope["path"]]
        started, answered = time.monotonic(), None
        try:
            answered = await self._answer(scope, receive, reply, endpoint)
        except ClientLeft:
            self._metrics.cancelled()
            reply.status = CLIENT_LEFT
        except Exception as e:
            refusal = refusal_of(e)
            if refusal.code != "unknown_parameter":
                refusal.param = endpoint.names.get(refusal.param or "", refusal.param)
            if refusal.status >= 500 and not isinstance(e, Refusal | ClosedError):
                log.exception("a request failed")
            with suppress(ClientLeft):
                if not reply.status:
                    await reply.json(refusal.status, refusal.body(), refusal.headers)
                else:  # its stream has begun
                    await reply.event(refusal.body())
                    await reply.end_events(endpoint.objects.last)
                    reply.status = refusal.status
        finally:
            status = reply.status or CLIENT_LEFT
            self._metrics.request(status)
            if self._tracing is not None:
                parent = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
                self._tracing.request(scope["path"], status, started, parent, answered)

    def close(self) -> None:
        """End the threads that read and load, and send what is left of the spans."""
        if self._tracing is not None:
            self._tracing.close()
        for threads in (self._readers, self._video_readers, self._loader, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(
        self, scope: Scope, receive: Receive, reply: Reply, endpoint: Endpoint
    ) -> Answered | None:  # fmt: skip
        """Answer a request; None at an address that gives no answer of the model."""
        most, seconds, started = self._limits.parallel + self._limits.queue, self._limits.seconds, time.monotonic()
        if self._traffic.draining:
            raise shutting_down()
        if self._traffic.inside >= most:
            raise Refusal(
                429, f"{most} requests are computed or wait, the limit; try again in {RETRY_SECONDS} s",
                code="queue_full", kind="rate_limit_error", retry_after=RETRY_SECONDS,
            )  # fmt: skip
        self._traffic.inside += 1
        try:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + seconds
            body = await read_json_body(scope, receive, self._limits)
            read = partial(
                read_request, body, self._limits, self._hosts, lenient=self._lenient, translate=endpoint.translate
            )
            chat = await loop.run_in_executor(self._readers, read)
            del read
            del body
            if chat.deadline is not None:
                seconds = min(seconds, chat.deadline)
                deadline = min(deadline, loop.time() - (time.monotonic() - started) + seconds)
            if any(isinstance(image, RemoteImage) for image in chat.images):
                chat = await loop.run_in_executor(self._fetchers, fetch_images, chat, self._limits)
            self._engines.check(chat.model)
            engine = self._engines.acquire_loaded(chat.model)
            if engine is None:
                engine = await asyncio.shield(loop.run_in_executor(self._loader, self._engines.acquire, chat.model))
            with self._engines.use(engine):
                videos = any(isinstance(image, Video) for image in chat.images)
                readers, stopping = self._video_readers if videos else self._readers, threading.Event()
                if scope["path"] == EMBEDDINGS:
                    vectors = loop.run_in_executor(readers, embed, engine, chat, self._limits, stopping.is_set)
                    found = await _while_wanted(vectors, receive, stopping, deadline, seconds)
                    await reply.json(200, found)
                    return None
                reading = loop.run_in_executor(readers, prepare, engine, chat, self._limits, stopping.is_set)
                prepared = await _while_wanted(reading, receive, stopping, deadline, seconds)
                if scope["path"] == TOKENIZE:
                    ids, most = prepared.ids.tolist(), engine.model.manifest.max_context
                    await reply.json(200, {"count": len(ids), "max_model_len": most, "tokens": ids})
                    return None
                chat = prepared.chat  # without the images' text, which may be large
                begun = dict[int, float]()  # when each answer began, by the monotonic clock
                firsts = list[float]()  # and when the first token came
                notes = {**chat.notes}
                objects = endpoint.objects(replace(chat, notes=notes), engine.model)
                events = _events(engine, prepared, receive, deadline, seconds, begun, firsts, notes)
                async with aclosing(events):
                    answers = await _send_answer(reply, events, objects, self._limits.comment_seconds)
        finally:
            self._traffic.inside -= 1
        seconds_of = {
            "queue": min(begun.values()) - started, "first_token": firsts[0] - started,
            "answer": time.monotonic() - started,
        }  # fmt: skip
        for answer in answers:
            stats, times = answer.stats, answer.stats.timings_ms
            kept = stats.vision_tokens_kept
            totals = {
                "prompt_tokens": stats.prompt_tokens, "completion_tokens": len(answer.token_ids),
                "reused_tokens": stats.reused_tokens, "withdrawn_tokens": stats.vision_tokens - kept[-1] if kept else 0,
            }  # fmt: skip
            token = times["decode_per_token"] / 1000 if len(answer.token_ids) > 1 else None
            reduce = "+".join(part.partition(":")[0] for part in stats.reduce.split("+"))
            asked_k = "auto" if stats.gate is not None else str(stats.k or "none")
            self._metrics.answer((chat.model, asked_k, reduce), totals, seconds_of, token)
        times_begun = [begun[number] for number in range(len(answers))]
        return Answered(chat.model, answers, times_begun, chat.deadline, chat.options.priority)


def fetch_images(chat: ChatRequest, limits: Limits) -> ChatRequest:
    """The request with its remote images fetched. Raises Refusal."""
    images = tuple(
        fetch(image, limits.body, limits.fetch_seconds) if isinstance(image, RemoteImage) else image
        for image in chat.images
    )
    return replace(chat, images=images)


async def _while_wanted(
    reading: asyncio.Future[T], receive: Receive, stopping: threading.Event, deadline: float, seconds: float
) -> T:
    """The result of `reading`. Once nobody waits for it any more, `stopping` is set, and it ends.

    Raises ClientLeft if the client has gone; Refusal if it took too long (408).
    """
    leaving = asyncio.ensure_future(until_left(receive))
    try:
        wait = deadline - asyncio.get_running_loop().time()
        either: set[asyncio.Future[Any]] = {reading, leaving}
        await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        stopping.set()
        await asyncio.wait({reading})  # the model is used until then
        reading.exception()  # retrieved, so that asyncio does not log it
        raise ClientLeft if leaving.done() else _too_slow(seconds)
    finally:
        stopping.set()
        leaving.cancel()


def prepare(engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool]) -> Prepared:
    """Read the images and videos and check the request, before anything is computed."""
    loaded = engine.model.loaded
    policy = loaded.policy(chat.k, chat.options, chat.reduce)
    if chat.options.guide is not None:
        try:
            loaded.guided(chat.options.guide)
        except (DeviceError, RequestError) as e:
            if not (chat.lenient and chat.form == "tools"):
                raise Refusal(400, str(e), code="unsupported_value", param=chat.form) from e
            notes = {**chat.notes, "ignored": [*chat.notes.get("ignored", ()), "tools"]}
            chat = replace(chat, messages=chat.messages[1:], options=replace(chat.options, guide=None), notes=notes)
    images = read_images(engine, chat, limits, stopped)
    loaded.check_system(chat.messages)
    ids = loaded.prompt_ids(chat.messages, images)
    room = loaded.manifest.max_context - len(ids)
    if not policy.entries and 0 < room < chat.options.max_new_tokens:
        chat = replace(chat, notes={**chat.notes, "max_tokens": room})  # where the context ends the answer
    return Prepared(replace(chat, images=()), images, ids)


def read_images(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool]
) -> tuple[PreparedImage, ...]:
    """Read the images and videos of a request. Raises Refusal, ImageError."""
    loaded = engine.model.loaded
    sources = [image for image in chat.images if not isinstance(image, RemoteImage)]  # these have been fetched

    def check(image: ImageSource) -> None:  # for videos the limits of `limits.py` in runtime/vision hold
        width, height = image_size(image, loaded.image_formats)
        if width * height > limits.pixels:
            raise Refusal(
                413, f"an image has {width}x{height} pixels, the limit of this server is {limits.pixels:,} in total; "
                "send it smaller", code="image_too_large", param="messages",
            )  # fmt: skip

    return loaded.prepare_all(sources, messages=chat.messages, stopped=stopped, check=check)


def embed(engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool]) -> dict[str, Any]:
    """The reply with the embeddings of a request's images."""

    def check() -> None:
        if stopped():
            raise ClientLeft

    images = read_images(engine, chat, limits, stopped)
    return embeddings.embeddings(engine.model.loaded, chat, images, check)


async def _events(
    engine: Engine,
    prepared: Prepared,
    receive: Receive,
    deadline: float,
    seconds: float,
    begun: dict[int, float],
    firsts: list[float],
    notes: dict[str, Any],
) -> AsyncGenerator[tuple[int, Piece | Done]]:
    """The events of a request, each with the number of its answer, to its end; left early, it is cancelled.

    At its deadline an answer ends as it is.

    Raises ClientLeft if the client has gone; Refusal if it had no token in time (408) or no memory (503), or could not
    be answered.
    `begun` gets the times at which its answers began, `firsts` that of the first token, `notes` how K and reductions
    were chosen.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

    def emit(number: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))

    ends_at, left = time.monotonic() + deadline - loop.time(), prepared.chat.n
    chat = prepared.chat

    def choosing(chosen: Chosen) -> None:
        figures = {"figure": chosen.method.figure, "best_figure": chosen.best}
        notes["adapted"] = {"method": chosen.method.name, **figures, "why": chosen.why}

    jobs = [
        engine.job(
            AnswerRequest(prepared.images, chat.messages, prepared.ids, chat.settings(number), chat.reuse, chat.adapts),
            partial(emit, number), ends_at=ends_at, urgent=chat.deadline is not None,
            limit=seconds, choosing=choosing,
        )
        for number in range(left)
    ]  # fmt: skip
    came = False  # a token of any of them
    leaving = asyncio.ensure_future(until_left(receive))
    getting = asyncio.ensure_future(queue.get())
    try:
        for job in jobs:
            engine.scheduler.submit(job)
        while True:
            wait = deadline + LATE_SECONDS - loop.time()  # by itself the answer ends at its deadline
            await asyncio.wait({getting, leaving}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                raise ClientLeft
            if not getting.done():
                if jobs[0].lacks_memory:
                    raise no_memory(f"there was no memory for its K and V within {seconds:g} s; ask again later")
                raise _too_slow(seconds)
            number, event = getting.result()
            if isinstance(event, Exception):
                raise event
            came = came or isinstance(event, Piece) or bool(event.answer.token_ids)
            begun.setdefault(number, jobs[number].begun)
            if not firsts:
                firsts.append(time.monotonic())
            if isinstance(event, Done) and event.answer.stopped == "cancelled":  # not by its client
                raise shutting_down()
            if isinstance(event, Done) and event.answer.stopped == "timeout" and not came:
                raise _too_slow(seconds)
            yield number, event
            left -= isinstance(event, Done)
            if not left:
                return
            getting = asyncio.ensure_future(queue.get())
    finally:
        for job in jobs:
            job.cancel()
        leaving.cancel()
        getting.cancel()


def _too_slow(seconds: float) -> Refusal:
    return Refusal(408, f"there was no answer after {seconds:g} s, the limit; ask again later", final=True)


async def _send_answer(
    reply: Reply, events: AsyncIterator[tuple[int, Piece | Done]], objects: Objects, pause: float
) -> list[Answer]:
    """Send the answers whole, or as server-sent events from the first token on; an error before has its own status.

    A stream without an event for `pause` seconds gets a comment, which keeps its connection open.
    """
    answers, begun, stream = dict[int, Answer](), set[int](), objects.request.stream
    getting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({getting}, timeout=pause if stream else None)
            if not getting.done():
                if not reply.status:
                    await reply.begin_events()
                await reply.comment("computing")
                continue
            if (found := getting.result()) is None:
                break
            index, event = found
            getting = asyncio.ensure_future(anext(events, None))
            if isinstance(event, Done):
                answers[index] = event.answer
            if not stream:
                continue
            if not reply.status:
                await reply.begin_events()
            if index not in begun:
                begun.add(index)
                await reply.events(objects.begin(index))
            if isinstance(event, Done):
                await reply.events(objects.done(index, event.answer))
            else:
                await reply.events(objects.piece(index, event))
    finally:
        getting.cancel()
        await asyncio.wait({getting})
    given = [answers[index] for index in sorted(answers)]
    if not stream:
        await reply.json(200, objects.whole(given))
        return given
    await reply.events(objects.end(given))
    await reply.end_events(objects.last)
    return given
