"""A plan as a picture: arithmetic, memory and, for a device, latency over the layers that see the image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.tools.common.plots import GREY, draw, headline, integer_axis, lines
from vtx.tools.estimate.plan import CostPlan, PrecisionCost

LAYERS = "layers that see the image (K - 1)"


def plot_plan(plan: CostPlan, path: Path) -> None:
    profile = plan.profile
    depths = sorted(plan.depths, key=lambda depth: depth.full_layers)
    full = [depth.full_layers for depth in depths]

    def each(of: Callable[[PrecisionCost], float]) -> dict[str, list[float]]:
        return {name: [of(depth.precisions[name]) for depth in depths] for name in plan.weights_bytes}

    def first_token(cost: PrecisionCost) -> float:
        assert cost.phases is not None, "a plan for a profile has times"
        return cost.phases["vision"].ms + cost.phases["prefill"].ms

    def fill(figure: Any) -> None:
        work, memory, *timed = figure.subplots(1, 3 if profile else 2)
        flops = {"tower and prompt": [depth.total_flops / 1e12 for depth in depths]}
        lines(work, full, flops | {"calflops, as VTW counts": [depth.calflops / 1e12 for depth in depths]})
        work.set(title="Arithmetic", ylabel="TFLOP")
        lines(memory, full, each(lambda cost: cost.peak_bytes / 1e9))
        if profile:
            usable = profile.usable_bytes / 1e9
            memory.axhline(usable, color=GREY, linestyle="--", label=f"usable: {usable:.1f} GB")
        memory.set(title="Peak memory", ylabel="GB")
        for axes in timed:
            lines(axes, full, each(first_token))
            axes.set(title="First token: tower and prompt", ylabel="ms, estimated")
        for axes in (work, memory, *timed):
            axes.set(ylim=(0, None))
            integer_axis(axes, LAYERS)
        work.legend()
        figure.legend(*memory.get_legend_handles_labels(), loc="outside right center")
        prompt = f"a prompt of {plan.workload.text} text and {plan.workload.vision} image tokens"
        model = plan.model.name
        mode = f"; {profile.power_mode}" if profile else ""
        title = f"{model} on {profile.name}" if profile else f"{model}, no device named"
        headline(figure, title, f"calculated, not measured; {prompt}{mode}")

    draw(path, fill, width=14 if profile else 10)
