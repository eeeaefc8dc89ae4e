"""An evaluation as text: what vtx-eval prints."""

from __future__ import annotations

from vtx.runtime.terminal.console import WideTable
from vtx.runtime.units import counted, size
from vtx.tools.bench.series import shown
from vtx.tools.evaluation.report import Evaluation, FigureInterval

COST_NAMES = {"flops": "FLOPs", "kv_bytes": "KV bytes", "first_token_ms": "time to first token"}


def in_tables(report: Evaluation) -> list[str | WideTable]:
    """The report as paragraphs and tables: machine, model and data, the methods, the groups of questions, the front."""
    model, task, first = report.model, report.task, report.methods[0]
    skipped = f", {len(task.skipped)} skipped" if task.skipped else ""
    factors = {name: 100 if name in task.shares else 1 for name in first.figures}
    heads = [
        "method", *(f"{name.replace('_', ' ')}{', %' if name in task.shares else ''}" for name in factors),
        f"{task.main} to {first.name}", *(["first token, ms"] if first.first_token_ms else []), "KV cache", "GFLOPs",
        "of the first", "image tokens a layer",
    ]  # fmt: skip
    rows = [
        [
            method.name, *(_figure(method.figures[name], factor) for name, factor in factors.items()),
            _figure(method.difference, task.factor, sign="+") if method.difference else "-",
            *([shown(method.first_token_ms)] if method.first_token_ms else []), size(method.kv_bytes),
            f"{method.flops / 1e9:.3g}", f"{method.flops / first.flops:.0%}", f"{method.vision_tokens:.1f}",
        ]
        for method in report.methods
    ]  # fmt: skip
    parts: list[str | WideTable] = [
        report.machine.in_words() if first.first_token_ms else report.machine.cpu,
        f"{model.name} ({model.bundle}), {model.layers} layers, {model.precision} weights, on {model.device} in "
        f"{model.compute} arithmetic; {task.name}: {counted(task.questions, 'question')} about "
        f"{counted(task.images, 'image')} of {task.source}{skipped}. "
        f"In brackets {report.confidence:.0%} intervals over images.",
        WideTable("", heads, rows),
    ]
    if groups := first.groups:
        heads = [task.main, *(f"{name or 'other'} ({group.questions})" for name, group in groups.items())]
        rows = [[m.name, *(f"{task.factor * m.groups[name].value:.1f}" for name in groups)] for m in report.methods]
        parts.append(WideTable("", heads, rows))
    fronts = [f"{COST_NAMES[cost]}: {', '.join(names)}" for cost, names in report.front.items()]
    return [*parts, "Pareto front by " + "; by ".join(fronts) + "."]


def _figure(figure: FigureInterval, factor: int, sign: str = "") -> str:
    value, low, high = (
        None if v is None else f"{factor * v:{sign}.1f}" for v in (figure.value, figure.low, figure.high)
    )
    return f"{value} ({low} to {high})" if low and high else f"{value}"
