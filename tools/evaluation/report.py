"""From answers to a report: each method's figures with intervals, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from vtx.runtime.bundle.card import KINDS
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import Machine, describe
from vtx.tools.bench.measure import K
from vtx.tools.bench.series import Series, spread
from vtx.tools.data.intervals import CONFIDENCE, DRAWS, clustered_share, resampled_sums, spread_of
from vtx.tools.data.kinds import kind_of
from vtx.tools.evaluation.ask import Asked, CostedAnswer, Evaluated
from vtx.tools.evaluation.coverage import CoveragePoint, ScoredAnswers
from vtx.tools.evaluation.metrics import Counts, Metric, Tally
from vtx.tools.evaluation.questions import TaskQuestion

FORMAT = "vtx-eval-1"


@dataclass(frozen=True, slots=True)
class FigureInterval:
    """A figure and its interval; None if resampling has no spread."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class GroupFigure(FigureInterval):
    """The main figure over the questions of one category, or over those whose right answers are of one kind."""

    questions: int


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method. FLOPs, bytes, tokens and layers are means over the questions, times milliseconds, None if left out.

    `coverage`: accuracy against coverage, if it was asked for.
    `difference` is how far the main figure exceeds the first method's on the same questions; None for the first.
    """

    name: str
    kind: str
    k: K
    reduce: str
    figures: Mapping[str, FigureInterval]
    flops: float
    kv_bytes: float
    vision_tokens: float
    full_layers: float
    new_tokens: float
    first_token_ms: Series | None
    difference: FigureInterval | None
    groups: Mapping[str, GroupFigure]
    rest: str | None
    kinds: Mapping[str, GroupFigure]
    coverage: tuple[CoveragePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The bundle, by its folder's name, and how it computes."""

    name: str
    bundle: str
    layers: int
    precision: str
    device: str
    compute: str


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """The benchmark and what was asked of it. Methods are compared by the figure `main`; `shares` are from 0 to 1."""

    name: str
    source: str
    questions: int
    images: int
    skipped: tuple[str, ...]
    instruction: str
    main: str
    shares: tuple[str, ...]
    protocol: str = "authors"

    @property
    def factor(self) -> int:
        """The factor of the main figure in tables: shares are shown in per cent."""
        return 100 if self.main in self.shares else 1


@dataclass(frozen=True, slots=True)
class TaskForm:
    """A benchmark, its questions' file, the suffix of each question, and whose protocol judges the answers."""

    name: str
    source: str
    instruction: str
    protocol: str = "authors"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation, with intervals of `confidence`; `front` names, for each cost, the methods on its Pareto front."""

    machine: Machine
    model: EvaluatedModel
    task: EvaluatedTask
    confidence: float
    methods: tuple[MethodFigures, ...]
    front: Mapping[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        """As its file holds it."""
        return {"format": FORMAT, **json_value(self)}


def make_report(
    asked: Asked, by: Evaluated, metric: Metric, task: TaskForm, *, times: bool, coverage: bool = False
) -> Evaluation:
    """The whole report; without `times`, e.g. on a busy machine, it has none."""
    questions = asked.questions
    scores = [
        [metric.judge(question, replies[n].text) for question, replies in zip(questions, asked.replies, strict=True)]
        for n in range(len(asked.methods))
    ]
    tallies = [metric.tally(questions, of_method) for of_method in scores]
    draws = _draws(tallies)
    main = tallies[0].main
    main_figure = tallies[0].figures[main]
    groups = sorted({question.group for question in questions})
    kinds = [kind_of(Counter(q.answers).most_common(1)[0][0], q.choices) for q in questions]
    methods = list[MethodFigures]()
    for n, (method, tally) in enumerate(zip(asked.methods, tallies, strict=True)):
        difference = None
        if n:
            value = float(main_figure(tally.counts.sum(0)) - main_figure(tallies[0].counts.sum(0)))
            difference = _interval(value, main_figure(draws[n]) - main_figure(draws[0]))
        by_group = partial(_by_group, metric, main, questions, scores[n])
        methods.append(
            MethodFigures(
                name=method.name,
                kind=method.kind,
                k=method.k,
                reduce=method.reduce,
                figures={name: _with_interval(tally, name, draws[n]) for name in tally.figures},
                **_costs([replies[n] for replies in asked.replies], times=times),
                difference=difference,
                groups=by_group([q.group for q in questions], groups if len(groups) > 1 else ()),
                rest=method.rest,
                kinds=by_group(kinds, KINDS),
                coverage=scored_answers(asked, metric, n).points() if coverage else (),
            )
        )
    m = by.bundle.manifest
    shares = tuple(sorted(tallies[0].shares))
    return Evaluation(
        machine=describe(),
        model=EvaluatedModel(m.model.name, by.bundle.folder.name, m.model.layers, m.precision, by.device, by.compute),
        task=EvaluatedTask(
            task.name,
            task.source,
            len(questions),
            len(tallies[0].counts),
            asked.skipped,
            task.instruction,
            main,
            shares,
            task.protocol,
        ),
        confidence=CONFIDENCE,
        methods=tuple(methods),
        front={cost: _front(methods, cost, main) for cost in COSTS if times or cost != "first_token_ms"},
    )


def _costs(replies: Sequence[CostedAnswer], *, times: bool) -> dict[str, Any]:
    """The mean cost of a method's answers, by the fields of `MethodFigures`."""
    fields = ("flops", "kv_bytes", "vision_tokens", "full_layers", "new_tokens")
    costs: dict[str, Any] = {name: fmean(getattr(reply, name) for reply in replies) for name in fields}
    times_ms = [reply.first_token_ms for reply in replies if reply.first_token_ms is not None]
    costs["first_token_ms"] = spread(times_ms) if times and times_ms else None
    return costs


