"""The addresses that compute: from a request to its answer, whole or token by token."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.prompt.messages import thinking_of, with_tools
from vtx.runtime.scheduler.choosing import Chosen
from vtx.runtime.scheduler.engine import AnswerRequest, Engine
from vtx.runtime.scheduler.scheduler import ClosedError, Done, Event, Job, Piece, Terms
from vtx.runtime.server import anthropic, ollama
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.http import ClientLeft, Receive, Reply, Scope, Send, header
from vtx.runtime.server.keys import ANYBODY, SCOPE, Keys, Tenant, check_priority
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.metrics import Metrics
from vtx.runtime.server.openai import completions, embeddings, responses
from vtx.runtime.server.openai.chat import ChatObjects
from vtx.runtime.server.openai.objects import Objects
from vtx.runtime.server.openai.request import ChatRequest, Translate, naming, read_request
from vtx.runtime.server.places import Place, Places
from vtx.runtime.server.refusal import Refusal, no_memory, refusal_of, shutting_down
from vtx.runtime.server.remote import RemoteImage, fetch
from vtx.runtime.server.sent import NamedImage, SentImages
from vtx.runtime.server.settings import AppSettings
from vtx.runtime.server.tracing import Answered
from vtx.runtime.server.uploads import Upload, Uploads, network_of
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.vision.image import ImageSource, image_size
from vtx.runtime.vision.video import Video

log = logging.getLogger(__name__)
T = TypeVar("T")
CHAT = "/v1/chat/completions"
CLIENT_LEFT = 499  # in the metrics only
READERS = 2  # threads that parse requests and decode images
VIDEO_READERS = 1  # threads that decode videos, which takes longer
LATE_SECONDS = 1.0  # after its deadline, for an answer that ends there to arrive
FETCHERS = 8  # threads that fetch images


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address: its fields as those of a chat completion, with other `names` in errors, and its objects.

    `refused`: the object of an error. `lines`: a stream is of lines of JSON. `reply`: the whole reply where the decoder
    does not run, by an engine and a request, within the server's limits; it is called with the function that tells
    whether it should stop, and with the tenant whose caches it uses.
    """

    translate: Translate | None
    objects: type[Objects] = ChatObjects
    names: Mapping[str, str] = field(default_factory=dict)
    refused: Callable[[Refusal], dict[str, Any]] = Refusal.body
    lines: bool = False
    reply: Callable[[Engine, ChatRequest, Limits, Callable[[], bool], str], dict[str, Any]] | None = None


def tokenized(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool], tenant: str
) -> dict[str, Any]:
    """The reply of /tokenize."""
    [ids] = prepare(engine, chat, limits, stopped, tenant).ids
    return {"count": len(ids), "max_model_len": engine.model.manifest.max_context, "tokens": ids.tolist()}


def counted(
    facts: Mapping[str, str],
    engine: Engine,
    chat: ChatRequest,
    limits: Limits,
    stopped: Callable[[], bool],
    tenant: str,
) -> dict[str, Any]:
    """These facts and the number of a prompt's tokens."""
    [ids] = prepare(engine, chat, limits, stopped, tenant).ids
    return {**facts, "input_tokens": len(ids)}


INPUT_TOKENS = partial(counted, {"object": "response.input_tokens"})  # OpenAI's and llama-server's


def detokenized(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool], tenant: str
) -> dict[str, Any]:
    """The reply of /detokenize: the text as vLLM names it, and as llama-server does."""
    text = engine.model.loaded.text.raw(chat.messages[0]["ids"])
    return {"prompt": text, "content": text}


def embedded(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool], tenant: str
) -> dict[str, Any]:
    """The reply with the embeddings of a request's images."""

    def check() -> None:
        if stopped():
            raise ClientLeft

    images = read_images(engine, chat, limits, stopped)
    return embeddings.embeddings(engine.model.loaded, chat, images, check)


