"""Every question under every method; each answer and its cost are kept as they come.

Some questions are asked alone, each answer from a new conversation, so that the time to the first token includes the
tower and the whole prompt. The others are answered side by side, and the questions about an image encode it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.images import ImageOptions
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.bundle.bundle import Bundle, sha256
from vtx.runtime.errors import ImageError, RequestError, TemplateError
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.policies.make import read_rest
from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.prompt.messages import Message
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine
from vtx.runtime.scheduler.scheduler import Event
from vtx.runtime.session.encoded_images import PreparedImage, vision_extras
from vtx.runtime.strict import Strict, json_value, optional
from vtx.runtime.units import Progress
from vtx.runtime.vision.tokens import ImageTokens
from vtx.runtime.vision.video import video
from vtx.tools.bench.methods import NONE, Method
from vtx.tools.bench.stopwatch import timed
from vtx.tools.bench.work import WorkCounter
from vtx.tools.data.items import check_skipped
from vtx.tools.data.journal import ResultJournal
from vtx.tools.evaluation.questions import QuestionSet, TaskQuestion

TIMED = 50  # questions that are asked alone, for the time to the first token
PARALLEL = 8  # answers to the others that are computed at the same time
BAD = (ImageError, RequestError, TemplateError)  # a question's own fault; anything else ends the evaluation
STRICT = Strict(RequestError, "answers.jsonl is damaged, remove it")


@dataclass(frozen=True, slots=True)
class CostedAnswer:
    """An answer and what it costs alone. `flops` are those until the first token, `vision_tokens` a layer's mean.

    `first_token_ms`: None if it was computed next to others. `probability`: of a choice, as the model gives it; None if
    there were no choices.
    """

    text: str
    first_token_ms: float | None
    kv_bytes: int
    flops: int
    vision_tokens: float
    full_layers: int
    new_tokens: int
    probability: float | None = optional(None)


Answers: TypeAlias = """Callable[
    [Sequence[TaskQuestion], Mapping[int, Collection[Method]]], Generator[tuple[int, Method, CostedAnswer | Exception]]
]"""  # to the questions of these numbers as they come, each under its methods, or what is wrong


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A bundle that is evaluated, and what answers: `alone`, with its times, and `many`."""

    bundle: Bundle
    device: str
    compute: str
    fit: str | None
    many: Callable[[Options], Answers]
    alone: Callable[[Options], Asker]

    @classmethod
    def of(cls, model: Model, methods: Sequence[Method], parallel: int = PARALLEL) -> Evaluated:
        """By a model in this process. Raises RequestError for a method that the bundle was not exported for."""
        check_methods(model, methods)
        return cls(
            model.bundle,
            model.backend.device,
            model.backend.compute,
            model.loaded.images.options.fit,
            lambda options: SideBySide(model, options, parallel).answers,
            lambda options: Asker(model, options),
        )


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Questions, the methods by which each is asked, and how.

    About `timed` of the questions, evenly spread, are asked alone, the others together.
    """

    data: QuestionSet
    methods: Sequence[Method]
    max_new_tokens: int
    guide: Guide | None = None
    timed: int = TIMED


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions that every method has answered, and `replies` [questions][methods]."""

    questions: tuple[TaskQuestion, ...]
    methods: tuple[Method, ...]
    replies: tuple[tuple[CostedAnswer, ...], ...]
    skipped: tuple[str, ...]


def make_methods(
    ks: Sequence[int | str | None], reduces: Sequence[str], rests: Sequence[str] = ()
) -> tuple[Method, ...]:
    """Each K with each reduction, K first; "none" is neither. Each numbered K without a rest, and with each of `rests`.

    Raises RequestError: what is no rest, or no reduction.
    """
    for rest in rests:
        read_rest(rest)
    specs = [NONE if spec == NONE else to_spec(parse(spec)) for spec in reduces]
    methods = list[Method]()
    for spec, k in product(specs, ks):
        methods += [Method(k, spec), *(Method(k, spec, rest) for rest in rests if isinstance(k, int))]
    return tuple(dict.fromkeys(methods))


def check_methods(model: Model, methods: Sequence[Method]) -> None:
    """Raise RequestError for a method that the bundle was not exported for."""
    for method in methods:
        model.loaded.policy(method.k, Options(rest=method.rest), method.reduce)


def ask_all(
    by: Evaluated, inquiry: Inquiry, journal: Path, *, report: Progress, predict: Callable[[float], None]
) -> Asked:
    """Ask what `journal` does not hold yet. `predict` gets the total seconds, estimated from the first question.

    Raises RequestError for a journal of another bundle, or too many bad questions.
    """
    guide = inquiry.guide
    options = Options(max_new_tokens=inquiry.max_new_tokens, guide=guide)
    identity = {
        "model": sha256(by.bundle.folder / "vtx.json"),
        "device": [by.device, by.compute],
        "--max-new-tokens": inquiry.max_new_tokens,
        "--fit": by.fit,
        **({} if guide is None else {"--choices": list(guide.choices or ())}),
    }
    with ResultJournal(journal, identity) as results:
        run = _Round(inquiry, results, report)
        if inquiry.timed:
            run.ask_alone(by.alone(options), predict)
        run.ask_together(by.many(options))
        return run.answers()


