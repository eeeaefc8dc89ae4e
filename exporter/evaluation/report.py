"""From answers to a report: each method's figures with intervals beside its cost, as plain data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from vtx.exporter.bench.machine import Machine, describe
from vtx.exporter.bench.methods import Method
from vtx.exporter.bench.series import Series, markdown, shown, spread
from vtx.exporter.data.intervals import CONFIDENCE, DRAWS, effective_count, resampled_sums, spread_of, wilson
from vtx.exporter.evaluation.ask import Asked, Reply
from vtx.exporter.evaluation.metrics import Counts, Metric, Tally
from vtx.exporter.evaluation.questions import TaskQuestion
from vtx.runtime.api.model import Model
from vtx.runtime.strict import plain
from vtx.runtime.units import size

FORMAT = "vtx-eval-1"
COSTS = ("flops", "kv_bytes", "first_token_ms")
Scores = Sequence[tuple[str, float]]


def make_report(
    task: str, metric: Metric, source: str, asked: Asked, model: Model, *, instruction: str, times: bool
) -> dict[str, Any]:
    """The whole report, ready for JSON.

    Shares are from 0 to 1, FLOPs and bytes means over the questions, times milliseconds. `low` and `high` are the ends
    of 95% intervals, None where resampling has no spread. `difference` is that of the main figure to the first
    method's, over the same questions. `front` names, for each cost, the methods that no cheaper one equals.
    """
    pairs = [*zip(asked.questions, asked.replies, strict=True)]
    scores = [
        [metric.judge(question, by_method[n]["text"]) for question, by_method in pairs]
        for n in range(len(asked.methods))
    ]
    tallies = [metric.tally(asked.questions, of_method) for of_method in scores]
    draws = _draws(tallies)
    methods = [
        _method(method, tallies[n], draws[n], [by_method[n] for by_method in asked.replies], times=times)
        | {"difference": _difference(tallies, draws, n), "groups": _groups(metric, asked.questions, scores[n])}
        for n, method in enumerate(asked.methods)
    ]
    manifest, backend = model.manifest, model.backend
    costs = [cost for cost in COSTS if times or cost != "first_token_ms"]
    main = tallies[0].main
    return {
        "format": FORMAT,
        "machine": plain(describe()),
        "model": {
            "name": manifest.model.name, "bundle": model.bundle.folder.name, "layers": manifest.model.layers,
            "precision": manifest.precision, "device": backend.device, "compute": backend.compute,
        },
        "task": {
            "name": task, "source": source, "questions": len(asked.questions), "images": len(tallies[0].counts),
            "skipped": list(asked.skipped), "instruction": instruction, "main": main,
            "shares": sorted(tallies[0].shares),
        },
        "confidence": CONFIDENCE,
        "methods": methods,
        "front": {cost: _front(methods, cost, main) for cost in costs},
    }  # fmt: skip


def _method(method: Method, tally: Tally, draws: Counts, replies: Sequence[Reply], *, times: bool) -> dict[str, Any]:
    cost = {
        name: fmean(reply[name] for reply in replies)
        for name in ("flops", "kv_bytes", "vision_tokens", "full_layers", "new_tokens")
    }
    first = plain(spread([reply["first_token_ms"] for reply in replies])) if times else None
    return {
        "name": method.name, "kind": method.kind, "k": method.k, "reduce": method.reduce,
        "figures": _figures(tally, draws), **cost, "first_token_ms": first,
    }  # fmt: skip


def _draws(tallies: Sequence[Tally]) -> list[Counts]:
    """For each tally the sums [draws, columns] of images drawn again, the same ones for all; each stratum by itself."""
    rng, strata = np.random.default_rng(0), tallies[0].strata
    beside = np.hstack([tally.counts for tally in tallies])
    total: Counts = np.zeros((DRAWS, beside.shape[1]))
    for stratum in np.unique(strata):
        total += resampled_sums(beside[strata == stratum], rng)
    return np.split(total, len(tallies), axis=1)


def _figures(tally: Tally, draws: Counts) -> dict[str, dict[str, float | None]]:
    """Each figure with its interval; accuracies of whole questions have Wilson's, which knows 0% and 100%."""
    figures = {}
    total = tally.counts.sum(0)
    for name, figure in tally.figures.items():
        value = float(figure(total))
        low, high = _wilson(tally, name) or _ends(figure(draws))
        figures[name] = {"value": value, "low": low, "high": high}
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


def _difference(tallies: Sequence[Tally], draws: Sequence[Counts], n: int) -> dict[str, float | None] | None:
    """The main figure of method `n` less that of the first one: the same draws of images for both."""
    if n == 0:
        return None
    figure = tallies[0].figures[tallies[0].main]
    low, high = _ends(figure(draws[n]) - figure(draws[0]))
    value = float(figure(tallies[n].counts.sum(0)) - figure(tallies[0].counts.sum(0)))
    return {"value": value, "low": low, "high": high}