ENDPOINTS = {
    CHAT: Endpoint(None),
    f"{CHAT}/input_tokens": Endpoint(None, reply=INPUT_TOKENS),
    "/v1/completions": Endpoint(completions.chat_fields, completions.CompletionObjects, {"messages": "prompt"}),
    "/v1/responses": Endpoint(responses.chat_fields, responses.ResponseObjects, responses.NAMES),
    "/v1/responses/input_tokens": Endpoint(responses.chat_fields, names=responses.NAMES, reply=INPUT_TOKENS),
    "/v1/embeddings": Endpoint(embeddings.chat_fields, names=embeddings.NAMES, reply=embedded),
    "/tokenize": Endpoint(completions.tokenized_fields, names={"messages": "prompt"}, reply=tokenized),  # vLLM's
    "/detokenize": Endpoint(completions.token_fields, names={"messages": "tokens"}, reply=detokenized),
    "/v1/messages": Endpoint(
        anthropic.chat_fields,
        anthropic.MessageObjects,
        anthropic.NAMES | anthropic.SWITCH,
        refused=anthropic.refused,
    ),
    "/v1/messages/count_tokens": Endpoint(
        anthropic.chat_fields, names=anthropic.NAMES, refused=anthropic.refused, reply=partial(counted, {})
    ),
    "/api/chat": Endpoint(ollama.chat_fields, ollama.OllamaObjects, ollama.NAMES, refused=ollama.refused, lines=True),
    "/api/generate": Endpoint(
        ollama.generate_fields, ollama.GenerateObjects, ollama.NAMES, refused=ollama.refused, lines=True
    ),
}