class _Round:
    """Questions on their way into a journal. Each `step`-th of them is asked alone."""

    def __init__(self, inquiry: Inquiry, journal: ResultJournal, report: Progress) -> None:
        data = inquiry.data
        methods = inquiry.methods
        self._data = data
        self._questions = data.questions
        self._methods = methods
        self._journal = journal
        self._report = report
        self._keys = [[f"{question.digest()} {method.key}" for method in methods] for question in data.questions]
        self._skipped = dict[int, str]()
        count = len(self._keys)
        timed = min(inquiry.timed, count)
        self._timed = set(range(0, count, -(-count // timed))) if timed else set[int]()
        self._left = [n for n in range(count) if self._missing(n)]

    def _missing(self, n: int) -> dict[Method, str]:
        """The methods by which question `n` has yet to be asked, each with its key."""
        results = self._journal.results
        return {
            method: key
            for method, key in zip(self._methods, self._keys[n], strict=True)
            if key not in results or (n in self._timed and results[key].get("first_token_ms") is None)
        }

    def _skip(self, n: int, error: Exception) -> None:
        if not isinstance(error, BAD):
            raise error
        self._skipped.setdefault(n, f"{self._questions[n].text[:40]!r}: {error}")
        check_skipped(self._data.source, len(self._keys), self._lines, "questions")

    @property
    def _lines(self) -> tuple[str, ...]:
        return (*self._data.skipped, *self._skipped.values())

    def ask_alone(self, asker: Asker, predict: Callable[[float], None]) -> None:
        """Ask the questions whose times are measured; `predict` gets the seconds of all, estimated from the first."""
        start = time.monotonic()
        done = len(self._keys) - len(self._left)
        for turn, n in enumerate(n for n in self._left if n in self._timed):
            self._report("questions", done + turn, len(self._keys))
            missing = self._missing(n)
            try:
                replies = asker(self._questions[n], (*missing,), turn)
                self._journal.add({missing[method]: json_value(reply) for method, reply in replies.items()})
            except BAD as e:
                self._skip(n, e)
            if turn == 0:
                predict((time.monotonic() - start) * len(self._left))

    def ask_together(self, many: Answers) -> None:
        """Ask the others, each method's answer once of a question that is in the data twice."""
        rest = dict[int, list[Method]]()
        first = set[str]()
        for n in self._left:
            if n not in self._timed:
                rest[n] = [method for method, key in self._missing(n).items() if key not in first]
                first.update(self._keys[n])
        count = len(self._keys)
        with closing(many(self._questions, rest)) as answers:
            for n, method, reply in answers:
                if isinstance(reply, Exception):
                    self._skip(n, reply)
                else:
                    self._journal.add({self._missing(n)[method]: json_value(reply)})
                    rest[n].remove(method)
                self._report("questions", count - sum(map(bool, rest.values())), count)
        self._report("questions", count, count)

    def answers(self) -> Asked:
        """The questions that every method has answered. Raises RequestError if too many are left out."""
        results = self._journal.results
        complete = [n for n, keys in enumerate(self._keys) if all(key in results for key in keys)]
        replies = [
            tuple(STRICT.read(CostedAnswer, results[key], "an answer") for key in self._keys[n]) for n in complete
        ]
        check_skipped(self._data.source, len(complete), self._lines, "questions")
        questions = tuple(self._questions[n] for n in complete)
        return Asked(questions, tuple(self._methods), tuple(replies), self._lines)


def _settings(model: Model, question: TaskQuestion, method: Method, options: Options) -> Settings:
    entries = model.loaded.policy(method.k, None, method.reduce).entries
    about = question.about if any(entry.uses_question for entry in entries) else None
    return Settings(method.k, replace(options, about=about, rest=method.rest), method.reduce)


def _costed(answer: Answer, flops: int, first_token_ms: float | None = None) -> CostedAnswer:
    stats = answer.stats
    layers = answer.stats.vision_tokens_kept
    return CostedAnswer(
        text=answer.text,
        first_token_ms=first_token_ms,
        kv_bytes=stats.kv_bytes,
        flops=flops,
        vision_tokens=fmean((*layers[1:], layers[-1])),
        full_layers=sum(tokens > 0 for tokens in layers),
        new_tokens=len(answer.token_ids),
        probability=_probability(answer),
    )


def _probability(answer: Answer) -> float | None:
    if answer.choices is None or answer.choices_mass is None:
        return None
    return answer.choices.get(answer.text, 0.0) * answer.choices_mass


class Asker:
    """Asks one question under several methods, one after the other, and counts the work of each."""

    def __init__(self, model: Model, options: Options) -> None:
        backend, self._calls = timed(model.backend)
        self._model = Model(
            model.bundle, backend, model.loaded.load_ms, images=ImageOptions(model.loaded.images.options.fit)
        )
        self._options = options
        self._counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)

    def __call__(self, question: TaskQuestion, methods: Sequence[Method], number: int) -> dict[Method, CostedAnswer]:
        """The methods take turns at being first, so that none of them always runs with cold caches."""
        if not methods:  # the question is in the data twice
            return {}
        images = self._model.loaded.images.prepare_all([*question.images, *map(video, question.videos)])
        first = number % len(methods)
        replies = dict[Method, CostedAnswer]()
        for method in (*methods[first:], *methods[:first]):
            self._calls.clear()
            settings = _settings(self._model, question, method, self._options)
            with Conversation(self._model.loaded, images) as conversation:
                answer = conversation.ask(question.text, method.k, settings.options, reduce=method.reduce)
            flops = self._counter.first_token(answer.stats, self._calls)
            replies[method] = _costed(answer, flops, answer.stats.timings_ms["first_token"])
        return replies


class SideBySide:
    """Asks many questions under several methods, `parallel` at a time, and counts what each answer costs alone.

    The towers' work is counted where it is done. One prompt is computed at a time, so what they do from one answer's
    first event to the next one's belongs to the latter.
    """

    def __init__(self, model: Model, options: Options, parallel: int) -> None:
        backend, self._calls = timed(model.backend, caches=False)
        self._model = Model(
            model.bundle, backend, model.loaded.load_ms, images=ImageOptions(model.loaded.images.options.fit)
        )
        self._options = options
        self._counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        self._capacity = Capacity(parallel, parallel, kept=parallel)
        self._encoded: dict[str, int] = {}  # FLOPs of the tower, by the image, of the prompt that is computed
        self._towers: dict[tuple[str, str], int] = {}  # and by the image and the tower's extra inputs
        self._flops: dict[tuple[int, Method], int] = {}  # of the towers, by the answer

    def answers(
        self, questions: Sequence[TaskQuestion], wanted: Mapping[int, Collection[Method]]
    ) -> Generator[tuple[int, Method, CostedAnswer | Exception]]:
        """See `Answers`."""
        if not wanted:
            return
        images: dict[int, tuple[PreparedImage, ...]] = {}  # of the questions that are being answered
        counts = {n: len(methods) for n, methods in wanted.items()}

        def watch(tag: tuple[int, Method], _: Event) -> None:
            n, method = tag
            if tag in self._flops:
                return
            extras = repr(vision_extras(self._model.loaded.policy(method.k, None, method.reduce).entries))
            self._towers |= {(key, extras): flops for key, flops in self._encoded.items()}
            text_flops = self._counter.count_vision([call for call in self._calls if call.name == "text_tower"])
            image_flops = sum(self._towers.get((image.key, extras), 0) for image in images[n])
            self._flops[tag] = text_flops + image_flops
            self._encoded.clear()
            self._calls.clear()

        with Engine("eval", self._model, self._capacity) as engine:
            for (n, method), outcome in engine.answers(self._requests(questions, wanted, images), watch):
                answer = outcome if isinstance(outcome, Exception) else outcome[0]
                flops = self._flops.pop((n, method), 0)
                counts[n] -= 1
                if not counts[n]:
                    images.pop(n, None)
                if isinstance(answer, Exception):
                    yield n, method, answer
                else:
                    yield n, method, _costed(answer, flops + self._counter.prompt(answer.stats))

    def _requests(
        self,
        questions: Sequence[TaskQuestion],
        wanted: Mapping[int, Collection[Method]],
        images: dict[int, tuple[PreparedImage, ...]],
    ) -> Iterator[tuple[tuple[int, Method], list[AnswerRequest] | Exception]]:
        """The requests, image by image, and of each first the methods that keep it longest, whose caches serve all."""
        layers = self._model.manifest.model.layers
        groups = dict[Any, list[int]]()
        for n in wanted:
            groups.setdefault((questions[n].images, questions[n].videos), []).append(n)
        for (pictures, videos), numbers in groups.items():
            prepared: tuple[PreparedImage, ...] | Exception
            try:
                prepared = tuple(
                    map(self._counted, self._model.loaded.images.prepare_all([*pictures, *map(video, videos)]))
                )
            except BAD as e:
                prepared = e
            tags = [(n, method) for n in numbers for method in wanted[n]]
            for n, method in sorted(tags, key=lambda tag: -(tag[1].k if isinstance(tag[1].k, int) else layers + 1)):
                if isinstance(prepared, Exception):
                    yield (n, method), prepared
                    continue
                images[n], question = prepared, questions[n]
                messages: list[Message] = [{"role": "user", "content": opening_parts(prepared, question.text)}]
                try:
                    settings = _settings(self._model, question, method, self._options)
                    yield (n, method), [AnswerRequest.of(self._model.loaded, prepared, messages, settings)]
                except BAD as e:
                    yield (n, method), e

    def _counted(self, image: PreparedImage) -> PreparedImage:
        """An image whose FLOPs in the tower are noted when it is encoded."""

        def arrange(views: Sequence[ImageTokens]) -> ImageTokens:
            passes = [call for call in self._calls if call.name in ("vision", "video")][-len(views) :]
            self._encoded[image.key] = self._counter.count_vision(passes)
            return image.arrange(views)

        return replace(image, arrange=arrange)
