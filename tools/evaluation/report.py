"""From answers to a report: each method's figures with intervals beside its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from vtx.runtime.api.model import Model
from vtx.runtime.strict import json_value
from vtx.tools.bench.machine import Machine, describe
from vtx.tools.bench.measure import K
from vtx.tools.bench.methods import Method
from vtx.tools.bench.series import Series, spread
from vtx.tools.data.intervals import CONFIDENCE, DRAWS, effective_count, resampled_sums, spread_of, wilson
from vtx.tools.evaluation.ask import Asked, CostedAnswer
from vtx.tools.evaluation.metrics import Counts, Metric, Tally
from vtx.tools.evaluation.questions import TaskQuestion

FORMAT = "vtx-eval-1"
Scores = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class FigureInterval:
    """A figure and its interval; None where resampling has no spread."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class GroupFigure:
    """The main figure over the questions of one category."""

    value: float
    questions: int


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method. FLOPs, bytes, tokens and layers are means over the questions, times milliseconds, None if left out.

    `difference` is that of the main figure to the first method's over the same questions, None for the first itself.
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

    @property
    def factor(self) -> int:
        """What the main figure is multiplied by to be shown: shares are shown in per cent."""
        return 100 if self.main in self.shares else 1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation; `confidence` is that of its intervals. `front` names, for each cost, the methods that no
    cheaper one equals.
    """

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
    task: str, metric: Metric, source: str, asked: Asked, model: Model, *, instruction: str, times: bool
) -> Evaluation:
    """The whole report, without times where they say nothing."""
    pairs = [*zip(asked.questions, asked.replies, strict=True)]
    scores = [
        [metric.judge(question, by_method[n].text) for question, by_method in pairs] for n in range(len(asked.methods))
    ]
    tallies = [metric.tally(asked.questions, of_method) for of_method in scores]
    draws = _draws(tallies)
    methods = tuple(
        _method(
            method, [by_method[n] for by_method in asked.replies], _figures(tallies[n], draws[n]),
            _difference(tallies, draws, n), _groups(metric, asked.questions, scores[n]), times=times,
        )
        for n, method in enumerate(asked.methods)
    )  # fmt: skip
    first = tallies[0]
    return Evaluation(
        machine=describe(),
        model=_model(model),
        task=EvaluatedTask(
            task, source, len(asked.questions), len(first.counts), asked.skipped, instruction, first.main,
            tuple(sorted(first.shares)),
        ),
        confidence=CONFIDENCE,
        methods=methods,
        front={cost: _front(methods, cost, first.main) for cost in COSTS if times or cost != "first_token_ms"},
    )  # fmt: skip


def _model(model: Model) -> EvaluatedModel:
    manifest, backend = model.manifest, model.backend
    return EvaluatedModel(
        name=manifest.model.name,
        bundle=model.bundle.folder.name,
        layers=manifest.model.layers,
        precision=manifest.precision,
        device=backend.device,
        compute=backend.compute,
    )


def _method(
    method: Method, replies: Sequence[CostedAnswer], figures: Mapping[str, FigureInterval],
    difference: FigureInterval | None, groups: Mapping[str, GroupFigure], *, times: bool,
) -> MethodFigures:  # fmt: skip
    return MethodFigures(
        name=method.name,
        kind=method.kind,
        k=method.k,
        reduce=method.reduce,
        figures=figures,
        flops=fmean(reply.flops for reply in replies),
        kv_bytes=fmean(reply.kv_bytes for reply in replies),
        vision_tokens=fmean(reply.vision_tokens for reply in replies),
        full_layers=fmean(reply.full_layers for reply in replies),
        new_tokens=fmean(reply.new_tokens for reply in replies),
        first_token_ms=spread([reply.first_token_ms for reply in replies]) if times else None,
        difference=difference,
        groups=groups,
    )


def _draws(tallies: Sequence[Tally]) -> list[Counts]:
    """For each tally the sums [draws, columns] of images drawn again, the same ones for all; each stratum by itself."""
    rng, strata = np.random.default_rng(0), tallies[0].strata
    beside = np.hstack([tally.counts for tally in tallies])
    total: Counts = np.zeros((DRAWS, beside.shape[1]))
    for stratum in np.unique(strata):
        total += resampled_sums(beside[strata == stratum], rng)
    return np.split(total, len(tallies), axis=1)


def _figures(tally: Tally, draws: Counts) -> dict[str, FigureInterval]:
    """Each figure with its interval; accuracies of whole questions have Wilson's, which knows 0% and 100%."""
    figures = {}
    total = tally.counts.sum(0)
    for name, figure in tally.figures.items():
        value = float(figure(total))
        low, high = _wilson(tally, name) or _ends(figure(draws))
        figures[name] = FigureInterval(value, low, high)
    return figures


def _wilson(tally: Tally, name: str) -> tuple[float, float] | None:
    """For answers that are right or wrong, with the count that questions about so many images are worth."""
    if name != "accuracy" or tally.answered is None:
        return None
    hits, counts = tally.answered.T
    return wilson(float(hits.sum() / counts.sum()), effective_count(hits, counts))


def _ends(draws: Counts) -> tuple[float | None, float | None]:
    low, high = (float(end) for end in spread_of(draws))
    return (low, high) if high > low else (None, None)


def _difference(tallies: Sequence[Tally], draws: Sequence[Counts], n: int) -> FigureInterval | None:
    """The main figure of method `n` less that of the first one: the same draws of images for both."""
    if n == 0:
        return None
    figure = tallies[0].figures[tallies[0].main]
    low, high = _ends(figure(draws[n]) - figure(draws[0]))
    value = float(figure(tallies[n].counts.sum(0)) - figure(tallies[0].counts.sum(0)))
    return FigureInterval(value, low, high)


def _groups(metric: Metric, questions: Sequence[TaskQuestion], scores: Scores) -> dict[str, GroupFigure]:
    """The main figure of each of the benchmark's own categories, where there are several."""
    names = sorted({question.group for question in questions})
    if len(names) < 2:
        return {}
    groups = {}
    for name in names:
        rows = [n for n, question in enumerate(questions) if question.group == name]
        tally = metric.tally([questions[n] for n in rows], [scores[n] for n in rows])
        groups[name] = GroupFigure(float(tally.figures[tally.main](tally.counts.sum(0))), len(rows))
    return groups


def _front(methods: Sequence[MethodFigures], cost: str, main: str) -> tuple[str, ...]:
    """Names, in rising cost, of the methods that are better than every cheaper one."""
    front, best = list[str](), -np.inf
    for method in sorted(methods, key=lambda m: (COSTS[cost](m), -m.figures[main].value)):
        if method.figures[main].value > best:
            front.append(method.name)
            best = method.figures[main].value
    return tuple(front)


def _first_token(method: MethodFigures) -> float:
    assert method.first_token_ms is not None  # no front is drawn of times that were left out
    return method.first_token_ms.median


COSTS: Mapping[str, Callable[[MethodFigures], float]] = {
    "flops": lambda method: method.flops,
    "kv_bytes": lambda method: method.kv_bytes,
    "first_token_ms": _first_token,
}
