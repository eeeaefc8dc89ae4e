"""vtx-plan. It parses, calls and prints; heavy imports stand inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.exporter.commands.shared.options import precision_type
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.terminal.console import command, note, table
from vtx.runtime.terminal.depth import DepthType, joined

if TYPE_CHECKING:
    from vtx.exporter.estimate.plan import CostPlan, PrecisionCost


@command(
    epilog="vtx-plan --model llava-1.5-7b\n"
    "vtx-plan --model llava-1.5-7b --sequence 642 --text 66 --k 17 --json\n"
    "vtx-plan --model llava-next-7b --precision int4 --profile orin-nx-16\n"
    "vtx-plan --model vtx-demo-k16-fp16 --plot plan.png"
)
@click.option(
    "--model", required=True, metavar="NAME|FOLDER", help="A known name, a checkpoint (its config.json), or a bundle."
)
@click.option("--sequence", type=int, help="Tokens of the prompt [default: one image and --text].")
@click.option("--text", type=int, default=64, show_default=True, help="Tokens of it that are not of images.")
@click.option(
    "--k", "ks", type=DepthType(several=True, auto=False), multiple=True, callback=joined, metavar="N|none|N,M,...",
    help="First layer without vision tokens, counted from 1 [default: none and a spread].",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, help="Of the weights; may be given again.",
    type=precision_type(), show_default="all",
)  # fmt: skip
@click.option(
    "--vision-precision", type=precision_type(), help="Of the tower and projector [default: as vtx-export's]."
)
@click.option("--head-precision", type=precision_type(), help="Of the output matrix [default: as vtx-export's].")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Of the answer, for the peak memory.")
@click.option("--profile", metavar="NAME", help="A device: does it fit, and an estimate of the time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it as well.")
def plan(
    model: str, sequence: int | None, text: int, ks: tuple[int | None, ...], precisions: tuple[str, ...],
    vision_precision: str | None, head_precision: str | None, max_new_tokens: int, profile: str | None,
    as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Say what a model will cost: arithmetic, weights, KV cache, memory, per K and precision."""
    from vtx.exporter.estimate.plan import Workload, find_profile, make_plan
    from vtx.exporter.estimate.sizes import find_size

    device = None if profile is None else find_profile(profile)
    size = find_size(model)
    image = 0 if size.vision is None else size.vision.image_tokens
    work = Workload(text, image if sequence is None else sequence - text, max_new_tokens)
    costs = make_plan(size, work, ks, precisions or tuple(PRECISIONS), device, vision_precision, head_precision)
    if plot is not None:
        from vtx.exporter.estimate.plot import plot_plan

        plot_plan(costs.to_dict(), plot)
    if as_json:
        import json

        click.echo(json.dumps(costs.to_dict(), ensure_ascii=False))
        return
    _show_plan(costs)
    if plot is not None:
        note(f"drew {plot}")


def _show_plan(costs: CostPlan) -> None:
    from vtx.exporter.estimate.roofline import ESTIMATE
    from vtx.runtime.units import size

    work, device = costs.workload, costs.profile
    click.echo(
        f"{costs.model.name}: {costs.model.parameters / 1e9:.3g} billion parameters; a prompt of "
        f"{work.text} text and {work.vision} vision tokens, {work.new_tokens} new ones"
    )
    click.echo("weights: " + ", ".join(f"{name} {size(count)}" for name, count in costs.weights_bytes.items()))
    rows = [
        [str(d.k or "none"), str(d.full_layers), f"{d.calflops / 1e12:.3g} T ({d.calflops_ratio:.1%})",
         f"{d.total_flops / 1e12:.3g} T ({d.total_ratio:.1%})"]
        for d in costs.depths
    ]  # fmt: skip
    table("arithmetic of the prompt", ["K", "full layers", "calflops", "total"], rows)
    heads = ["K", "precision", "KV cache", "peak memory"]
    heads += ["fits", "vision", "prefill", "per token"] if device else []
    rows = [_memory_row(depth.k, name, cost) for depth in costs.depths for name, cost in depth.precisions.items()]
    table(f"memory on {device.name}" if device else "memory", heads, rows)
    if device:
        click.echo(f"{device.power_mode}, {size(device.usable_bytes)} usable; times are {ESTIMATE}")


def _memory_row(k: int | None, precision: str, cost: PrecisionCost) -> list[str]:
    from vtx.runtime.units import size

    row = [str(k or "none"), precision, size(cost.kv_bytes), size(cost.peak_bytes)]
    if cost.phases is not None:
        row.append("yes" if cost.fits else "NO")
        row += [f"{p.ms:.0f} ms" if p.ms >= 100 else f"{p.ms:.3g} ms" for p in cost.phases.values()]
    return row
