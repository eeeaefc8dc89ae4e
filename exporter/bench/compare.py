"""From a trial to a verdict: accuracy and cost of each method, and of the withdrawal that is nearest to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bench.ladder import Best, Ladder, find_best, verdict
from vtx.exporter.bench.machine import describe, in_words
from vtx.exporter.bench.methods import Method, MethodAnswer, Trial
from vtx.exporter.bench.series import Series, markdown, shown, spread
from vtx.exporter.data.intervals import CONFIDENCE, Interval, mean_intervals, share_interval
from vtx.runtime.units import size

FORMAT = "vtx-methods-2"
PHASES = ("vision", "prefill", "first_token", "second_question", "decode_per_token")
POINTS = 1.0  # a method answers as well as none when it loses at most this many points
COSTS = {"flops": "the arithmetic", "first_token": "the time to the first token"}
BETTER, WORSE, EQUAL = "better", "worse", "no difference beyond chance"


def make_comparison(trial: Trial, ladder: Ladder | None = None, budgets: Sequence[float] = ()) -> dict[str, Any]:
    """The comparison, ready for JSON. Intervals are 95%; FLOPs, bytes and tokens are means over the questions.

    `score` is the share of right answers, or of answers like those of no method where the data has no answers. With a
    `ladder`, the best setting of each of its families within each of `budgets`, by arithmetic and by first token.
    """
    methods = [_method(method, [by_method[method] for by_method in trial.answers]) for method in trial.methods]
    known = methods[0]["right"] is not None
    for method in methods:
        method["flops_ratio"] = method["flops"] / methods[0]["flops"]
    scores = np.array([[_score(by_method[method], known) for method in trial.methods] for by_method in trial.answers])
    compared = [
        _compare(methods, scores, number) for number, method in enumerate(methods) if method["reduce"] != "none"
    ]
    report: dict[str, Any] = {
        "format": FORMAT,
        "machine": describe(),
        "model": {
            "name": trial.model.manifest.model.name,
            "layers": trial.model.manifest.model.layers,
            "vision_tokens": trial.model.manifest.layout.max_tokens,
            "precision": trial.model.manifest.precision,
            "device": trial.model.backend.device,
            "compute": trial.model.backend.compute,
            "threads": trial.threads,
        },
        "data": {"source": trial.data.source, "items": len(trial.answers), "skipped": trial.skipped},
        "score": "right" if known else "same",
        "interrupted": trial.interrupted,
        "predicted_s": trial.predicted_s,
        "methods": methods,
        "compared": compared,
    }
    found = _within_budgets(trial.methods, methods, scores, ladder or {}, budgets)
    report["families"] = {family: [method.name for method in settings] for family, settings in (ladder or {}).items()}
    report["budgets"] = {cost: [asdict(row) for row in rows] for cost, rows in found.items()}
    sentences = [line for cost, rows in found.items() if scores.any() for line in verdict(rows, COSTS[cost])]
    return {**report, "verdict": [*_verdict(report, scores), *sentences]}


def _within_budgets(
    methods: Sequence[Method],
    measured: Sequence[Mapping[str, Any]],
    scores: NDArray[np.float64],
    ladder: Ladder,
    budgets: Sequence[float],
) -> dict[str, tuple[Best, ...]]:
    """By the name of the cost, each family's best within each budget."""
    costs = {
        "flops": [method["flops"] for method in measured],
        "first_token": [method["ms"]["first_token"]["median"] for method in measured],
    }
    found = {name: find_best(ladder, methods, scores, values, budgets) for name, values in costs.items()}
    return {name: rows for name, rows in found.items() if rows}


def _method(method: Method, answers: Sequence[MethodAnswer]) -> dict[str, Any]:
    rights = [answer.right for answer in answers if answer.right is not None]
    return {
        "name": method.name,
        "kind": method.kind,
        "k": method.k,
        "reduce": method.reduce,
        "right": share_interval(sum(rights), len(rights)) if rights else None,
        "same": share_interval(sum(answer.same for answer in answers), len(answers)),
        "full_layers": _mean(answers, lambda answer: answer.full_layers),
        "vision_rows": _mean(answers, lambda answer: answer.vision_tokens),
        "flops": _mean(answers, lambda answer: answer.flops),
        "kv_bytes": _mean(answers, lambda answer: answer.kv_bytes),
        "reused_layers": _mean(answers, lambda answer: answer.reused_layers),
        "ms": {phase: _times(answers, phase) for phase in PHASES},
    }


