"""Questions put to configurations on the deployed graphs; each answer and its times are kept as they come.

Times are measured, or of a device that is not here estimated from what the answer ran.

One bundle is loaded at a time. An answer is computed alone, in a new conversation, so that its times are those of one
user; the configurations of an engine take turns question by question.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.images import ImageOptions
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.devices import DeviceChoice, open_backend
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import ContextError, ImageError, RequestError
from vtx.runtime.strict import Strict, json_value
from vtx.runtime.units import Progress
from vtx.runtime.vision.image import image_size
from vtx.tools.data.items import Data, Item, check_skipped, image_key, plain
from vtx.tools.data.journal import ResultJournal
from vtx.tools.fit.settings import NO_LIMIT, ImageLimit, LoadedOn, Setting

BAD = (ImageError, RequestError, ContextError)  # a question's own fault; anything else ends the search
STRICT = Strict(RequestError, "answers.jsonl is damaged, remove it")


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer and its milliseconds; `per_token_ms` is None for an answer of one token."""

    text: str
    first_token_ms: float
    per_token_ms: float | None
    answer_ms: float


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions with keys of their content: `digests` of text and images, `images` of the images alone."""

    data: Data
    digests: tuple[str, ...]
    images: tuple[str, ...]

    @classmethod
    def of(cls, data: Data) -> Questions:
        names_of: dict[object, str] = {}

        def content(item: Item) -> str:
            for image in item.images:
                if image_key(image) in names_of:
                    continue
                if isinstance(image, Image.Image):
                    names_of[image_key(image)] = hashlib.sha256(image.tobytes()).hexdigest()
                else:
                    assert isinstance(image, Path), "read_data gives pictures and paths"
                    names_of[image] = sha256(image)
            return " ".join(names_of[image_key(image)] for image in item.images)

        images = tuple(map(content, data.items))
        digests = tuple(
            hashlib.sha256(f"{item.question}\0{of_item}".encode("utf-8", "surrogatepass")).hexdigest()
            for item, of_item in zip(data.items, images, strict=True)
        )
        return cls(data, digests, images)

    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of every image. Raises ImageError for one that was removed."""
        images = {image_key(image): image for item in self.data.items for image in item.images}
        return [image_size(image) for image in images.values()]

    @property
    def sha256(self) -> str:
        """Changes with any question, answer or image, and with their order."""
        answers = [repr(item.answer) for item in self.data.items if item.answer is not None]
        return hashlib.sha256("\n".join([*self.digests, *answers]).encode("utf-8", "surrogatepass")).hexdigest()


