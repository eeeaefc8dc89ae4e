"""Ask every method of a bundle the same questions in turn: its answers and their cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import ImageError, RequestError
from vtx.runtime.policies import Reduction, parse, to_spec
from vtx.runtime.units import Progress
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.bench.measure import K
from vtx.tools.bench.stopwatch import timed
from vtx.tools.bench.work import WorkCounter
from vtx.tools.data.items import Data, Item, image_key, plain

NONE = "none"
RANDOM = "random:keep=0.25", "random:keep=0.5"
SECOND = "What else is in the picture?", "Describe it."  # about the same images; the one that was not asked yet


@dataclass(frozen=True, slots=True)
class Method:
    """A withdrawal (`k`) to a `rest`, reductions before it (`reduce`, a canonical spec), both, or neither."""

    k: K
    reduce: str = NONE
    rest: str | None = None

    @property
    def name(self) -> str:
        depth = [] if self.k is None else ["gates" if self.k == "auto" else f"K = {self.k}"]
        depth += [] if self.rest is None else [f"rest {self.rest}"]
        return " + ".join([*map(short, parse(self.reduce)), *depth]) or NONE

    @property
    def key(self) -> str:
        """Its settings, as journals of answers have them."""
        return f"k={self.k} reduce={self.reduce}" + ("" if self.rest is None else f" rest={self.rest}")

    @property
    def kind(self) -> str:
        if self.reduce == NONE:
            return "gates" if self.k == "auto" else "withdrawal"
        return "pruning" if self.k is None else "both"


@dataclass(frozen=True, slots=True)
class MethodAnswer:
    """One answer and its cost; `right`: it equals the data's (None: unknown), `same`: it equals that of no method.

    `vision_tokens` is the mean number of image tokens after a layer; `full_layers` counts layers that see at least one.
    FLOPs are those of the tower and of the prompt in one chunk. `reused_layers`: in layers 1 to this one a
    second question about the same image runs no image token; "second_question" in `ms` is its first token.
    """

    right: bool | None
    same: bool
    flops: int
    kv_bytes: int
    vision_tokens: float
    full_layers: int
    reused_layers: int
    ms: dict[str, float]


def find_methods(manifest: Manifest, ks: Sequence[K]) -> tuple[Method, ...]:
    """No method, each of `ks`, each exported reduction, and each of these followed by one withdrawal.

    Tokens drawn at random stand beside them, where the model's layout allows it: a method that does not beat these is
    worth nothing.
    """
    specs = [spec for spec in manifest.reductions if spec != NONE]
    drawn = [to_spec(parse(spec)) for spec in RANDOM]
    alone = not specs and not any(ks)
    if alone or any("random" in spec for spec in specs) or read_layout(manifest.layout, manifest.model.tower).has_text:
        drawn = []
    fixed = [k for k in ks if isinstance(k, int)]
    k = manifest.default_k if manifest.default_k in fixed else fixed[len(fixed) // 2] if fixed else None
    both = [Method(k, spec) for spec in specs] if k is not None else []
    return (Method(None), *(Method(k) for k in ks if k is not None), *(Method(None, spec) for spec in specs), *both,
            *(Method(None, spec) for spec in drawn))  # fmt: skip


def short(part: Reduction) -> str:
    """A reduction's spec for tables: its preset, or what is not the default; thresholds, shares, `k` always."""
    values, defaults = _options(part), _options(type(part)())
    always = [key for key in values if key == "k" or isinstance(getattr(part, key), float)]
    keys = [key for key in values if values[key] != defaults[key] or key in always]
    start = []
    for name, preset in part.presets.items():
        if all(getattr(part, key) == value for key, value in preset.items()):
            start, keys = [name], [key for key in values if values[key] != defaults[key] and key not in preset]
            break
    return f"{part.name}:{','.join([*start, *(f'{key}={values[key]}' for key in keys)])}"


