"""Reports as pictures: latency and KV cache over the layers that see the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtx.runtime.units import counted
from vtx.tools.bench.report import BenchReport
from vtx.tools.common.plots import draw, headline

LINES = {"first_token": "first token", "prefill": "prefill", "second_question": "second question"}


def draw_report(report: BenchReport, path: Path) -> None:
    """Draw `make_report`'s result into `path`. Raises as `draw` does."""
    depths = sorted(report.depths, key=lambda depth: depth.full_layers)
    full = [depth.full_layers for depth in depths]
    model = report.model
    work = report.workload

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
