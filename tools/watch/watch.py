"""The loop that asks standing questions about the newest frames of sources, on one model."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.prompts import opening_messages
from vtx.runtime.errors import BundleError, ContextError, RequestError, VtxError
from vtx.runtime.prompt.messages import Message, Part, with_tools
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine, StandsError
from vtx.runtime.scheduler.scheduler import ClosedError, Done, Event, Job
from vtx.runtime.server.delivery import Output
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.session.prefix_file import check_prefix
from vtx.runtime.vision.image import load_image
from vtx.runtime.vision.layout import check_image_tokens
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens
from vtx.tools.watch.config import KINDS, SourceConfig, StandingQuestion, WatchConfig
from vtx.tools.watch.outputs import open_outputs
from vtx.tools.watch.sources import Frame, FrameSource, Newest
from vtx.tools.watch.standing import Cells, Last, QuestionState

IDLE_SECONDS = 1.0  # between two looks for silent sources, at most
STALL_SECONDS = 600.0  # in one run of a graph, after which the process no longer counts as alive


def capacity(loaded: LoadedBundle, parallel: int, tiles: int = 0) -> Capacity:
    """The room for answers: frames come only once, so few conversations and encoded images are kept.

    `tiles`: bytes of encoded tiles that are kept.
    """
    image = 4 * loaded.images.layout.max_tokens * loaded.manifest.model.hidden  # bytes
    return Capacity(parallel, parallel, 2 * parallel, image_tokens=min(256 << 20, 4 * parallel * image), tiles=tiles)


@dataclass(eq=False)
class Look:
    """A frame that is asked about, the questions that wait, and the job of the one that runs.

    `embedding` are its image tokens, which have `moved` since the running question's last answer.
    """

    frame: Frame
    images: tuple[PreparedImage, ...]
    cells: Cells | None
    waiting: deque[QuestionState]
    running: Job | None = None
    embedding: HiddenStates | None = None
    moved: float = math.inf


class Watched:
    """A source, its newest frame and its standing questions; `look` is the frame that is asked about now."""

    def __init__(
        self, config: SourceConfig, source: FrameSource, newest: Newest, references: tuple[PreparedImage, ...]
    ) -> None:
        self.source = source
        self.newest = newest
        self.references = references
        self.look: Look | None = None
        self.looks = 0  # the number of the last one, of those of all sources
        self.asked: tuple[PreparedImage, ...] = ()  # the last frame that was run
        self.silent = False
        self.config = config
        self.standing = dict[str, QuestionState]()
        self.configure(config, references)

    def configure(self, config: SourceConfig, references: tuple[PreparedImage, ...]) -> None:
        """Take over questions; those that are as before keep what they know."""
        same = (config.system, config.reference) == (self.config.system, self.config.reference)
        before = self.standing if same else {}
        self.config = config
        self.references = references
        self.standing = {
            question.name: state
            if (state := before.get(question.name)) and state.question == question
            else QuestionState(question)
            for question in config.question
        }
        self.compares = config.near is not None or any(question.changed is not None for question in config.question)

    @property
    def due_from(self) -> float:
        """The time from which on its newest frame is looked at."""
        return max(self.newest.due_from, min(standing.due_from for standing in self.standing.values()))


class Watcher:
    """Asks the standing questions of `config` on the model of `engine`, and sends events to outputs.

    A frame is prepared when the model is about to have time for it, so that it is the newest. The questions about it
    are asked one after the other in one conversation, whose image is run once. One frame of a source is asked about at
    a time, and the source that was looked at longest ago is next. `watched` are the sources by name; `wake` is set when
    there may be work.
    """

    def __init__(
        self,
        engine: Engine,
        config: WatchConfig,
        *,
        parallel: int = 4,
        clock: Callable[[], float] = time.monotonic,
        outputs: Callable[[WatchConfig], list[Output]] = open_outputs,
    ) -> None:
        check_questions(engine.model.loaded, config)
        self._engine = engine
        self._loaded = engine.model.loaded
        self._clock = clock
        self._open = outputs
        self._most = parallel + 1  # frames in work: one more is prepared meanwhile
        self._outputs = outputs(config)
        self._config = config
        self.watched: dict[str, Watched] = {}
        self._ended = queue.SimpleQueue[tuple[Watched, Look, QuestionState, Answer | Exception]]()
        self.wake = threading.Event()
        self._reload: Callable[[], WatchConfig] | None = None
        self._status_at = clock() + config.status
        self.answers = self.reused = self.errors = self._looks = 0
        self._configure(config)

    def reload(self, read: Callable[[], WatchConfig]) -> None:
        """Have another configuration taken over, from any thread but a signal's handler; a wrong one changes nothing.

        Sources that are as before go on.
        """
        self._reload = read
        self.wake.set()

    def run(self, alive: Callable[[], None] = lambda: None) -> None:
        """Ask until all sources have ended, or nobody reads stdout any more.

        `alive` is called each second or more often, while the thread that computes gives signs of life.
        """
        while not self.ended and not any(output.gone for output in self._outputs):
            if self._engine.scheduler.silence < STALL_SECONDS:
                alive()
            self.wake.wait(self.step())
            self.wake.clear()

    def close(self) -> None:
        """End sources and running answers, and deliver what waits."""
        for watched in self.watched.values():
            self._drop(watched)
        self._status()
        for output in self._outputs:
            output.close()

    @property
    def ended(self) -> bool:
        """True once no source gives another frame and no answer is computed."""
        now = self._clock()
        return all(
            watched.source.state == "ended"
            and watched.look is None
            and not (watched.newest.waiting and now >= watched.due_from)
            for watched in self.watched.values()
        )

    def step(self) -> float:
        """Report answers that ended and ask about frames that came; returns the seconds until there may be more."""
        if (reload := self._reload) is not None:
            self._reload = None
            self._take_over(reload)
        while True:
            try:
                self._answered(*self._ended.get_nowait())
            except queue.Empty:
                break
        now = self._clock()
        for watched in sorted(self.watched.values(), key=lambda watched: watched.looks):
            if sum(other.look is not None for other in self.watched.values()) >= self._most:
                break
            if watched.look is None and now >= watched.due_from and (frame := watched.newest.take()):
                self._look(watched, frame)
        self._report_silence(now)
        if now >= self._status_at:
            self._status()
        idle = [w for w in self.watched.values() if w.look is None and w.newest.waiting]
        return max(0.0, min(IDLE_SECONDS, min((w.due_from - now for w in idle), default=IDLE_SECONDS)))

    def _look(self, watched: Watched, frame: Frame) -> None:
        """Prepare a frame and ask what is due about it."""
        now = self._clock()
        self._looks = watched.looks = self._looks + 1
        try:
            image = load_image(frame.read(), self._loaded.images.options.formats)
            cells = Cells.of(image) if watched.compares else None
            due = [standing for standing in watched.standing.values() if standing.due(now, cells)]
            if not due:
                return
            tokens = watched.config.image_tokens
            prepared = self._loaded.images.prepare(image, of_images=len(watched.references) + 1, image_tokens=tokens)
            watched.look = Look(frame, (*watched.references, prepared), cells, deque(due))
            watched.source.error = ""
        except (VtxError, OSError) as e:  # also of a picture that is still being written
            watched.source.corrupt += 1
            watched.source.error = str(e)
            return
        self._next(watched, watched.look)

    def _next(self, watched: Watched, look: Look) -> None:
        """Ask the next question about a frame, in the conversation of the one before, or make room for a frame."""
        while look.running is None and look.waiting:
            self._ask(watched, look, look.waiting.popleft())
        if look.running is None:
            watched.look = None

    def _ask(self, watched: Watched, look: Look, standing: QuestionState) -> None:
        """Ask about a frame, unless the last answer stands for it."""
        config = watched.config
        last = standing.last
        standing.asked(self._clock(), look.cells)
        if config.reuse != "none" and last is not None:
            change = None if config.near is None else standing.near(look.cells, config.near)
            if last.key == _key(look) or change is not None:
                self.reused += 1
                near = {} if last.key == _key(look) else {"change": round(change or 0.0, 4)}
                return self._report(watched, look, standing, last.answer, {"reused": True, **near})
        question = standing.question

        def stands(tokens: ImageTokens) -> bool:
            look.embedding = tokens.hidden
            look.moved = math.inf if last is None else last.moved(tokens.hidden)
            return look.moved <= (config.moved or 0.0)

        try:
            messages = _messages(config, question, look.images[-1:])
            file = None if config.prefix_file is None else Path(config.prefix_file)
            request = AnswerRequest.of(self._loaded, look.images, messages, standing.settings, watched.asked, file)
            if config.moved is not None:
                request = replace(request, stands=stands)
            look.running = self._engine.job(request, partial(self._emit, watched, look, standing))
            self._engine.scheduler.submit(look.running)
        except ClosedError:
            raise
        except VtxError as e:
            look.running = None
            self._failed(watched, look, standing, e)
        return None

    def _emit(self, watched: Watched, look: Look, standing: QuestionState, event: Event) -> None:
        """Hand on the end of an answer, in the thread that computes."""
        if isinstance(event, Done):
            self._ended.put((watched, look, standing, event.answer))
        elif isinstance(event, Exception):
            self._ended.put((watched, look, standing, event))
        else:
            return
        self.wake.set()

    def _answered(self, watched: Watched, look: Look, standing: QuestionState, ended: Answer | Exception) -> None:
        look.running = None
        if not isinstance(ended, StandsError):
            watched.asked = look.images
        current = watched.standing.get(standing.question.name) is standing and not watched.source.closed
        if current and isinstance(ended, Answer):
            self.answers += 1
            standing.error = ""
            answer = answer_fields(ended, standing)
            complete = ended.stopped not in ("timeout", "cancelled")
            standing.last = Last(_key(look), look.cells, answer, look.embedding) if complete else None
            self._report(watched, look, standing, answer, {"reused": False})
        elif current and isinstance(ended, StandsError) and standing.last is not None:
            self.reused += 1
            how = {"reused": True, "moved": round(look.moved, 4)}
            self._report(watched, look, standing, standing.last.answer, how)
        elif current and isinstance(ended, Exception):
            self._failed(watched, look, standing, ended)
            if isinstance(ended, ClosedError):
                raise ended
        self._next(watched, look)

    def _failed(self, watched: Watched, look: Look, standing: QuestionState, error: Exception) -> None:
        """Tell of an error, once as long as it stays the same."""
        self.errors += 1
        standing.last, before, standing.error = None, standing.error, str(error) or type(error).__name__
        if standing.error == before:
            return
        about = {"source": watched.config.name, "question": standing.question.name, "frame": look.frame.number}
        self._send("error", look.frame.time, **about, error=standing.error)

    def _report(self, watched: Watched, look: Look, standing: QuestionState, answer: Any, how: dict[str, Any]) -> None:
        """Send an answer, and queue the questions that wait for it."""
        question = standing.question
        text = answer["answer"]
        if question.report == "all" or text != standing.reported:
            standing.reported = text
            latency = round(1000 * (self._clock() - look.frame.at), 1)
            about = {"source": watched.config.name, "question": question.name, "frame": look.frame.number}
            self._send("answer", look.frame.time, **about, **answer, **how, latency_ms=latency)
        for other in watched.standing.values():
            when = other.question.when
            if when is not None and when.question == question.name and when.matches(text):
                look.waiting.append(other)

    def _configure(self, config: WatchConfig) -> None:
        sources = {source.name: source for source in config.source}
        parts_of = {source.name: references(self._loaded, source) for source in config.source}
        for name, watched in list(self.watched.items()):
            if (new := sources.get(name)) and _device(new) == _device(watched.config):
                watched.configure(new, parts_of[name])
            else:
                self._drop(self.watched.pop(name))
        for name, source in sources.items():
            if name not in self.watched:
                newest = Newest(source.rate, self.wake.set, self._clock)
                reader = FrameSource(source, newest, partial(self._source_event, name))
                self.watched[name] = Watched(source, reader, newest, parts_of[name])
                reader.start()
        self._config = config

    def _take_over(self, read: Callable[[], WatchConfig]) -> None:
        try:
            config = read()
            check_questions(self._loaded, config)
            if config.outputs != self._config.outputs:
                outputs = self._open(config)
                for output in self._outputs:
                    output.close()
                self._outputs = outputs
            self._configure(config)
        except VtxError as e:
            self._send("config", time.time(), state="refused", error=str(e))
            return
        self._send("config", time.time(), state="reloaded")

    def _drop(self, watched: Watched) -> None:
        watched.source.close()
        if watched.look is not None:
            watched.look.waiting.clear()
            if watched.look.running is not None:
                watched.look.running.cancel()

    def _source_event(self, name: str, state: str, more: dict[str, Any]) -> None:
        self._send("source", time.time(), source=name, state=state, **more)
        self.wake.set()

    def _report_silence(self, now: float) -> None:
        for name, watched in self.watched.items():
            if watched.config.kind in ("camera", "stream", "pipeline") and watched.source.state == "open":
                silence = now - watched.newest.last_at
                if (silent := silence >= watched.config.silent_after) != watched.silent:
                    watched.silent = silent
                    state = "silent" if silent else "open"
                    self._send("source", time.time(), source=name, state=state, silent_s=round(silence, 1))

    def _status(self) -> None:
        self._status_at = self._clock() + self._config.status
        sources = {
            name: {
                "state": watched.source.state,
                "frames": watched.newest.frames,
                "dropped": watched.newest.dropped,
                "corrupt": watched.source.corrupt,
                **({"error": watched.source.error} if watched.source.error else {}),
            }
            for name, watched in self.watched.items()
        }
        outputs = [
            {"output": output.name, "sent": output.sent, "dropped": output.dropped, "failed": output.failed}
            for output in self._outputs
        ]
        counts = {"answers": self.answers, "reused": self.reused, "errors": self.errors}
        self._send("status", time.time(), **counts, sources=sources, outputs=outputs)

    def _send(self, event: str, at: float, **fields: Any) -> None:
        moment = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"event": event, "time": moment, **fields}, ensure_ascii=False).encode()
        for output in self._outputs:
            output.put(line)


def _key(look: Look) -> tuple[str, ...]:
    return tuple(image.key for image in look.images)


def _device(config: SourceConfig) -> list[Any]:
    """The settings that a source's thread depends on."""
    return [getattr(config, name) for name in (*KINDS, "size", "rate", "speed")]


