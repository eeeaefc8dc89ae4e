"""A plan as a picture: arithmetic, memory and, for a device, latency over the layers that see the image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.tools.common.plots import GREY, draw, headline, integer_axis, lines

LAYERS = "layers that see the image (K - 1)"


def plot_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Draw `make_plan`'s result over the full layers into `path`. Raises as `draw` does."""
    profile, depths = plan["profile"], sorted(plan["depths"], key=lambda depth: int(depth["full_layers"]))
    full = [depth["full_layers"] for depth in depths]

    def each(of: str) -> dict[str, list[Any]]:
        return {name: [depth["precisions"][name][of] for depth in depths] for name in plan["weights_bytes"]}

    def fill(figure: Any) -> None:
        work, memory, *timed = figure.subplots(1, 3 if profile else 2)
        named = {"tower and prompt": "total_flops", "calflops, as VTW counts": "calflops"}
        lines(work, full, {label: [depth[name] / 1e12 for depth in depths] for label, name in named.items()})
        work.set(title="Arithmetic", ylabel="TFLOP")
        lines(memory, full, {name: [peak / 1e9 for peak in peaks] for name, peaks in each("peak_bytes").items()})
        if profile:
            usable = profile["usable_bytes"] / 1e9
            memory.axhline(usable, color=GREY, linestyle="--", label=f"usable: {usable:.1f} GB")
        memory.set(title="Peak memory", ylabel="GB")
        for axes in timed:
            phases = each("latency_ms")
            lines(axes, full, {name: [ms["vision"] + ms["prefill"] for ms in every] for name, every in phases.items()})
            axes.set(title="First token: tower and prompt", ylabel="ms, estimated")
        for axes in (work, memory, *timed):
            axes.set(ylim=(0, None))
            integer_axis(axes, LAYERS)
        work.legend()
        figure.legend(*memory.get_legend_handles_labels(), loc="outside right center")
        prompt = f"a prompt of {plan['text_tokens']} text and {plan['vision_tokens']} image tokens"
        model, mode = plan["model"]["name"], f"; {profile['power_mode']}" if profile else ""
        title = f"{model} on {profile['name']}" if profile else f"{model}, no device named"
        headline(figure, title, f"calculated, not measured; {prompt}{mode}")

    draw(path, fill, width=14 if profile else 10)
