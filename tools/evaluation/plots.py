"""An evaluation as a picture: the main figure over each cost, with its interval and the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtx.runtime.units import counted
from vtx.tools.common.plots import COLORS, GREY, draw, headline
from vtx.tools.evaluation.report import COSTS, Evaluation

AXES = {
    "flops": ("by arithmetic", "FLOPs until the first token, % of the first method"),
    "kv_bytes": ("by memory", "KV cache, % of the first method"),
    "first_token_ms": ("by latency", "first token, ms, median"),
}
KINDS = {"withdrawal": "o", "gates": "*", "pruning": "s", "both": "^"}


def draw_report(report: Evaluation, path: Path) -> None:
    """Draw an evaluation into `path`. Raises as `draw` does."""
    model, task, methods = report.model, report.task, report.methods

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
                    costs[method.name], value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], capsize=3,
                    fmt=KINDS[method.kind], color=COLORS[number % len(COLORS)], label=method.name,
                )  # fmt: skip
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