def scored_answers(asked: Asked, metric: Metric, number: int = 0) -> ScoredAnswers:
    """The answers of method `number` with their probabilities. Raises RequestError: a journal has none of them."""
    probabilities = [replies[number].probability for replies in asked.replies]
    likely = [probability for probability in probabilities if probability is not None]
    if len(likely) < len(probabilities):
        raise RequestError("answers.jsonl has answers without probabilities; remove it, or name another --out")
    pairs = zip(asked.questions, asked.replies, strict=True)
    scores = [metric.judge(question, replies[number].text)[1] for question, replies in pairs]
    return ScoredAnswers(likely, scores, [question.image for question in asked.questions])


def _draws(tallies: Sequence[Tally]) -> list[Counts]:
    """For each tally the sums [draws, columns] of images resampled within each stratum, the same for all tallies."""
    rng = np.random.default_rng(0)
    strata = tallies[0].strata
    joined = np.hstack([tally.counts for tally in tallies])
    total: Counts = np.zeros((DRAWS, joined.shape[1]))
    for stratum in np.unique(strata):
        total += resampled_sums(joined[strata == stratum], rng)
    return np.split(total, len(tallies), axis=1)


def _by_group(
    metric: Metric,
    main: str,
    questions: Sequence[TaskQuestion],
    scores: Sequence[tuple[str, float]],
    own: Sequence[str],
    names: Sequence[str],
) -> dict[str, GroupFigure]:
    """The main figure of the questions of each of `names`; `own` has each question's."""
    figures = dict[str, GroupFigure]()
    for name in names:
        members = [number for number, other in enumerate(own) if other == name]
        if members:
            part = metric.tally([questions[m] for m in members], [scores[m] for m in members])
            of_part = _with_interval(part, main, _draws([part])[0])
            figures[name] = GroupFigure(of_part.value, of_part.low, of_part.high, len(members))
    return figures


def _with_interval(tally: Tally, name: str, draws: Counts) -> FigureInterval:
    """A figure of a tally with its interval, from the resampled sums `draws` if it is no plain accuracy."""
    value = float(tally.figures[name](tally.counts.sum(0)))
    if name == "accuracy" and tally.answered is not None:  # Wilson's interval is right at 0% and 100%, too
        share = clustered_share(*tally.answered.T)
        return FigureInterval(value, share.low, share.high)
    return _interval(value, tally.figures[name](draws))


def _interval(value: float, draws: Counts) -> FigureInterval:
    low, high = (float(end) for end in spread_of(draws))
    return FigureInterval(value, low, high) if high > low else FigureInterval(value, None, None)


def _front(methods: Sequence[MethodFigures], cost: str, main: str) -> tuple[str, ...]:
    """Names, in rising cost, of the methods that are better than every cheaper one."""
    front = list[str]()
    best = -np.inf
    for method in sorted(methods, key=lambda m: (COSTS[cost](m), -m.figures[main].value)):
        if method.figures[main].value > best:
            front.append(method.name)
            best = method.figures[main].value
    return tuple(front)


COSTS: Mapping[str, Callable[[MethodFigures], float]] = {
    "flops": lambda method: method.flops,
    "kv_bytes": lambda method: method.kv_bytes,
    "first_token_ms": lambda method: method.first_token_ms.median if method.first_token_ms else np.nan,
}