def _mean(answers: Sequence[MethodAnswer], of: Callable[[MethodAnswer], float]) -> float:
    return float(np.mean([of(answer) for answer in answers]))


def _times(answers: Sequence[MethodAnswer], phase: str) -> Series | None:
    """Answers of one token have no time per further token."""
    values = [answer.ms[phase] for answer in answers if answer.ms[phase]]
    return spread(values) if values else None


def _score(answer: MethodAnswer, known: bool) -> float:
    """1 for a right answer; NaN where the right answer is unknown, though others are known."""
    if not known:
        return float(answer.same)
    return np.nan if answer.right is None else float(answer.right)


def _difference(scores: NDArray[np.float64], column: int, other: int) -> Interval:
    """Paired difference of the scores in `column` and `other`: mean and interval."""
    differences = scores[:, column] - scores[:, other]
    [interval] = mean_intervals(differences[~np.isnan(differences)][:, None])
    return interval


def _compare(methods: Sequence[Mapping[str, Any]], scores: NDArray[np.float64], number: int) -> dict[str, Any]:
    """A method beside two withdrawals, K = none among them: the nearest in FLOPs, the cheapest that is as accurate."""
    method = methods[number]
    rivals = [n for n, other in enumerate(methods) if other["kind"] == "withdrawal"]
    rival = min(rivals, key=lambda n: abs(methods[n]["flops"] - method["flops"]))
    difference = _difference(scores, number, rival)
    equals = [methods[n] for n in rivals if _difference(scores, n, number)["mean"] >= 0]
    equal = min(equals, key=lambda other: float(other["flops"]), default=None)
    verdict = BETTER if difference["low"] > 0 else WORSE if difference["high"] < 0 else EQUAL
    return {
        "method": method["name"],
        "withdrawal": methods[rival]["name"],
        "flops_ratio": methods[rival]["flops"] / method["flops"],
        "difference": difference,
        "verdict": verdict,
        "as_accurate": equal and {"withdrawal": equal["name"], "flops_ratio": equal["flops"] / method["flops"]},
    }


def _verdict(report: Mapping[str, Any], scores: NDArray[np.float64]) -> list[str]:
    """The conclusions of the table, in sentences."""
    compared, methods, items = report["compared"], report["methods"], report["data"]["items"]
    if not scores.any():
        return [f"No method answers any of the {items} questions right, so accuracy decides nothing here."]
    sentences = []
    if compared:
        count = {verdict: sum(row["verdict"] == verdict for row in compared) for verdict in (BETTER, WORSE, EQUAL)}
        sentences.append(
            f"Of {len(compared)} pruning methods, each compared with the withdrawal of nearest arithmetic on {items} "
            f"questions, {count[BETTER]} answer better, {count[WORSE]} worse, and {count[EQUAL]} without a difference "
            f"beyond chance ({CONFIDENCE:.0%})."
        )
    good = [n for n in range(len(methods)) if 100 * _difference(scores, n, 0)["mean"] >= -POINTS]
    for noun, kinds in (("method", None), ("withdrawal", ("withdrawal",))):
        fit = [methods[n] for n in good if kinds is None or methods[n]["kind"] in kinds]
        cheapest = min(fit, key=lambda method: float(method["flops"]))
        sentences.append(
            f"The cheapest {noun} that loses at most {POINTS:g} point is {cheapest['name']}: "
            f"{cheapest['flops_ratio']:.0%} of the arithmetic without any."
        )
    return sentences


# --- as text --------------------------------------------------------------------------------------


