"""A model with its scheduler: answers to many questions side by side, over conversations that it keeps."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.messages import split_images
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Settings
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.errors import VtxError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.scheduler.choosing import Chooser, Chosen
from vtx.runtime.scheduler.conversations import ConversationPool
from vtx.runtime.scheduler.scheduler import ClosedError, Done, Event, Job, Scheduler, Terms
from vtx.runtime.session.encoded_images import EncodedImages, ImageCache, PictureCache, PreparedImage
from vtx.runtime.vision.tokens import ImageTokens

log = logging.getLogger(__name__)
AHEAD = 2  # requests that wait in the thread that computes while others are prepared
T = TypeVar("T")
Ends: TypeAlias = "queue.SimpleQueue[tuple[RunningRequest[T], int, Answer | Exception]]"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room for the answers of one model; sizes in bytes.

    `parallel`: answers that are computed at the same time, `batch` of them at most in one pass. `kept`: conversations
    that are kept for later requests. `kv`: of K and V, in use or kept; `image_tokens`: of encoded images kept;
    `tiles`: of encoded tiles kept in addition, for images that differ in some of their tiles; `pictures`: of decoded
    pictures kept, so that one that is sent again is not decoded again.
    """

    parallel: int = 4
    batch: int = 8
    kept: int = 32
    kv: int = 2 << 30
    image_tokens: int = 256 << 20
    tiles: int = 0
    pictures: int = 64 << 20


