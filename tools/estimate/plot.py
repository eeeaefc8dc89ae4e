"""A plan as a picture: arithmetic, memory and, where a device is named, latency over the layers that see the image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.tools.common.plots import GREY, draw, headline, integer_axis, lines

LAYERS = "layers that see the image (K - 1)"


def plot_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Draw `make_plan`'s result over the full layers into `path`. Raises as `draw` does."""
    draw(path, lambda figure: _fill(figure, plan), width=14 if plan["profile"] else 10)


def _fill(figure: Any, plan: Mapping[str, Any]) -> None:
    profile, depths = plan["profile"], sorted(plan["depths"], key=lambda depth: int(depth["full_layers"]))
    work, memory, *timed = figure.subplots(1, 3 if profile else 2)
    _arithmetic(work, depths)
    _memory(memory, plan, depths)
    for axes in timed:
        _first_token(axes, plan, depths)
    for axes in (work, memory, *timed):
        axes.set(ylim=(0, None))
        integer_axis(axes, LAYERS)
    work.legend()
    figure.legend(*memory.get_legend_handles_labels(), loc="outside right center")
    prompt = f"a prompt of {plan['text_tokens']} text and {plan['vision_tokens']} image tokens"
    mode = f"; {profile['power_mode']}" if profile else ""
    title = f"{plan['model']['name']} on {profile['name']}" if profile else f"{plan['model']['name']}, no device named"
    headline(figure, title, f"calculated, not measured; {prompt}{mode}")


def _arithmetic(axes: Any, depths: Any) -> None:
    full = [depth["full_layers"] for depth in depths]
    named = {"tower and prompt": "total_flops", "calflops, as VTW counts": "calflops"}
    lines(axes, full, {label: [depth[name] / 1e12 for depth in depths] for label, name in named.items()})
    axes.set(title="Arithmetic", ylabel="TFLOP")


def _memory(axes: Any, plan: Mapping[str, Any], depths: Any) -> None:
    full = [depth["full_layers"] for depth in depths]
    peaks = {name: [d["precisions"][name]["peak_bytes"] / 1e9 for d in depths] for name in plan["weights_bytes"]}
    lines(axes, full, peaks)
    if plan["profile"]:
        usable = plan["profile"]["usable_bytes"] / 1e9
        axes.axhline(usable, color=GREY, linestyle="--", label=f"usable: {usable:.1f} GB")
    axes.set(title="Peak memory", ylabel="GB")


def _first_token(axes: Any, plan: Mapping[str, Any], depths: Any) -> None:
    """Estimated time to the first token of a question that brings an image."""
    full = [depth["full_layers"] for depth in depths]
    phases = {name: [d["precisions"][name]["latency_ms"] for d in depths] for name in plan["weights_bytes"]}
    lines(axes, full, {name: [ms["vision"] + ms["prefill"] for ms in every] for name, every in phases.items()})
    axes.set(title="First token: tower and prompt", ylabel="ms, estimated")