class KeptAnswers:
    """The replies of configurations, asked where `journal` does not hold them. Use it in a `with` block.

    `of_right`: only answers that were right and are wrong now count as changed. Raises RequestError if questions have
    no answer for that.
    """

    def __init__(
        self,
        questions: Questions,
        journal: ResultJournal,
        max_new_tokens: int,
        threads: int,
        report: Progress,
        *,
        of_right: bool = False,
    ) -> None:
        self._right = [None if item.answer is None else plain(item.answer) for item in questions.data.items]
        if of_right and (missing := self._right.count(None)):
            raise RequestError(
                f"{missing} of {len(self._right)} questions have no answer, and --accuracy-drop needs all of them; "
                "give answers, or use --keep"
            )
        self._of_right = of_right
        self.questions = questions
        self._journal = journal
        self._threads = threads
        self._report = report
        self._options = Options(max_new_tokens=max_new_tokens)
        self._models: dict[ImageLimit, Model] = {}  # of one engine, by the limit of their images
        self._on: LoadedOn | None = None
        self.skipped: dict[int, str] = {}
        self.asked = 0
        self.loading_s = 0.0

    def __enter__(self) -> KeptAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        self._unload()

    def usable(self, numbers: Iterable[int]) -> list[int]:
        """The questions that could be asked."""
        return [n for n in numbers if n not in self.skipped]

    def reply(self, setting: Setting, number: int, turn: int = 0) -> TimedAnswer:
        return STRICT.read(TimedAnswer, self._journal.results[self._key(setting, number, turn)], "an answer")

    def changed(self, setting: Setting, reference: Setting, number: int) -> float:
        """1 if the answer is not the reference's, capitals, spaces and the final full stop apart; else 0."""
        mine, full = (plain(self.reply(setting_of, number).text) for setting_of in (setting, reference))
        return float(mine != full and (not self._of_right or full == self._right[number]))

    def ask(self, settings: Sequence[Setting], numbers: Sequence[int], phase: str, turn: int = 0) -> None:
        """Ask what is missing; `turn` above 0 asks again, for the times. A bad question is left out for all."""
        by_engine: dict[LoadedOn, list[Setting]] = {}
        for setting in dict.fromkeys(settings):
            by_engine.setdefault(setting.on, []).append(setting)
        done = 0
        total = len(numbers) * len(by_engine)
        for on in sorted(by_engine, key=lambda on: on != self._on):  # the one that is loaded first
            for number in numbers:
                self._report(phase, done, total)
                done += 1
                missing = [s for s in by_engine[on] if self._key(s, number, turn) not in self._journal.results]
                if missing and number not in self.skipped:
                    try:
                        self._journal.add(self._answers(on, missing, number, turn))
                    except BAD as e:
                        self._skip(number, e)
        self._report(phase, total, total)

    def _answers(self, on: LoadedOn, settings: Sequence[Setting], number: int, turn: int) -> dict[str, dict[str, Any]]:
        item = self.questions.data.items[number]
        replies = dict[str, dict[str, Any]]()
        models = {setting.limit: self._load(on, setting.limit) for setting in settings}
        images = {limit: model.loaded.images.prepare_all(item.images) for limit, model in models.items()}
        first = number % len(settings)  # so that none always runs with cold caches
        for setting in (*settings[first:], *settings[:first]):
            start = time.perf_counter()
            pictures = images[setting.limit]
            with Conversation(models[setting.limit].loaded, pictures) as conversation:
                options = replace(self._options, rest=setting.rest)
                answer = conversation.ask(item.question, setting.k, options, reduce=setting.reduce)
            answer_ms = 1000 * (time.perf_counter() - start)
            times = answer.stats.timings_ms
            further = None
            first_token = times["first_token"]
            tokens = len(answer.token_ids)
            if tokens > 1:
                further = times["decode_per_token"]
            if on.planned is not None:
                first_token, per_token = on.planned.times(answer, sum(len(image.views) for image in pictures))
                further = per_token if tokens > 1 else None
                answer_ms = first_token + per_token * max(0, tokens - 1)
            reply = TimedAnswer(answer.text, first_token, further, answer_ms)
            replies[self._key(setting, number, turn)] = json_value(reply)
            self.asked += 1
        return replies

    def _load(self, on: LoadedOn, limit: ImageLimit) -> Model:
        start = time.monotonic()
        if self._on != on:
            self._unload()
            backend = open_backend(on.bundle, DeviceChoice(on.device, on.compute, "a candidate"), self._threads)
            self._models = {NO_LIMIT: Model(on.bundle, backend, 0.0)}
            self._on = on
        if limit not in self._models:
            backend = self._models[NO_LIMIT].backend
            tiles, pixels = limit
            self._models[limit] = Model(on.bundle, backend, 0.0, images=ImageOptions(None, tiles, pixels))
        self.loading_s += time.monotonic() - start
        return self._models[limit]

    def _unload(self) -> None:
        if self._models:
            self._models[NO_LIMIT].close()  # and with it the engine of all
        self._models = {}
        self._on = None

    def _skip(self, number: int, error: Exception) -> None:
        items = self.questions.data.items
        source = self.questions.data.source
        self.skipped[number] = f"{items[number].question[:40]!r}: {error}"
        lines = [*self.questions.data.skipped, *self.skipped.values()]
        check_skipped(source, len(items) - len(self.skipped), lines, "questions")

    def _key(self, setting: Setting, number: int, turn: int) -> str:
        return f"{self.questions.digests[number]} {setting.key}{f' turn={turn}' if turn else ''}"


def split(questions: Questions, seed: int) -> tuple[list[int], list[int]]:
    """Half of the images to search with and half to hold out, as the numbers of their questions, in random order."""
    by_image: dict[str, list[int]] = {}
    for number, image in enumerate(questions.images):
        by_image.setdefault(image, []).append(number)
    images = list(by_image)
    random.Random(seed).shuffle(images)
    half = len(images) // 2
    parts = images[:half], images[half:]
    search, held_out = ([n for image in part for n in by_image[image]] for part in parts)
    return search, held_out
