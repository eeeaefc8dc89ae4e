"""Every method that a bundle offers, on the same questions in turn: what each answers, and what that costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from vtx.exporter.bench.measure import K
from vtx.exporter.bench.stopwatch import split, timed
from vtx.exporter.bench.work import Worker
from vtx.exporter.data.items import Data, Item, plain
from vtx.exporter.estimate.flops import make_schedule, prefill_flops
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.policies import Reduction, parse, to_spec
from vtx.runtime.prompt.messages import Part

NONE = "none"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Method:
    """A withdrawal (`k`), reductions before it (`reduce`, a canonical word), both, or neither."""

    k: K
    reduce: str = NONE

    @property
    def name(self) -> str:
        depth = [] if self.k is None else ["gates" if self.k == "auto" else f"K = {self.k}"]
        return " + ".join([*map(short, parse(self.reduce)), *depth]) or NONE

    @property
    def kind(self) -> str:
        """What it is compared as."""
        if self.reduce == NONE:
            return "gates" if self.k == "auto" else "withdrawal"
        return "pruning" if self.k is None else "both"


@dataclass(frozen=True, slots=True)
class Found:
    """One answer: whether it is the data's (None: not known) and that of no method, and its cost.

    `vision_rows` is the mean over the layers of the vision rows that leave them; `full_layers` counts layers that see
    at least one. FLOPs are the tower's and the prompt's, in one chunk.
    """

    right: bool | None
    same: bool
    flops: int
    kv_bytes: int
    vision_rows: float
    full_layers: int
    ms: dict[str, float]


def find_methods(manifest: Manifest, ks: Sequence[K]) -> tuple[Method, ...]:
    """No method, each of `ks`, each exported reduction, and each of these with one withdrawal behind it."""
    words = [named for named in manifest.reductions if named != NONE]
    fixed = [k for k in ks if isinstance(k, int)]
    later = manifest.default_k if manifest.default_k in fixed else fixed[len(fixed) // 2] if fixed else None
    both = [Method(later, named) for named in words] if later is not None else []
    return (Method(None), *(Method(k) for k in ks if k is not None), *(Method(None, named) for named in words), *both)


def short(part: Reduction) -> str:
    """A method's word as a table shows it: by its preset where it has one, without words that are the default."""
    said, usual = _options(part), _options(type(part)())
    told = [key for key in said if said[key] != usual[key] or isinstance(getattr(part, key), int | float)]
    start = []
    for name, preset in part.presets.items():
        if all(getattr(part, key) == value for key, value in preset.items()):
            start, told = [name], [key for key in said if said[key] != usual[key] and key not in preset]
            break
    return f"{part.name}:{','.join([*start, *(f'{key}={said[key]}' for key in told)])}"


def _options(part: Reduction) -> dict[str, str]:
    """A method's options as its canonical word spells them."""
    return dict(item.split("=") for item in to_spec((part,)).partition(":")[2].split(","))


# --- asking ---------------------------------------------------------------------------------------


class Trial:
    """The questions of `data`, put to each of `methods` in turn; what was found is kept question by question."""

    def __init__(self, model: Model, data: Data, methods: Sequence[Method], new_tokens: int, threads: int) -> None:
        self.threads = threads
        backend, self._calls = timed(model.backend)
        self.model, self.data, self.methods = Model(model.bundle, backend, model.load_ms), data, tuple(methods)
        self._options = Options(max_new_tokens=new_tokens)
        self._worker = Worker(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        self.found: list[dict[Method, Found]] = []
        self.skipped, self.interrupted, self.predicted_s = list(data.skipped), False, 0.0

    def probe(self) -> float:
        """Ask the first question that fits by every method, and return the seconds that `run` will take, roughly."""
        for item in self.data.items:
            start = time.perf_counter()
            with contextlib.suppress(RequestError, ImageError):
                self._ask_all(item, 0)
                self.predicted_s = (time.perf_counter() - start) * len(self.data.items)
                break
        return self.predicted_s

    def run(self, report: Report) -> None:
        """Ask everything; Ctrl-C ends it and keeps the questions that every method has answered.

        Raises:
            RequestError: too many questions do not fit the model.

        """
        items = self.data.items
        try:
            for number, item in enumerate(items):
                report("asking", number, len(items))
                self._one(item, number)
            report("asking", len(items), len(items))
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.interrupted = True
        Data(self.data.source, items[: len(self.found)], tuple(self.skipped))  # refuses too many skipped

    def _one(self, item: Item, number: int) -> None:
        try:
            self.found.append(self._ask_all(item, number))
        except (RequestError, ImageError) as e:
            self.skipped.append(f"{item.question[:40]!r}: {e}")

    def _ask_all(self, item: Item, number: int) -> dict[Method, Found]:
        pictures = tuple(self.model.prepare(image) for image in item.images)
        parts: list[Part] = [{"type": "image"} for _ in pictures]
        content: list[Part] = [*parts, {"type": "text", "text": item.question}]
        text = len(self.model.text.prompt([{"role": "user", "content": content}], 1)) - len(pictures)
        first = number % len(self.methods)
        order = (*self.methods[first:], *self.methods[:first])
        answers = dict[Method, tuple[Answer, int]]()
        for method in order:
            self._calls.clear()
            with Conversation(self.model, pictures) as conversation:
                answer = conversation.ask(item.question, method.k, self._options, reduce=method.reduce)
            answers[method] = answer, self._flops(answer, text)
        plainly = answers[self.methods[0]][0].token_ids
        return {
            method: _found(answer, flops, item, same=answer.token_ids == plainly)
            for method, (answer, flops) in answers.items()
        }

    def _flops(self, answer: Answer, text: int) -> int:
        """FLOPs of the tower and of a prompt of `text` tokens beside the vision rows that each layer had."""
        vision = self._worker.count_vision(split(self._calls)[0])
        return vision + prefill_flops(self._worker.decoder, make_schedule(answer.stats.vision_tokens_kept, text=text))


def _found(answer: Answer, flops: int, item: Item, *, same: bool) -> Found:
    stats, kept = answer.stats, answer.stats.vision_tokens_kept
    ended = answer.stopped == "end"
    return Found(
        right=None if item.answer is None else ended and plain(answer.text) == plain(item.answer),
        same=same,
        flops=flops,
        kv_bytes=stats.kv_bytes,
        vision_rows=fmean((*kept[1:], kept[-1])),
        full_layers=sum(rows > 0 for rows in kept),
        ms={name: stats.timings_ms[name] for name in ("vision", "prefill", "first_token", "decode_per_token")},
    )
