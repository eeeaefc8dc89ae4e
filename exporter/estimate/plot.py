"""A plan as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.exporter.common.plots import draw


def plot_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Draw `make_plan`'s result over the full layers into `path`. Raises as `draw` does."""
    draw(path, lambda figure: _fill(figure, plan))


def _fill(figure: Any, plan: Mapping[str, Any]) -> None:
    depths = sorted(plan["depths"], key=lambda depth: int(depth["full_layers"]))
    full = [depth["full_layers"] for depth in depths]
    work, memory = figure.subplots(1, 2)
    for name, label in (("calflops", "calflops"), ("total_flops", "total")):
        work.plot(full, [depth[name] / 1e12 for depth in depths], marker="o", label=label)
    for name in plan["weights_bytes"]:
        memory.plot(full, [depth["precisions"][name]["peak_bytes"] / 1e9 for depth in depths], marker="o", label=name)
    if plan["profile"]:
        memory.axhline(plan["profile"]["usable_bytes"] / 1e9, color="black", linestyle="--", label="usable")
    for axis, title in ((work, "arithmetic of the prompt, TFLOPs"), (memory, "peak memory, GB")):
        axis.set(xlabel="full layers (K - 1)", ylabel=title, ylim=(0, None))
        axis.legend()
    figure.suptitle(f"{plan['model']['name']}, {plan['text_tokens']} text and {plan['vision_tokens']} vision tokens")
