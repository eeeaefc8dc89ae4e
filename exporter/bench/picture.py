"""A report as a picture: latency and KV cache over the layers that see the image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.drawing import draw

LINES = {"first_token": "first token", "prefill": "prefill", "second_question": "second question"}


def draw_report(report: Mapping[str, Any], path: Path) -> None:
    """Draw `make_report`'s result into `path`. Raises as `draw` does."""
    draw(path, lambda figure: _fill(figure, report))


def _fill(figure: Any, report: Mapping[str, Any]) -> None:
    depths = sorted(report["depths"], key=lambda depth: int(depth["full_layers"]))
    full = [depth["full_layers"] for depth in depths]
    latency, cache = figure.subplots(1, 2)
    for name, label in LINES.items():
        series = [depth["ms"][name] for depth in depths]
        middle = [one["median"] for one in series]
        reach = [[one["median"] - one["min"] for one in series], [one["max"] - one["median"] for one in series]]
        latency.errorbar(full, middle, yerr=reach, marker="o", capsize=3, label=label)
    latency.set(ylabel="ms, median and extremes")
    latency.legend()
    cache.plot(full, [depth["kv_bytes"] / 1e6 for depth in depths], marker="o")
    cache.set(ylabel="KV cache after the prompt, MB")
    for axes in (latency, cache):
        axes.set_xticks(full, [f"{depth['full_layers']}\nK = {depth['k'] or 'none'}" for depth in depths])
        axes.set(xlabel="layers that see the image", ylim=(0, None))
        axes.grid(alpha=0.3)
    model, work = report["model"], report["workload"]
    figure.suptitle(
        f"{model['name']}, {model['precision']}, {work['prompt_tokens']} tokens, {work['vision_tokens']} of the image; "
        f"{model['device']}, {work['threads']} threads",
        fontsize=10,
    )