def _options(part: Reduction) -> dict[str, str]:
    """A reduction's options as its canonical spec writes them."""
    return dict(item.split("=") for item in to_spec((part,)).partition(":")[2].split(","))


class Trial:
    """The questions of `data`, asked of each of `methods` in turn.

    `answers` are kept question by question, and in `images` the number of what each is about.
    """

    def __init__(self, model: Model, data: Data, methods: Sequence[Method], new_tokens: int, threads: int) -> None:
        self.threads = threads
        backend, self._calls = timed(model.backend)
        self.model, self.data, self.methods = Model(model.bundle, backend, model.loaded.load_ms), data, tuple(methods)
        self._options, self._one_token = Options(max_new_tokens=new_tokens), Options(max_new_tokens=1)
        self._counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)
        self.answers: list[dict[Method, MethodAnswer]] = []
        self.images = list[int]()
        self.skipped, self.interrupted, self.predicted_s = list(data.skipped), False, 0.0

    def probe(self) -> float:
        """Ask every method the first question that fits; return a rough estimate of the seconds that `run` takes."""
        for item in self.data.items:
            start = time.perf_counter()
            with contextlib.suppress(RequestError, ImageError):
                self._ask_all(item, 0)
                self.predicted_s = (time.perf_counter() - start) * len(self.data.items)
                break
        return self.predicted_s

    def run(self, report: Progress) -> None:
        """Ask everything; Ctrl-C stops and keeps the questions that every method has answered. Raises RequestError."""
        items, numbers = self.data.items, dict[object, int]()
        try:
            for number, item in enumerate(items):
                report("asking", number, len(items))
                try:
                    self.answers.append(self._ask_all(item, number))
                    about = tuple(map(image_key, item.images)) or item.question
                    self.images.append(numbers.setdefault(about, len(numbers)))
                except (RequestError, ImageError) as e:
                    self.skipped.append(f"{item.question[:40]!r}: {e}")
            report("asking", len(items), len(items))
        except KeyboardInterrupt:
            if not self.answers:
                raise
            self.interrupted = True
        Data(self.data.source, items[: len(self.answers)], tuple(self.skipped))  # refuses too many skipped

    def _ask_all(self, item: Item, number: int) -> dict[Method, MethodAnswer]:
        images = self.model.loaded.prepare_all(item.images)
        first = number % len(self.methods)
        order = (*self.methods[first:], *self.methods[:first])
        answers = dict[Method, tuple[Answer, Answer, int]]()
        for method in order:
            self._calls.clear()
            with Conversation(self.model.loaded, images) as conversation:
                answer = conversation.ask(
                    item.question, method.k, self._options, rest=method.rest, reduce=method.reduce
                )
                flops = self._counter.first_token(answer.stats, self._calls)
                other = next(question for question in SECOND if question != item.question)
                second = conversation.ask(other, method.k, self._one_token, rest=method.rest, reduce=method.reduce)
            answers[method] = answer, second, flops
        unreduced = answers[self.methods[0]][0].token_ids
        return {
            method: _method_answer(answer, second, flops, item, same=answer.token_ids == unreduced)
            for method, (answer, second, flops) in answers.items()
        }


def _method_answer(answer: Answer, second: Answer, flops: int, item: Item, *, same: bool) -> MethodAnswer:
    stats, kept = answer.stats, answer.stats.vision_tokens_kept
    ended = answer.stopped == "end"
    ms = {name: stats.timings_ms[name] for name in ("vision", "prefill", "first_token", "decode_per_token")}
    return MethodAnswer(
        right=None if item.answer is None else ended and plain(answer.text) == plain(item.answer), same=same,
        flops=flops, kv_bytes=stats.kv_bytes, vision_tokens=fmean((*kept[1:], kept[-1])),
        full_layers=sum(tokens > 0 for tokens in kept), reused_layers=second.stats.reused_layers,
        ms={**ms, "second_question": second.stats.timings_ms["first_token"]},
    )  # fmt: skip