def error_body(path: str, refusal: Refusal) -> dict[str, Any]:
    """The object of an error at an address, as its clients parse it."""
    endpoint = ENDPOINTS.get(path)
    return refusal.body() if endpoint is None else endpoint.refused(refusal)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose images are read and whose `ids`, of each prompt, are known, before anything is computed."""

    chat: ChatRequest
    images: tuple[PreparedImage, ...]
    ids: tuple[NDArray[np.int64], ...]


@dataclass(eq=False, slots=True)
class _Admitted:
    """A request of a `tenant` that has its `place`; its answer must end `seconds` after it `started`.

    `chat` is with its images' text, which may be large, until they are read.
    """

    path: str
    tenant: Tenant
    chat: ChatRequest
    started: float
    seconds: float
    upload: Upload
    place: Place

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.started + self.seconds - time.monotonic()

    @property
    def state(self) -> str:
        """The step it is at: its images are read, it waits for its turn, its prompt is computed, or its answer."""
        if not self.place.jobs:
            return "reading"
        if self.place.waits:
            return "waiting"
        return "prompt" if math.isnan(self.place.first) else "answer"

    def slot(self) -> dict[str, Any]:
        """Its object of /slots, without anything that was asked or answered."""
        chat = self.chat
        tokens = [job.emitted for job in self.place.jobs]
        return {
            "model": chat.model,
            "key": self.tenant.name,
            "state": self.state,
            "k": chat.k,
            "rest": chat.options.rest,
            "tokens": sum(tokens),
            "max_tokens": chat.answers * chat.options.max_new_tokens,
            "seconds": round(time.monotonic() - self.started, 3),
            "seconds_left": round(self.left, 3),
            "deadline": chat.deadline is not None,
            "priority": chat.options.priority,
            "stream": chat.stream,
        }


class Endpoints:
    """An ASGI application for `ENDPOINTS`, for the tenants of `keys`. `close` ends its threads."""

    def __init__(self, engines: Engines, limits: Limits, metrics: Metrics, settings: AppSettings, keys: Keys) -> None:
        self._keys = keys
        self._admitted = list[_Admitted]()
        self._sent = SentImages(limits.sent)
        self._uploads = Uploads(limits)
        self._places = Places(limits.parallel + limits.queue)
        self._lenient = settings.lenient
        self._traffic = settings.traffic
        self._tracing = settings.tracing
        self._engines = engines
        self._limits = limits
        self._metrics = metrics
        self._hosts = frozenset(settings.image_hosts)
        self._readers: Executor = ThreadPoolExecutor(READERS, "vtx-serve-read")
        self._video_readers: Executor = ThreadPoolExecutor(VIDEO_READERS, "vtx-serve-video")
        self._loader: Executor = ThreadPoolExecutor(1, "vtx-serve-load")
        self._fetchers: Executor = ThreadPoolExecutor(FETCHERS, "vtx-serve-fetch")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. An error ends this one only."""
        endpoint = ENDPOINTS[scope["path"]]
        reply = Reply(send, self._limits, lines=endpoint.lines)
        tenant: Tenant = scope.get(SCOPE, ANYBODY)
        started = time.monotonic()
        answered = None
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
                    await reply.json(refusal.status, endpoint.refused(refusal), refusal.headers)
                else:  # its stream has begun
                    await reply.event(endpoint.refused(refusal))
                    await reply.end_events(endpoint.objects.last)
                    reply.status = refusal.status
        finally:
            status = reply.status or CLIENT_LEFT
            self._metrics.request(status, tenant.name)
            if self._tracing is not None:
                parent = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
                self._tracing.request(scope["path"], status, started, parent, answered)

    def close(self) -> None:
        """End the threads that read and load, and send what is left of the spans."""
        if self._tracing is not None:
            self._tracing.close()
        for threads in (self._readers, self._video_readers, self._loader, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)

    def figures(self) -> dict[str, float]:
        """The current state for the metrics."""
        return {"body_bytes": self._uploads.bytes, "sent_image_bytes": self._sent.bytes}

    async def _answer(self, scope: Scope, receive: Receive, reply: Reply, endpoint: Endpoint) -> Answered | None:
        """Answer a request; None at an address that gives no answer of the model."""
        started = time.monotonic()
        tenant = scope.get(SCOPE, ANYBODY)
        if self._traffic.draining:
            raise shutting_down()
        self._keys.admit(tenant)
        client = tenant.name or network_of((scope.get("client") or ("",))[0] or "")
        self._traffic.inside += 1
        try:
            with self._uploads.begin(client) as upload:
                body = await self._uploads.read(upload, scope, receive)
                read = partial(
                    read_request, body, self._limits, self._hosts, lenient=self._lenient, translate=endpoint.translate
                )
                try:
                    chat = await asyncio.get_running_loop().run_in_executor(self._readers, read)
                finally:
                    body.clear()
                check_priority(tenant, chat.options.priority)
                seconds = self._limits.seconds if chat.deadline is None else min(self._limits.seconds, chat.deadline)
                turn = Terms(started + seconds, chat.deadline is not None, seconds, chat.options.priority).order
                with self._places.take(turn, receive) as place, self._keys.answering(tenant, chat.answers):
                    request = _Admitted(scope["path"], tenant, chat, started, seconds, upload, place)
                    del chat
                    with self._listed(request):
                        return await self._compute(request, reply, endpoint)
        finally:
            self._traffic.inside -= 1

    @contextmanager
    def _listed(self, request: _Admitted) -> Iterator[None]:
        """Show a request in /slots until the end of the block."""
        self._admitted.append(request)
        try:
            yield
        finally:
            self._admitted.remove(request)

    def slots(self) -> list[dict[str, Any]]:
        """The requests that are computed or wait, those that came first before others."""
        return [request.slot() for request in self._admitted]

    async def _compute(self, request: _Admitted, reply: Reply, endpoint: Endpoint) -> Answered | None:
        """Answer a request that has its place."""
        loop = asyncio.get_running_loop()
        chat = request.chat
        if any(isinstance(image, NamedImage) for image in chat.images):
            chat = request.chat = named_images(chat, self._sent, request.tenant.share)
        if any(isinstance(image, RemoteImage) for image in chat.images):
            chat = await loop.run_in_executor(self._fetchers, fetch_images, chat, self._limits)
        chat = replace(chat, model=self._engines.named(chat.model))
        engine = self._engines.acquire_loaded(chat.model)
        if engine is None:
            engine = await asyncio.shield(loop.run_in_executor(self._loader, self._engines.acquire, chat.model))
        with self._engines.use(engine):
            videos = any(isinstance(image, Video) for image in chat.images)
            readers = self._video_readers if videos else self._readers
            stopping = threading.Event()
            given = engine, chat, self._limits, stopping.is_set, request.tenant.share
            if endpoint.reply is not None:
                whole = loop.run_in_executor(readers, endpoint.reply, *given)
                body = await _while_wanted(whole, request, stopping)
                await reply.json(200, body)
                return None
            prepared = await _while_wanted(loop.run_in_executor(readers, prepare, *given), request, stopping)
            chat = request.chat = prepared.chat
            self._uploads.forget(request.upload)
            notes = {**chat.notes}
            objects = endpoint.objects(replace(chat, notes=notes), engine.model, prepared.ids)
            async with aclosing(_events(engine, prepared, request, notes)) as events:
                answers = await _send_answer(reply, events, objects, self._limits.comment_seconds)
        times_begun = [job.begun for job in request.place.jobs]
        self._count(request, answers)
        return Answered(chat.model, answers, times_begun, chat.deadline, chat.options.priority)

    def _count(self, request: _Admitted, answers: Sequence[Answer]) -> None:
        """Add the answers of a request to the metrics and to what its key has used."""
        place = request.place
        seconds_of = {
            "queue": min(job.begun for job in place.jobs) - request.started,
            "first_token": place.first - request.started,
            "answer": time.monotonic() - request.started,
        }
        for answer in answers:
            stats = answer.stats
            times = answer.stats.timings_ms
            kept = stats.vision_tokens_kept
            totals = {
                "prompt_tokens": stats.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "reused_tokens": stats.reused_tokens,
                "withdrawn_tokens": stats.vision_tokens - kept[-1] if kept else 0,
            }
            token = times["decode_per_token"] / 1000 if len(answer.token_ids) > 1 else None
            reduce = "+".join(part.partition(":")[0] for part in stats.reduce.split("+"))
            asked_k = "auto" if stats.gate is not None else str(stats.k or "none")
            self._keys.count(request.tenant, stats.prompt_tokens, len(answer.token_ids))
            model = request.chat.model
            self._metrics.answer((model, asked_k, reduce), totals, seconds_of, token, request.tenant.name)