def references(loaded: LoadedBundle, config: SourceConfig) -> tuple[PreparedImage, ...]:
    """The images that stand before each frame. Raises ImageError for one that cannot be read."""
    images = [part.image for part in config.reference if part.image is not None]
    return tuple(loaded.images.prepare(image, of_images=len(images) + 1) for image in images)


def parts(config: SourceConfig) -> list[Part]:
    """The references before each frame, as parts of a message."""
    pieces = list[Part]()
    for part in config.reference:
        pieces += [] if part.text is None else [{"type": "text", "text": part.text}]
        pieces += [] if part.image is None else [{"type": "image"}]
    return pieces


def _messages(source: SourceConfig, question: StandingQuestion, images: Sequence[PreparedImage] = ()) -> list[Message]:
    """The question about these images as the chat template reads it, thoughts switched on or off."""
    return with_tools(opening_messages(source.system, images, question.ask, parts(source)), [], question.thinking)


def answer_fields(answer: Answer, standing: QuestionState) -> dict[str, Any]:
    """The part of an event about an answer: text, thought, JSON if it has a schema, the probability of its choice."""
    fields: dict[str, Any] = {"answer": answer.text, "stopped": answer.stopped}
    if answer.thought is not None:
        fields["thought"] = answer.thought
    if standing.question.schema is not None:
        with suppress(ValueError):  # cut off by its limit
            fields["json"] = json.loads(answer.text)
    if answer.choices is not None:
        fields["probability"] = round(answer.choices.get(answer.text, 0.0), 4)
    return fields


def check_questions(loaded: LoadedBundle, config: WatchConfig) -> None:
    """Raise VtxError, naming the question, for one that this bundle cannot be asked."""
    for source in config.source:
        references(loaded, source)
        try:
            check_image_tokens(loaded.images.layout, source.image_tokens)
        except RequestError as e:
            raise RequestError(f"source {source.name}: {e}") from e
        if source.prefix_file is not None and loaded.bundle.key is not None:
            try:
                check_prefix(Path(source.prefix_file), loaded.bundle, loaded.backend)
            except BundleError as e:
                raise RequestError(f"source {source.name}: {e}") from e
        for question in source.question:
            settings = QuestionState(question).settings
            try:
                loaded.policy(settings.k, settings.options, settings.reduce)
                if settings.options.guide is not None:
                    loaded.prompts.guided(settings.options.guide)
                messages = _messages(source, question)
                loaded.prompts.check_system(messages)
                loaded.prompts.check_thinking(messages, settings.options)
                if len(loaded.prompts.ids(messages)) >= (room := loaded.manifest.max_context):
                    raise ContextError(f"its text alone fills the context of {room} tokens; shorten it")
            except RequestError as e:
                raise RequestError(f"source {source.name}, question {question.name}: {e}") from e