def _groups(metric: Metric, questions: Sequence[TaskQuestion], scores: Scores) -> dict[str, Any]:
    """The main figure of each of the benchmark's own categories, where there are several."""
    names = sorted({question.group for question in questions})
    if len(names) < 2:
        return {}
    groups = {}
    for name in names:
        rows = [n for n, question in enumerate(questions) if question.group == name]
        tally = metric.tally([questions[n] for n in rows], [scores[n] for n in rows])
        groups[name] = {"value": float(tally.figures[tally.main](tally.counts.sum(0))), "questions": len(rows)}
    return groups


def _front(methods: Sequence[Mapping[str, Any]], cost: str, main: str) -> list[str]:
    """Names, in rising cost, of the methods that are better than every cheaper one."""
    front, best = list[str](), -np.inf
    for method in sorted(methods, key=lambda m: (price(m, cost), -m["figures"][main]["value"])):
        if method["figures"][main]["value"] > best:
            front.append(method["name"])
            best = method["figures"][main]["value"]
    return front


def price(method: Mapping[str, Any], cost: str) -> float:
    """What a method costs: FLOPs, bytes, or the median time to its first token."""
    value = method[cost]
    return float(value["median"] if isinstance(value, dict) else value)


# --- as text --------------------------------------------------------------------------------------


def in_tables(report: Mapping[str, Any]) -> str:
    """The report as text: machine, model and data, and Markdown tables."""
    model, task, methods = report["model"], report["task"], report["methods"]
    skipped = f", {len(task['skipped'])} skipped" if task["skipped"] else ""
    timed = methods[0]["first_token_ms"] is not None
    parts = [
        Machine(**report["machine"]).in_words() if timed else report["machine"]["cpu"],
        f"{model['name']} ({model['bundle']}), {model['layers']} layers, {model['precision']} weights, on "
        f"{model['device']} in {model['compute']} arithmetic; {task['name']}: {task['questions']} questions about "
        f"{task['images']} images of {task['source']}{skipped}. In brackets {report['confidence']:.0%} intervals over "
        "images.",
        markdown(_rows(report, timed=timed)),
    ]
    if methods[0]["groups"]:
        parts.append(markdown(_group_rows(report)))
    fronts = [f"{COST_NAMES[cost]}: {', '.join(names)}" for cost, names in report["front"].items()]
    return "\n\n".join([*parts, "Pareto front by " + "; by ".join(fronts) + "."])


COST_NAMES = {"flops": "FLOPs", "kv_bytes": "KV bytes", "first_token_ms": "time to first token"}


def _rows(report: Mapping[str, Any], *, timed: bool) -> list[list[str]]:
    task, methods = report["task"], report["methods"]
    names = list(methods[0]["figures"])
    heads = [
        "method", *(f"{name.replace('_', ' ')}{', %' if name in task['shares'] else ''}" for name in names),
        f"{task['main']} to {methods[0]['name']}", *(["first token, ms"] if timed else []), "KV cache", "GFLOPs",
        "of the first", "image tokens a layer",
    ]  # fmt: skip
    rows = [
        [
            method["name"],
            *(_figure(method["figures"][name], 100 if name in task["shares"] else 1) for name in names),
            _signed(method["difference"], 100 if task["main"] in task["shares"] else 1),
            *([shown(Series(**method["first_token_ms"]))] if timed else []),
            size(method["kv_bytes"]),
            f"{method['flops'] / 1e9:.3g}",
            f"{method['flops'] / methods[0]['flops']:.0%}",
            f"{method['vision_tokens']:.1f}",
        ]
        for method in methods
    ]
    return [heads, *rows]


def _group_rows(report: Mapping[str, Any]) -> list[list[str]]:
    task, methods = report["task"], report["methods"]
    factor = 100 if task["main"] in task["shares"] else 1
    groups = methods[0]["groups"]
    heads = [task["main"], *(f"{name or 'other'} ({group['questions']})" for name, group in groups.items())]
    return [heads, *([m["name"], *(f"{factor * m['groups'][g]['value']:.1f}" for g in groups)] for m in methods)]


def _figure(figure: Mapping[str, float | None], factor: int) -> str:
    low, high = figure["low"], figure["high"]
    span = "" if low is None or high is None else f" ({factor * low:.1f} to {factor * high:.1f})"
    return f"{factor * (figure['value'] or 0.0):.1f}{span}"


def _signed(figure: Mapping[str, float | None] | None, factor: int) -> str:
    if figure is None:
        return "-"
    low, high = figure["low"], figure["high"]
    span = "" if low is None or high is None else f" ({factor * low:+.1f} to {factor * high:+.1f})"
    return f"{factor * (figure['value'] or 0.0):+.1f}{span}"