def named_images(chat: ChatRequest, sent: SentImages, tenant: str) -> ChatRequest:
    """The request with the images that its client has named. Raises Refusal."""
    images = tuple(sent.url(image, tenant) if isinstance(image, NamedImage) else image for image in chat.images)
    return replace(chat, images=images)


def fetch_images(chat: ChatRequest, limits: Limits) -> ChatRequest:
    """The request with its remote images fetched. Raises Refusal."""
    images = tuple(
        fetch(image, limits.body, limits.fetch_seconds) if isinstance(image, RemoteImage) else image
        for image in chat.images
    )
    return replace(chat, images=images)


async def _while_wanted(reading: asyncio.Future[T], request: _Admitted, stopping: threading.Event) -> T:
    """The result of `reading`. Once nobody waits for it any more, `stopping` is set, and it ends.

    Raises ClientLeft if the client has gone; Refusal if it took too long (408) or has lost its place.
    """
    try:
        either: set[asyncio.Future[Any]] = {reading, request.place.ending}
        await asyncio.wait(either, timeout=request.left, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        stopping.set()
        await asyncio.wait({reading})  # the model is used until then
        reading.exception()  # retrieved, so that asyncio does not log it
        request.place.check()
        raise _too_slow(request.seconds)
    finally:
        stopping.set()


def prepare(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool], tenant: str = ""
) -> Prepared:
    """Read the images and videos and check the request, before anything is computed; `tenant`: whose caches it uses."""
    loaded = engine.model.loaded
    policy = loaded.policy(chat.k, chat.options, chat.reduce)
    if chat.options.guide is not None:
        try:
            loaded.prompts.guided(chat.options.guide)
        except (DeviceError, RequestError) as e:
            if not (chat.lenient and chat.form == "tools"):
                raise Refusal(400, str(e), code="unsupported_value", param=chat.form) from e
            notes = {**chat.notes, "ignored": [*chat.notes.get("ignored", ()), "tools"]}
            messages = with_tools(chat.messages[1:], [], thinking_of(chat.messages))
            chat = replace(chat, messages=messages, options=replace(chat.options, guide=None), notes=notes)
    with naming("reasoning_effort"):
        loaded.prompts.check_thinking(chat.messages, chat.options)
    images = read_images(engine, chat, limits, stopped, tenant)
    loaded.prompts.check_system(chat.messages)
    ids = tuple(loaded.prompts.ids(messages, images) for messages in chat.prompts)
    room = loaded.manifest.max_context - max(map(len, ids))
    if not policy.entries and 0 < room < chat.options.max_new_tokens:
        chat = replace(chat, notes={**chat.notes, "max_tokens": room})  # where the context ends the answer
    return Prepared(replace(chat, images=()), images, ids)


