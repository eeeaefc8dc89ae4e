"""Reports as pictures: latency and KV cache over the layers that see the image; accuracy over cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.runtime.units import counted
from vtx.tools.bench.compare import Comparison, MethodResult
from vtx.tools.bench.ladder import WITHDRAWAL
from vtx.tools.bench.report import BenchReport
from vtx.tools.common.plots import COLORS, GREY, draw, headline

LINES = {"first_token": "first token", "prefill": "prefill", "second_question": "second question"}


def draw_report(report: BenchReport, path: Path) -> None:
    """Draw `make_report`'s result into `path`. Raises as `draw` does."""
    depths = sorted(report.depths, key=lambda depth: depth.full_layers)
    full = [depth.full_layers for depth in depths]
    model, work = report.model, report.workload

    def fill(figure: Any) -> None:
        latency, cache = figure.subplots(1, 2)
        for name, label in LINES.items():
            series = [times for depth in depths if (times := depth.ms[name])]
            middle = [times.median for times in series]
            below = [times.median - times.min for times in series]
            above = [times.max - times.median for times in series]
            latency.errorbar(full, middle, yerr=[below, above], capsize=3, label=label)
        latency.set(title="Latency", ylabel="ms, median and extremes")
        latency.legend()
        cache.plot(full, [depth.kv_bytes / 1e6 for depth in depths])
        cache.set(title="KV cache after the prompt", ylabel="MB")
        for axes in (latency, cache):
            axes.set_xticks(full, [f"{depth.full_layers}\nK={depth.k or 'none'}" for depth in depths])
            axes.set(xlabel="layers that see the image", ylim=(0, None))
        headline(
            figure,
            f"{model['name']} in {model['precision']} on {model['device']}",
            f"a prompt of {work['prompt_tokens']} tokens, {work['vision_tokens']} of the image; {model['compute']} "
            f"arithmetic, {counted(work['threads'], 'thread')}; {report.machine.cpu}",
        )

    draw(path, fill)


KINDS = {
    "withdrawal": ("withdrawal", "o-"), "gates": ("gates", "*"), "pruning": ("pruning", "s"),
    "both": ("pruning, then withdrawal", "^"),
}  # fmt: skip
MARKERS = "o*sD^vPX<>hdp"


def draw_comparison(report: Comparison, path: Path) -> None:
    """Draw `make_comparison`'s result into `path`. Raises as `draw` does."""
    model, data = report.model, report.data

    def fill(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        _costs(left, report, lambda method: 100 * method.flops_ratio)
        _costs(right, report, lambda method: method.first_token)
        left.set(
            title="by arithmetic",
            xlabel="arithmetic of tower and prompt, % of full",
            ylabel="right answers, %" if report.score == "right" else "answers as without any method, %",
        )
        right.set(title="by latency", xlabel="first token, ms, median")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
        left.margins(y=0.15)
        headline(
            figure,
            f"Answers of {model['name']} over their cost",
            f"{counted(data['items'], 'question')} of {data['source']}; {model['device']} in {model['compute']}; "
            f"{report.machine.cpu}",
        )

    draw(path, fill, width=12, height=5)


def _costs(axes: Any, report: Comparison, cost: Callable[[MethodResult], float]) -> None:
    """A point per method, with its name, at its cost and share of good answers; for a ladder the Pareto front."""

    def share(method: MethodResult) -> float:
        score = method.right if report.score == "right" else method.same
        assert score is not None
        return 100 * score.share

    groups = list[tuple[str, str, list[MethodResult]]]()  # label, style, methods
    if report.families:
        front = list[tuple[float, float]]()
        for method in sorted(report.methods, key=lambda method: (cost(method), -share(method))):
            if not front or share(method) > front[-1][1]:
                front.append((cost(method), share(method)))
        axes.step(*zip(*front, strict=True), where="post", color=GREY, marker="", linewidth=1, label="Pareto front")
        for number, (family, names) in enumerate(report.families.items()):  # withdrawal alone with a line
            line, methods = "-" if family == WITHDRAWAL else "", [m for m in report.methods if m.name in names]
            groups.append((family, f"{MARKERS[number % len(MARKERS)]}{line}", methods))
    else:
        for kind, (label, style) in KINDS.items():
            groups.append((label, style, [method for method in report.methods if method.kind == kind]))
    for number, (label, style, group) in enumerate(groups):
        methods, color = sorted(group, key=cost), COLORS[number % len(COLORS)]
        if methods:
            axes.plot([*map(cost, methods)], [*map(share, methods)], style, color=color, label=label)
        for method in methods if not report.families else ():
            if method.kind != "both":
                point = cost(method), share(method)
                axes.annotate(method.name, point, (2, 4), textcoords="offset points", fontsize=7, rotation=45)
