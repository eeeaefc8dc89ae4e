"""An evaluation as text, which vtx-eval prints, and as a picture: the main figure over each cost, with the front."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vtx.runtime.terminal.console import WideTable
from vtx.runtime.units import counted, size
from vtx.tools.bench.series import shown
from vtx.tools.common.plots import COLORS, GREY, draw, headline
from vtx.tools.evaluation.coverage import CoveragePoint
from vtx.tools.evaluation.report import COSTS, Evaluation, FigureInterval

COST_NAMES = {"flops": "FLOPs", "kv_bytes": "KV bytes", "first_token_ms": "time to first token"}
AXES = {
    "flops": ("by arithmetic", "FLOPs until the first token, % of the first method"),
    "kv_bytes": ("by memory", "KV cache, % of the first method"),
    "first_token_ms": ("by latency", "first token, ms, median"),
}
KINDS = {"withdrawal": "o", "gates": "*", "pruning": "s", "both": "^"}


def in_tables(report: Evaluation) -> list[str | WideTable]:
    """The report as paragraphs and tables: machine, model and data, the methods, the groups of questions, the front."""
    model = report.model
    task = report.task
    first = report.methods[0]
    skipped = f", {len(task.skipped)} skipped" if task.skipped else ""
    parts: list[str | WideTable] = [
        report.machine.in_words() if first.first_token_ms else report.machine.cpu,
        f"{model.name} ({model.bundle}), {model.layers} layers, {model.precision} weights, on {model.device} in "
        f"{model.compute} arithmetic; {task.name}: {counted(task.questions, 'question')} about "
        f"{counted(task.images, 'image')} of {task.source}{skipped}. "
        f"In brackets {report.confidence:.0%} intervals over images.",
        _methods_table(report),
        *_group_tables(report),
    ]
    for method in report.methods:
        if method.coverage:
            rows = [[f"{p.threshold:g}", f"{p.coverage:.1%}", f"{p.accepted:,}", _accuracy(p)] for p in method.coverage]
            heads = [f"{method.name}: accepted from", "coverage", "answers", "accuracy, %"]
            parts.append(WideTable("", heads, rows))
    fronts = [f"{COST_NAMES[cost]}: {', '.join(names)}" for cost, names in report.front.items()]
    return [*parts, "Pareto front by " + "; by ".join(fronts) + "."]


def _methods_table(report: Evaluation) -> WideTable:
    """Figures and costs of each method."""
    task = report.task
    first = report.methods[0]
    factors = {name: 100 if name in task.shares else 1 for name in first.figures}
    heads = [
        "method",
        *(f"{name.replace('_', ' ')}{', %' if name in task.shares else ''}" for name in factors),
        f"{task.main} to {first.name}",
        *(["first token, ms"] if first.first_token_ms else []),
        "KV cache",
        "GFLOPs",
        "of the first",
        "image tokens per layer",
    ]
    rows = [
        [
            method.name,
            *(_figure(method.figures[name], factor) for name, factor in factors.items()),
            _figure(method.difference, task.factor, sign="+") if method.difference else "-",
            *([shown(method.first_token_ms)] if method.first_token_ms else []),
            size(method.kv_bytes),
            f"{method.flops / 1e9:.3g}",
            f"{method.flops / first.flops:.0%}",
            f"{method.vision_tokens:.1f}",
        ]
        for method in report.methods
    ]
    return WideTable("", heads, rows)


def _group_tables(report: Evaluation) -> Iterator[WideTable]:
    """The main figure by the groups of questions, and by the kind of answer."""
    task = report.task
    if groups := report.methods[0].groups:
        heads = [task.main, *(f"{name or 'other'} ({group.questions})" for name, group in groups.items())]
        rows = [[m.name, *(f"{task.factor * m.groups[name].value:.1f}" for name in groups)] for m in report.methods]
        yield WideTable("", heads, rows)
    if len(kinds := report.methods[0].kinds) > 1:
        heads = [f"{task.main} by kind of answer", *(f"{kind} ({of.questions})" for kind, of in kinds.items())]
        rows = [[m.name, *(_figure(m.kinds[kind], task.factor) for kind in kinds)] for m in report.methods]
        yield WideTable("", heads, rows)


def _figure(figure: FigureInterval, factor: int, sign: str = "") -> str:
    value, low, high = (
        None if v is None else f"{factor * v:{sign}.1f}" for v in (figure.value, figure.low, figure.high)
    )
    return f"{value} ({low} to {high})" if low and high else f"{value}"


def _accuracy(point: CoveragePoint) -> str:
    if point.accuracy is None:
        return "-"
    return _figure(FigureInterval(point.accuracy, point.low, point.high), 100)


def draw_report(report: Evaluation, path: Path) -> None:
    """Draw an evaluation into `path`. Raises as `draw` does."""
    model = report.model
    task = report.task
    methods = report.methods

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(report.front), sharey=True, squeeze=False)[0]
        for axes, (cost, front) in zip(panels, report.front.items(), strict=True):
            unit = 1.0 if cost == "first_token_ms" else COSTS[cost](methods[0]) / 100
            costs = {method.name: COSTS[cost](method) / unit for method in methods}
            figures = {method.name: method.figures[task.main] for method in methods}
            steps = [(costs[name], task.factor * figures[name].value) for name in front]
            axes.step(*zip(*steps, strict=True), where="post", color=GREY, marker="", linewidth=1, label="Pareto front")
            for number, method in enumerate(methods):
                main = figures[method.name]
                ends = (main.value, main.low, main.high)
                value, low, high = (task.factor * (main.value if end is None else end) for end in ends)
                axes.errorbar(
                    costs[method.name],
                    value,
                    yerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
                    capsize=3,
                    fmt=KINDS[method.kind],
                    color=COLORS[number % len(COLORS)],
                    label=method.name,
                )
            title, label = AXES[cost]
            axes.set(title=title, xlabel=label)
            axes.margins(y=0.15)
        panels[0].set_ylabel(f"{task.main}{', %' if task.factor == 100 else ''}")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
        headline(
            figure,
            f"{task.name}: answers of {model.name} over their cost",
            f"{counted(task.questions, 'question')} about {counted(task.images, 'image')} of {task.source}; "
            f"{model.precision} weights, {model.device} in {model.compute}; "
            f"bars: {report.confidence:.0%} intervals",
        )

    draw(path, fill, width=4.7 * len(report.front) + 1.5, height=5)