def read_images(
    engine: Engine, chat: ChatRequest, limits: Limits, stopped: Callable[[], bool], tenant: str = ""
) -> tuple[PreparedImage, ...]:
    """Read the images and videos of a request. Raises Refusal, ImageError."""
    loaded = engine.model.loaded
    sources = [image for image in chat.images if not isinstance(image, RemoteImage | NamedImage)]  # they are here

    def check(image: ImageSource) -> None:  # for videos the limits of `limits.py` in runtime/vision hold
        width, height = image_size(image, loaded.images.options.formats)
        if width * height > limits.pixels:
            raise Refusal(
                413,
                f"an image has {width}x{height} pixels, the limit of this server is {limits.pixels:,} in total; "
                "send it smaller",
                code="image_too_large",
                param="messages",
            )

    return loaded.images.prepare_all(sources, messages=chat.messages, stopped=stopped, check=check, tenant=tenant)


async def _events(
    engine: Engine, prepared: Prepared, request: _Admitted, notes: dict[str, Any]
) -> AsyncGenerator[tuple[int, Piece | Done]]:
    """The events of a request, each with the number of its answer, to its end; left early, it is cancelled.

    At its deadline an answer ends as it is.

    Raises ClientLeft if the client has gone; Refusal if it had no token in time (408) or no memory (503), lost its
    place, or could not be answered. The place gets its jobs and the time of the first token, `notes` how K and
    reductions were chosen.
    """
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[tuple[int, Event]]()

    def emit(number: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))

    place = request.place
    unfinished = prepared.chat.answers

    def choosing(chosen: Chosen) -> None:
        figures = {"figure": chosen.method.figure, "best_figure": chosen.best}
        notes["adapted"] = {"method": chosen.method.name, **figures, "why": chosen.why}

    place.jobs = _jobs(engine, prepared, request, emit, choosing)
    came = False  # a token of any of them
    getting = asyncio.ensure_future(queue.get())
    try:
        for job in place.jobs:
            engine.scheduler.submit(job)
        while True:
            either: set[asyncio.Future[Any]] = {getting, place.ending}
            # By itself the answer ends at its deadline.
            await asyncio.wait(either, timeout=request.left + LATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            place.check()
            if not getting.done():
                raise _unanswered(place.jobs[0], request.seconds)
            number, event = getting.result()
            if isinstance(event, Exception):
                raise event
            came = came or isinstance(event, Piece) or bool(event.answer.token_ids)
            if math.isnan(place.first):
                place.first = time.monotonic()
            if isinstance(event, Done) and event.answer.stopped == "cancelled":  # not by its client
                raise shutting_down()
            if isinstance(event, Done) and event.answer.stopped == "timeout" and not came:
                raise _too_slow(request.seconds)
            yield number, event
            unfinished -= isinstance(event, Done)
            if not unfinished:
                return
            getting = asyncio.ensure_future(queue.get())
    finally:
        for job in place.jobs:
            job.cancel()
        getting.cancel()


def _jobs(
    engine: Engine,
    prepared: Prepared,
    request: _Admitted,
    emit: Callable[[int, Event], None],
    choosing: Callable[[Chosen], None],
) -> list[Job]:
    """A job for each answer of a request; `emit` gets its number and its events."""
    chat = prepared.chat
    return [
        engine.job(
            AnswerRequest(
                prepared.images,
                chat.prompt_of(number),
                prepared.ids[number // chat.n],
                chat.settings(number),
                chat.reuse,
                chat.adapts,
                tenant=request.tenant.share,
            ),
            partial(emit, number),
            ends_at=request.started + request.seconds,
            urgent=chat.deadline is not None,
            limit=request.seconds,
            choosing=choosing,
        )
        for number in range(chat.answers)
    ]


def _unanswered(job: Job, seconds: float) -> Refusal:
    """The reason why a job has no token after these seconds."""
    if job.lacks_memory:
        return no_memory(f"there was no memory for its K and V within {seconds:g} s; ask again later")
    return _too_slow(seconds)


def _too_slow(seconds: float) -> Refusal:
    return Refusal(408, f"there was no answer after {seconds:g} s, the limit; ask again later", final=True)


async def _send_answer(
    reply: Reply, events: AsyncIterator[tuple[int, Piece | Done]], objects: Objects, pause: float
) -> list[Answer]:
    """Send the answers whole, or as server-sent events from the first token on; an error before has its own status.

    A stream without an event for `pause` seconds gets a comment, which keeps its connection open.
    """
    answers = dict[int, Answer]()
    begun = set[int]()
    stream = objects.request.stream
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