def in_tables(report: Mapping[str, Any]) -> str:
    """The comparison as text: machine, model and data, two Markdown tables, the verdict."""
    model, data = report["model"], report["data"]
    skipped = f", {len(data['skipped'])} skipped" if data["skipped"] else ""
    cut_short = " INTERRUPTED: fewer questions than requested." if report["interrupted"] else ""
    parts = [
        in_words(report["machine"]),
        f"{model['name']}, {model['layers']} layers, {model['vision_tokens']} vision tokens an image, "
        f"{model['precision']} weights, on {model['device']} in {model['compute']} arithmetic with "
        f"{model['threads']} threads; {data['items']} questions of {data['source']}{skipped}.{cut_short} "
        "Milliseconds are medians with quartiles, the rest means.",
        markdown([METHOD_HEADS, *map(_method_row, report["methods"])]),
    ]
    if report["compared"]:
        parts += [
            "Each pruning method beside the withdrawal of nearest FLOPs, and the cheapest withdrawal that answers "
            "at least as many questions:",
            markdown([COMPARED_HEADS, *map(_compared_row, report["compared"])]),
        ]
    for cost, rows in report["budgets"].items():
        parts += [
            f"Each method's best setting within a share of {COSTS[cost]} without any, chosen by half of the questions "
            "and judged by the other half:",
            markdown([BUDGET_HEADS, *(_budget_row(row, report["methods"]) for row in rows)]),
        ]
    return "\n\n".join([*parts, "\n".join(report["verdict"])])


METHOD_HEADS = (
    "method", "right, %", "as none, %", "full layers", "vision tokens", "GFLOPs", "of none", "vision", "prefill",
    "first token", "second question", "per token", "layers reused", "KV cache",
)  # fmt: skip
COMPARED_HEADS = (
    "method", "withdrawal at its cost", "FLOPs, of the method's", "method better by, points", "the method is",
    "withdrawal as accurate", "FLOPs, of the method's",
)  # fmt: skip
BUDGET_HEADS = (
    "within", "best setting", "cost", "good answers, %", "behind, points", "first token", "second question",
    "per token", "layers reused", "KV cache",
)  # fmt: skip


def _budget_row(row: Mapping[str, Any], methods: Sequence[Mapping[str, Any]]) -> list[str]:
    method = next(method for method in methods if method["name"] == row["method"])
    times = [
        shown(method["ms"][phase]) if method["ms"][phase] else "-"
        for phase in ("first_token", "second_question", "decode_per_token")
    ]
    behind = [f"{100 * row['behind'][name]:.1f}" for name in ("mean", "low", "high")]
    return [
        f"{row['budget']:.0%}", row["method"], f"{row['cost']:.0%}", _percent(row["score"]),
        f"{behind[0]} ({behind[1]} to {behind[2]})", *times, f"{method['reused_layers']:.1f}",
        size(method["kv_bytes"]),
    ]  # fmt: skip


def _method_row(method: Mapping[str, Any]) -> list[str]:
    times = [shown(method["ms"][phase]) if method["ms"][phase] else "-" for phase in PHASES]
    return [
        method["name"], _percent(method["right"]), _percent(method["same"]), f"{method['full_layers']:.1f}",
        f"{method['vision_rows']:.1f}", f"{method['flops'] / 1e9:.3g}", f"{method['flops_ratio']:.0%}", *times,
        f"{method['reused_layers']:.1f}", size(method["kv_bytes"]),
    ]  # fmt: skip


def _percent(share: Interval | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share['share']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"


def _compared_row(comparison: Mapping[str, Any]) -> list[str]:
    difference = comparison["difference"]
    points = [f"{100 * difference[name]:+.1f}" for name in ("mean", "low", "high")]
    return [
        comparison["method"], comparison["withdrawal"], f"{comparison['flops_ratio']:.0%}",
        f"{points[0]} ({points[1]} to {points[2]})", comparison["verdict"], *_as_accurate(comparison["as_accurate"]),
    ]  # fmt: skip


def _as_accurate(equal: Mapping[str, Any] | None) -> list[str]:
    return ["none of them", "-"] if equal is None else [equal["withdrawal"], f"{equal['flops_ratio']:.0%}"]
