"""Every question under every method; each answer and its cost are kept as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import ImageError, RequestError, TemplateError
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.strict import Strict, json_value
from vtx.runtime.units import Progress
from vtx.runtime.vision.video import video
from vtx.tools.bench.methods import NONE, Method
from vtx.tools.bench.stopwatch import timed
from vtx.tools.bench.work import WorkCounter
from vtx.tools.data.items import check_skipped
from vtx.tools.data.journal import ResultJournal
from vtx.tools.evaluation.questions import QuestionSet, TaskQuestion

BAD = (ImageError, RequestError, TemplateError)  # a question's own fault; anything else ends the evaluation
STRICT = Strict(RequestError, "answers.jsonl is damaged, remove it")


@dataclass(frozen=True, slots=True)
class CostedAnswer:
    """An answer and what it cost. `flops` are those until the first token, `vision_tokens` a layer's mean."""

    text: str
    first_token_ms: float
    kv_bytes: int
    flops: int
    vision_tokens: float
    full_layers: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions that every method has answered, and `replies` [questions][methods]."""

    questions: tuple[TaskQuestion, ...]
    methods: tuple[Method, ...]
    replies: tuple[tuple[CostedAnswer, ...], ...]
    skipped: tuple[str, ...]


def make_methods(ks: Sequence[int | str | None], reduces: Sequence[str]) -> tuple[Method, ...]:
    """Each K with each reduction, K first; "none" is neither."""
    specs = [NONE if spec == NONE else to_spec(parse(spec)) for spec in reduces]
    return tuple(dict.fromkeys(Method(k, spec) for spec in specs for k in ks))


def check_methods(model: Model, methods: Sequence[Method]) -> None:
    """Raise RequestError for a method that the bundle was not exported for."""
    for method in methods:
        model.loaded.policy(method.k, None, method.reduce)


def ask_all(
    model: Model, data: QuestionSet, methods: Sequence[Method], max_new_tokens: int, journal: Path, *,
    report: Progress, predict: Callable[[float], None], guide: Guide | None = None,
) -> Asked:  # fmt: skip
    """Ask what `journal` does not hold yet. `predict` gets the total seconds, estimated from the first question.

    Each answer comes from a new conversation, so that its first token includes the tower and the whole prompt. Raises
    RequestError for a method that the bundle lacks, a journal of another bundle, or too many bad questions.
    """
    check_methods(model, methods)
    options = Options(max_new_tokens=max_new_tokens, guide=guide)
    asker, skipped = Asker(model, options), list(data.skipped)
    kept, replies = list[TaskQuestion](), list[tuple[CostedAnswer, ...]]()
    identity = {
        "model": sha256(model.bundle.folder / "vtx.json"), "device": [model.backend.device, model.backend.compute],
        "--max-new-tokens": max_new_tokens, "--fit": model.loaded.fit,
        **({} if guide is None else {"--choices": list(guide.choices or ())}),
    }  # fmt: skip
    with ResultJournal(journal, identity) as held:
        keys = [[f"{q.digest()} k={m.k} reduce={m.reduce}" for m in methods] for q in data.questions]
        left = [n for n, names in enumerate(keys) if not all(name in held.results for name in names)]
        start, done = time.monotonic(), len(keys) - len(left)
        for turn, n in enumerate(left):
            report("questions", done + turn, len(keys))
            missing = {m: key for m, key in zip(methods, keys[n], strict=True) if key not in held.results}
            try:
                answers = asker(data.questions[n], tuple(missing), turn)
            except BAD as e:
                skipped.append(f"{data.questions[n].text[:40]!r}: {e}")
                check_skipped(data.source, len(keys), skipped, "questions")
                continue
            held.add({missing[method]: json_value(reply) for method, reply in answers.items()})
            if turn == 0:
                predict((time.monotonic() - start) * len(left))
        report("questions", len(keys), len(keys))
        for question, names in zip(data.questions, keys, strict=True):
            if all(name in held.results for name in names):
                kept.append(question)
                replies.append(tuple(STRICT.read(CostedAnswer, held.results[name], "an answer") for name in names))
    check_skipped(data.source, len(kept), skipped, "questions")
    return Asked(tuple(kept), tuple(methods), tuple(replies), tuple(skipped))


class Asker:
    """Asks one question under several methods, and counts the work of each."""

    def __init__(self, model: Model, options: Options) -> None:
        backend, self._calls = timed(model.backend)
        self._model, self._options = Model(model.bundle, backend, model.loaded.load_ms, fit=model.loaded.fit), options
        self._counter = WorkCounter(model.bundle, model.backend.compute, model.backend.kv_slot_bytes)

    def __call__(self, question: TaskQuestion, methods: Sequence[Method], number: int) -> dict[Method, CostedAnswer]:
        """The methods take turns at being first, so that none of them always runs with cold caches."""
        if not methods:  # the question is in the data twice
            return {}
        images = self._model.loaded.prepare_all([*question.images, *map(video, question.videos)])
        first = number % len(methods)
        replies = dict[Method, CostedAnswer]()
        for method in (*methods[first:], *methods[:first]):
            self._calls.clear()
            with Conversation(self._model.loaded, images) as conversation:
                entries = self._model.loaded.policy(method.k, None, method.reduce).entries
                about = question.about if any(entry.uses_question for entry in entries) else None
                options = replace(self._options, about=about)
                answer = conversation.ask(question.text, method.k, options, reduce=method.reduce)
            stats = answer.stats
            kept = stats.vision_tokens_kept
            replies[method] = CostedAnswer(
                text=answer.text, first_token_ms=stats.timings_ms["first_token"], kv_bytes=stats.kv_bytes,
                flops=self._counter.first_token(stats, self._calls), vision_tokens=fmean((*kept[1:], kept[-1])),
                full_layers=sum(tokens > 0 for tokens in kept), new_tokens=len(answer.token_ids),
            )  # fmt: skip
        return replies
