"""From a trial to a verdict: accuracy and cost of each method, and of the withdrawal that is nearest to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.bench.machine import describe, in_words
from vtx.exporter.bench.methods import Found, Method, Trial
from vtx.exporter.bench.series import Series, markdown, shown, spread
from vtx.exporter.data.intervals import CONFIDENCE, Interval, mean_intervals, share_interval
from vtx.runtime.units import size

FORMAT = "vtx-methods-1"
PHASES = ("vision", "prefill", "first_token", "decode_per_token")
POINTS = 1.0  # a method answers as well as none when it loses no more than so many points
BETTER, WORSE, EQUAL = "better", "worse", "no difference beyond chance"


def make_comparison(trial: Trial) -> dict[str, Any]:
    """Everything as plain data, ready for JSON. Intervals are 95%; FLOPs, bytes and rows are means over the questions.

    `score` is the share of right answers, or of answers like those of no method where the data holds none.
    """
    methods = [_method(method, [row[method] for row in trial.found]) for method in trial.methods]
    known = methods[0]["right"] is not None
    for method in methods:
        method["flops_ratio"] = method["flops"] / methods[0]["flops"]
    scores = np.array([[_score(row[method], known) for method in trial.methods] for row in trial.found])
    compared = [_compare(methods, scores, number) for number, one in enumerate(methods) if one["reduce"] != "none"]
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
        "data": {"source": trial.data.source, "items": len(trial.found), "skipped": trial.skipped},
        "score": "right" if known else "same",
        "interrupted": trial.interrupted,
        "predicted_s": trial.predicted_s,
        "methods": methods,
        "compared": compared,
    }
    return {**report, "verdict": _verdict(report, scores)}


def _method(method: Method, found: Sequence[Found]) -> dict[str, Any]:
    rights = [one.right for one in found if one.right is not None]
    return {
        "name": method.name,
        "kind": method.kind,
        "k": method.k,
        "reduce": method.reduce,
        "right": share_interval(sum(rights), len(rights)) if rights else None,
        "same": share_interval(sum(one.same for one in found), len(found)),
        "full_layers": _mean(found, lambda one: one.full_layers),
        "vision_rows": _mean(found, lambda one: one.vision_rows),
        "flops": _mean(found, lambda one: one.flops),
        "kv_bytes": _mean(found, lambda one: one.kv_bytes),
        "ms": {phase: _times(found, phase) for phase in PHASES},
    }


def _mean(found: Sequence[Found], of: Callable[[Found], float]) -> float:
    return float(np.mean([of(one) for one in found]))


def _times(found: Sequence[Found], phase: str) -> Series | None:
    """Answers of one token have no time per further token."""
    values = [one.ms[phase] for one in found if one.ms[phase]]
    return spread(values) if values else None


def _score(found: Found, known: bool) -> float:
    """Questions whose answer is not known count as not a number where others' are."""
    if not known:
        return float(found.same)
    return np.nan if found.right is None else float(found.right)


def _difference(scores: NDArray[np.float64], one: int, other: int) -> Interval:
    """How much more of the questions `one` answers, mean and interval, question by question."""
    differences = scores[:, one] - scores[:, other]
    [found] = mean_intervals(differences[~np.isnan(differences)][:, None])
    return found


def _compare(methods: Sequence[Mapping[str, Any]], scores: NDArray[np.float64], number: int) -> dict[str, Any]:
    """A method beside two withdrawals, K = none among them: the nearest in FLOPs, the cheapest that is as accurate."""
    one = methods[number]
    rivals = [n for n, method in enumerate(methods) if method["kind"] == "withdrawal"]
    rival = min(rivals, key=lambda n: abs(methods[n]["flops"] - one["flops"]))
    difference = _difference(scores, number, rival)
    equals = [methods[n] for n in rivals if _difference(scores, n, number)["mean"] >= 0]
    equal = min(equals, key=lambda method: float(method["flops"]), default=None)
    verdict = BETTER if difference["low"] > 0 else WORSE if difference["high"] < 0 else EQUAL
    return {
        "method": one["name"],
        "withdrawal": methods[rival]["name"],
        "flops_ratio": methods[rival]["flops"] / one["flops"],
        "difference": difference,
        "verdict": verdict,
        "as_accurate": equal and {"withdrawal": equal["name"], "flops_ratio": equal["flops"] / one["flops"]},
    }


