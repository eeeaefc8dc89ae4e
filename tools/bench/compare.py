"""From a trial to a verdict: accuracy and cost of each method, and of the withdrawal nearest to it in cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.strict import json_value
from vtx.tools.bench.ladder import Best, Ladder, find_best, verdict
from vtx.tools.bench.machine import Machine, describe
from vtx.tools.bench.measure import K
from vtx.tools.bench.methods import NONE, MethodAnswer, Trial
from vtx.tools.bench.series import Series, spread
from vtx.tools.data.intervals import CONFIDENCE, MeanInterval, ShareInterval, grouped_share, mean_intervals

FORMAT = "vtx-methods-2"
PHASES = ("vision", "prefill", "first_token", "second_question", "decode_per_token")
POINTS = 1.0  # a method answers as well as none when it loses at most this many points
COSTS = {"flops": "the arithmetic", "first_token": "the time to the first token"}
BETTER, WORSE, EQUAL = "better", "worse", "no difference beyond chance"


@dataclass(frozen=True, slots=True)
class MethodResult:
    """The answers and the mean cost of one method; `flops_ratio` is its FLOPs' share of those of no method.

    `right` and `same` are the shares of right answers, None if none is known, and of answers like those of no method.
    `ms` are milliseconds by phase, None if no answer has that phase.
    """

    name: str
    kind: str
    k: K
    reduce: str
    right: ShareInterval | None
    same: ShareInterval
    full_layers: float
    vision_rows: float
    flops: float
    flops_ratio: float
    kv_bytes: float
    reused_layers: float
    ms: Mapping[str, Series | None]

    @property
    def first_token(self) -> float:
        """Median milliseconds to the first token, which every answer has."""
        series = self.ms["first_token"]
        assert series is not None
        return series.median


@dataclass(frozen=True, slots=True)
class Compared:
    """A pruning method and the withdrawal of nearest FLOPs; `difference`: by how much the method answers more."""

    method: str
    withdrawal: str
    flops_ratio: float
    difference: MeanInterval
    verdict: str
    as_accurate: Mapping[str, Any] | None  # the cheapest `withdrawal` that answers as many, its share of the FLOPs


@dataclass(frozen=True, slots=True)
class Comparison:
    """All methods on the same questions. `score` names the deciding share; `budgets` are by the name of the cost.

    `model` was asked, `vision_tokens` are the most of an image. `data` has the number of questions that were answered,
    and a line for each that could not be asked.
    """

    machine: Machine
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    score: Literal["right", "same"]
    interrupted: bool
    predicted_s: float
    methods: tuple[MethodResult, ...]
    compared: tuple[Compared, ...]
    families: Mapping[str, tuple[str, ...]]
    budgets: Mapping[str, tuple[Best, ...]]
    verdict: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **json_value(self)}


def make_comparison(trial: Trial, ladder: Ladder | None = None, budgets: Sequence[float] = ()) -> Comparison:
    """Compare the methods of a trial. Intervals are 95%, over images; FLOPs, bytes and tokens are means over questions.

    `score` is the share of right answers, or of answers like those of no method if the data has no answers. With a
    `ladder`, the best setting of each of its families within each of `budgets`, by arithmetic and by first token.
    """
    unreduced = fmean(by_method[trial.methods[0]].flops for by_method in trial.answers)
    methods, images = list[MethodResult](), trial.images
    for method in trial.methods:
        answers = [by_method[method] for by_method in trial.answers]
        known_of = [(answer.right, n) for answer, n in zip(answers, images, strict=True) if answer.right is not None]
        rights, about = [right for right, _ in known_of], [n for _, n in known_of]
        mean = {n: fmean(getattr(a, n) for a in answers) for n in ("flops", "full_layers", "kv_bytes", "reused_layers")}
        times = {phase: [answer.ms[phase] for answer in answers if answer.ms[phase]] for phase in PHASES}
        methods.append(MethodResult(
            name=method.name, kind=method.kind, k=method.k, reduce=method.reduce,
            right=grouped_share(rights, about) if rights else None,
            same=grouped_share([answer.same for answer in answers], images),
            vision_rows=fmean(answer.vision_tokens for answer in answers), flops_ratio=mean["flops"] / unreduced,
            ms={phase: spread(values) if values else None for phase, values in times.items()}, **mean,
        ))  # fmt: skip
    known = methods[0].right is not None

    def score(answer: MethodAnswer) -> float:  # NaN if the right answer is unknown, though others are known
        right = answer.right if known else answer.same
        return np.nan if right is None else float(right)

    scores = np.array([[score(by_method[method]) for method in trial.methods] for by_method in trial.answers])
    compared = [_compare(methods, scores, number, images) for number, row in enumerate(methods) if row.reduce != NONE]
    costs = {"flops": [m.flops for m in methods], "first_token": [m.first_token for m in methods]}
    best = {
        name: find_best(ladder or {}, trial.methods, scores, values, budgets, images) for name, values in costs.items()
    }
    best = {name: rows for name, rows in best.items() if rows}
    sentences = [line for cost, rows in best.items() if scores.any() for line in verdict(rows, COSTS[cost])]
    m, backend = trial.model.manifest, trial.model.backend
    return Comparison(
        machine=describe(),
        model={
            "name": m.model.name, "layers": m.model.layers, "vision_tokens": m.layout.max_tokens,
            "precision": m.precision, "device": backend.device, "compute": backend.compute, "threads": trial.threads,
        },
        data={"source": trial.data.source, "items": len(trial.answers), "skipped": tuple(trial.skipped)},
        score="right" if known else "same", interrupted=trial.interrupted, predicted_s=trial.predicted_s,
        methods=tuple(methods), compared=tuple(compared),
        families={family: tuple(method.name for method in settings) for family, settings in (ladder or {}).items()},
        budgets=best, verdict=(*_verdict(methods, compared, len(trial.answers), scores, images), *sentences),
    )  # fmt: skip


def _difference(scores: NDArray[np.float64], column: int, other: int, images: Sequence[int]) -> MeanInterval:
    """Paired question by question, those about an image together."""
    differences = scores[:, column] - scores[:, other]
    known = ~np.isnan(differences)
    [interval] = mean_intervals(differences[known][:, None], np.asarray(images)[known].tolist())
    return interval


def _compare(
    methods: Sequence[MethodResult], scores: NDArray[np.float64], number: int, images: Sequence[int]
) -> Compared:
    """A method compared with two withdrawals (or K = none): the nearest in FLOPs, the cheapest that is as accurate."""
    method = methods[number]
    rivals = [n for n, other in enumerate(methods) if other.kind == "withdrawal"]
    rival = min(rivals, key=lambda n: abs(methods[n].flops - method.flops))
    difference = _difference(scores, number, rival, images)
    equals = [methods[n] for n in rivals if _difference(scores, n, number, images).mean >= 0]
    equal = min(equals, key=lambda other: other.flops, default=None)
    verdict = BETTER if difference.low > 0 else WORSE if difference.high < 0 else EQUAL
    return Compared(
        method=method.name, withdrawal=methods[rival].name, flops_ratio=methods[rival].flops / method.flops,
        difference=difference, verdict=verdict,
        as_accurate={"withdrawal": equal.name, "flops_ratio": equal.flops / method.flops} if equal else None,
    )  # fmt: skip


def _verdict(
    methods: Sequence[MethodResult], compared: Sequence[Compared], items: int, scores: NDArray[np.float64],
    images: Sequence[int],
) -> list[str]:  # fmt: skip
    if not scores.any():
        return [f"No method answers any of the {items} questions right, so accuracy decides nothing here."]
    sentences = []
    if compared:
        count = {verdict: sum(row.verdict == verdict for row in compared) for verdict in (BETTER, WORSE, EQUAL)}
        sentences.append(
            f"Of {len(compared)} pruning methods, each compared with the withdrawal of nearest arithmetic on {items} "
            f"questions, {count[BETTER]} answer better, {count[WORSE]} worse, and {count[EQUAL]} without a difference "
            f"beyond chance ({CONFIDENCE:.0%})."
        )
    good = [n for n in range(len(methods)) if 100 * _difference(scores, n, 0, images).mean >= -POINTS]
    for noun, kinds in (("method", None), ("withdrawal", ("withdrawal",))):
        fit = [methods[n] for n in good if kinds is None or methods[n].kind in kinds]
        cheapest = min(fit, key=lambda method: method.flops)
        sentences.append(
            f"The cheapest {noun} that loses at most {POINTS:g} point is {cheapest.name}: "
            f"{cheapest.flops_ratio:.0%} of the arithmetic without any."
        )
    return sentences