class StandsError(VtxError):
    """A request needs no answer, as an earlier one stands."""

    def __init__(self) -> None:
        super().__init__("an earlier answer stands")


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request whose images are read and whose prompt `ids` are known, before anything is computed.

    `reuse`: it may begin with what the caches of earlier requests hold. `instead_of`: images that nobody asks about
    again, e.g. the frame before, whose caches it may take over. `adapts`: K and reductions are chosen when it begins,
    if the engine has a chooser. `prefix_file`: as of `Model.open`. `stands` is called with the tokens of the last image
    before the decoder runs, in the thread that computes; if it returns True, the request ends with a StandsError.
    `tenant`: whose caches it may begin with and fills.
    """

    images: tuple[PreparedImage, ...]
    messages: Sequence[Message]
    ids: NDArray[np.int64]
    settings: Settings
    reuse: bool = True
    adapts: bool = False
    instead_of: tuple[PreparedImage, ...] = ()
    prefix_file: Path | None = None
    stands: Callable[[ImageTokens], bool] | None = None
    tenant: str = ""

    @classmethod
    def of(
        cls,
        loaded: LoadedBundle,
        images: tuple[PreparedImage, ...],
        messages: Sequence[Message],
        settings: Settings,
        instead_of: tuple[PreparedImage, ...] = (),
        prefix_file: Path | None = None,
    ) -> AnswerRequest:
        """Raises RequestError for messages that cannot be asked about these images."""
        ids = loaded.prompts.ids(messages, images)
        return cls(images, messages, ids, settings, instead_of=instead_of, prefix_file=prefix_file)

    @classmethod
    def of_chat(cls, loaded: LoadedBundle, messages: Sequence[Mapping[str, Any]], settings: Settings) -> AnswerRequest:
        """Of messages with their images, as `Model.generate` takes them. Raises as that does."""
        images, turns = split_images(messages)
        loaded.prompts.check_system(turns)
        return cls.of(loaded, loaded.images.prepare_all(images, messages=turns), turns, settings)


class RunningRequest(Generic[T]):
    """A request whose questions are computed, one in each of its `jobs`; the results go into a queue, and come back."""

    def __init__(self, tag: T, ended: Ends[T], watch: Callable[[T, Event], None] | None) -> None:
        self.tag = tag
        self.jobs: Sequence[Job] = ()
        self._ended = ended
        self._watch = watch
        self._results = dict[int, Answer | Exception]()  # by number of the question

    def emit(self, turn: int, event: Event) -> None:
        """Take an event of a question, in the thread that computes."""
        try:
            if self._watch is not None:
                self._watch(self.tag, event)
        finally:
            if isinstance(event, Done):
                answer = event.answer
                self._ended.put((self, turn, ClosedError() if answer.stopped == "cancelled" else answer))
            elif isinstance(event, Exception):
                self._ended.put((self, turn, event))

    def end(self, turn: int, result: Answer | Exception) -> bool:
        """Note how a question ended; True if it was the last."""
        self._results[turn] = result
        return len(self._results) == len(self.jobs)

    @property
    def outcome(self) -> list[Answer] | Exception:
        """The answers to its questions, or the first error."""
        answers = list[Answer]()
        for _, result in sorted(self._results.items()):
            if isinstance(result, Exception):
                return result
            answers.append(result)
        return answers


class Engine:
    """A loaded bundle, the thread that computes with it and the conversations that it keeps.

    `chooser` chooses K and reductions of requests that leave them to it. `users` of the engine and the time at which
    the last one left are for its owner to note.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        capacity: Capacity,
        chooser: Chooser | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for method in () if chooser is None else chooser.methods:
            model.loaded.policy(method.k, None, method.reduce)  # refuses what the bundle lacks
        self.name = name
        self.model = model
        self._parallel = capacity.parallel
        self._chooser = chooser
        self.images = model.loaded.caches.images = ImageCache(capacity.image_tokens)
        self.tiles = model.loaded.caches.tiles = ImageCache(capacity.tiles) if capacity.tiles else None
        model.loaded.caches.pictures = PictureCache(capacity.pictures)
        together = min(capacity.batch, capacity.parallel)
        self.batching = Batching(model, together, capacity.kept + capacity.parallel)
        self.pool = ConversationPool(model.loaded, capacity.kv, capacity.kept)
        self.scheduler = Scheduler(name, capacity.parallel, self.batching.decode, clock=clock)
        if self.batching.obstacle is not None:
            log.info("%s decodes its answers in turn, not together: %s", name, self.batching.obstacle)
        self.users = 0
        self.used_at = time.monotonic()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> bool:
        """End its answers, its thread and its conversations, not the model; False if it still computes."""
        if not self.scheduler.close():
            return False
        self.pool.close()
        self.model.loaded.caches.images = self.model.loaded.caches.tiles = self.model.loaded.caches.pictures = None
        return True

    def job(
        self,
        asked: AnswerRequest,
        emit: Callable[[Event], None],
        *,
        ends_at: float = math.inf,
        urgent: bool = False,
        limit: float = 0.0,
        choosing: Callable[[Chosen], None] = lambda _: None,
    ) -> Job:
        """The work of one answer, for the scheduler, in a conversation of the pool; other fields are those of `Terms`.

        It waits while its K and V, next to those in use, would exceed the capacity.
        `choosing` is called if the engine chooses its K and reductions.
        """
        leased = list[Conversation]()
        chooser = self._chooser if asked.adapts and asked.images else None
        methods = list[Chosen]()
        fresh = len(asked.ids)
        kv_bytes = self._kv_bytes(asked, adapts=chooser is not None)

        def begin() -> AnswerStream:
            nonlocal fresh
            if asked.stands is not None:
                settings = asked.settings
                loaded = self.model.loaded
                policy = loaded.policy(settings.k, settings.options, settings.reduce, asked.images)
                images = EncodedImages(loaded.backend, asked.images[-1:], self.images, self.tiles, asked.tenant)
                if asked.stands(images.encoded(asked.images[-1], policy.entries, self.scheduler.heartbeat.beat)):
                    raise StandsError
            if asked.reuse and asked.settings.options.prompt_logprobs is None:
                conversation = self.pool.lease(
                    asked.images,
                    asked.ids,
                    instead_of=asked.instead_of,
                    prefix_file=asked.prefix_file,
                    needed=kv_bytes,
                    tenant=asked.tenant,
                )
            else:
                conversation = self.pool.lease_unshared(asked.images, needed=kv_bytes, tenant=asked.tenant)
            leased.append(conversation)
            try:
                settings = asked.settings
                seconds = max(1e-3, ends_at - job.begun)
                if seconds < math.inf:
                    settings = replace(settings, options=replace(settings.options, timeout=seconds))
                if chooser is not None:
                    fresh = max(1, fresh - leased[0].agreement(asked.ids)[0])
                    methods.append(chooser.choose(fresh, settings.options.max_new_tokens, seconds, job.room))
                    settings = replace(settings, k=methods[0].method.k, reduce=methods[0].method.reduce)
                    choosing(methods[0])
                stream = leased[0].stream_messages(asked.messages, settings, resume=True)
                if self.batching.joins_prompts:
                    stream.join_prompts()
                return stream
            except BaseException:
                end(False)
                raise

        def end(keep: bool) -> None:
            self.pool.give_back(leased.pop(), keep=keep)

        def emitting(event: Event) -> None:
            if chooser is not None and methods and isinstance(event, Done):
                chooser.measured(methods[0].method, fresh, event.answer)
            emit(event)

        job = Job(
            begin,
            end,
            emitting,
            Terms(
                ends_at,
                urgent,
                limit,
                asked.settings.options.priority,
                asked.settings.options.max_new_tokens,
            ),
            partial(self.pool.fits, kv_bytes),
        )
        if chooser is not None:
            job.quickest = partial(chooser.quickest, len(asked.ids))
        return job

    def answers(
        self,
        requests: Iterable[tuple[T, Sequence[AnswerRequest] | Exception]],
        watch: Callable[[T, Event], None] | None = None,
    ) -> Generator[tuple[T, list[Answer] | Exception]]:
        """The answers to many requests as they end, with the tag of each; a request may ask several times.

        An error is given for its request and stops no other. `requests` is read a little ahead of the answers, so
        reading it may decode images meanwhile. `watch` sees each event, in the thread that computes. Left early, the
        answers that run are cancelled.
        """
        most = AHEAD + (self._parallel if self.batching.obstacle is None else 1)
        ended: Ends[T] = queue.SimpleQueue()
        source = iter(requests)
        running = list[RunningRequest[T]]()
        reading = True
        try:
            while True:
                while reading and len(running) < most:
                    entry = next(source, None)
                    if entry is None:
                        reading = False
                        break
                    tag, questions = entry
                    if isinstance(questions, Exception):
                        yield tag, questions
                        continue
                    request = RunningRequest(tag, ended, watch)
                    request.jobs = [
                        self.job(question, partial(request.emit, turn)) for turn, question in enumerate(questions)
                    ]
                    running.append(request)
                    for job in request.jobs:
                        self.scheduler.submit(job)
                if not running:
                    return
                request, turn, result = ended.get()
                if request.end(turn, result):
                    running.remove(request)
                    yield request.tag, request.outcome
        finally:
            for request in running:
                for job in request.jobs:
                    job.cancel()

    def ask(self, asked: AnswerRequest) -> Answer:
        """The answer to one request, next to those that other threads ask for. Raises what ended it."""
        [(_, result)] = self.answers([(None, [asked])])
        if isinstance(result, Exception):
            raise result
        return result[0]

    def _kv_bytes(self, asked: AnswerRequest, *, adapts: bool) -> int:
        """Bytes of K and V of a whole prompt and its longest answer, without image tokens behind a fixed K."""
        manifest = self.model.manifest
        options = asked.settings.options
        tokens = min(len(asked.ids) + options.max_new_tokens, manifest.max_context)
        image = int((asked.ids == manifest.text.image_token_id).sum())
        exit = None
        if not adapts:
            try:
                exit = self.model.loaded.policy(asked.settings.k, options, asked.settings.reduce, asked.images).exit
            except VtxError:  # it is told when the answer begins
                return 0
        layers = [layer for stage in manifest.stages for layer in stage.cached]
        without = sum(exit is not None and layer >= exit for layer in layers)
        return self.model.backend.kv_slot_bytes * (tokens * len(layers) - image * without)