def _verdict(report: Mapping[str, Any], scores: NDArray[np.float64]) -> list[str]:
    """What the table decides, in sentences."""
    compared, methods, items = report["compared"], report["methods"], report["data"]["items"]
    if not scores.any():
        return [f"No method answers any of the {items} questions right, so accuracy decides nothing here."]
    said = []
    if compared:
        count = {verdict: sum(one["verdict"] == verdict for one in compared) for verdict in (BETTER, WORSE, EQUAL)}
        said.append(
            f"Of {len(compared)} ways to leave out rows, each beside the withdrawal of nearest arithmetic on {items} "
            f"questions, {count[BETTER]} answer better, {count[WORSE]} worse, and {count[EQUAL]} without a difference "
            f"beyond chance ({CONFIDENCE:.0%})."
        )
    good = [n for n in range(len(methods)) if 100 * _difference(scores, n, 0)["mean"] >= -POINTS]
    for what, kinds in (("way of all", None), ("withdrawal", ("withdrawal",))):
        fit = [methods[n] for n in good if kinds is None or methods[n]["kind"] in kinds]
        cheapest = min(fit, key=lambda method: float(method["flops"]))
        said.append(
            f"The cheapest {what} that loses at most {POINTS:g} point is {cheapest['name']}: "
            f"{cheapest['flops_ratio']:.0%} of the arithmetic of none."
        )
    return said


# --- in words -------------------------------------------------------------------------------------


def in_tables(report: Mapping[str, Any]) -> str:
    """The comparison as text: what was asked where, two Markdown tables, the verdict."""
    model, data = report["model"], report["data"]
    skipped = f", {len(data['skipped'])} skipped" if data["skipped"] else ""
    cut_short = " INTERRUPTED: fewer questions than asked for." if report["interrupted"] else ""
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
            "Each way to leave out rows beside the withdrawal of nearest FLOPs, and the cheapest one that answers "
            "at least as many questions:",
            markdown([COMPARED_HEADS, *map(_compared_row, report["compared"])]),
        ]
    return "\n\n".join([*parts, "\n".join(report["verdict"])])


METHOD_HEADS = (
    "method", "right, %", "as none, %", "full layers", "vision rows", "GFLOPs", "of none", "vision", "prefill",
    "first token", "per token", "KV cache",
)  # fmt: skip
COMPARED_HEADS = (
    "method", "withdrawal at its cost", "FLOPs, of the method's", "method better by, points", "the method is",
    "withdrawal as accurate", "FLOPs, of the method's",
)  # fmt: skip


def _method_row(one: Mapping[str, Any]) -> list[str]:
    times = [shown(one["ms"][phase]) if one["ms"][phase] else "-" for phase in PHASES]
    return [
        one["name"], _percent(one["right"]), _percent(one["same"]), f"{one['full_layers']:.1f}",
        f"{one['vision_rows']:.1f}", f"{one['flops'] / 1e9:.3g}", f"{one['flops_ratio']:.0%}", *times,
        size(one["kv_bytes"]),
    ]  # fmt: skip


def _percent(share: Interval | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share['share']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"


def _compared_row(one: Mapping[str, Any]) -> list[str]:
    difference = one["difference"]
    points = [f"{100 * difference[name]:+.1f}" for name in ("mean", "low", "high")]
    return [
        one["method"], one["withdrawal"], f"{one['flops_ratio']:.0%}", f"{points[0]} ({points[1]} to {points[2]})",
        one["verdict"], *_as_accurate(one["as_accurate"]),
    ]  # fmt: skip


def _as_accurate(found: Mapping[str, Any] | None) -> list[str]:
    return ["none of them", "-"] if found is None else [found["withdrawal"], f"{found['flops_ratio']:.0%}"]
