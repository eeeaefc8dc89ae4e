"""A plan as a picture; matplotlib is loaded here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtx.runtime.errors import DeviceError, RequestError


def plot_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Draw `make_plan`'s result over the full layers into `path`, in the format that its ending names.

    Raises:
        DeviceError: matplotlib is missing.
        RequestError: the file cannot be written.

    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise DeviceError(f"--plot needs {e.name or 'matplotlib'}; pip install matplotlib") from e
    depths = sorted(plan["depths"], key=lambda depth: int(depth["full_layers"]))
    full = [depth["full_layers"] for depth in depths]
    figure = Figure(figsize=(10, 4), layout="constrained")
    work, memory = figure.subplots(1, 2)
    for name, label in (("calflops", "calflops"), ("total_flops", "total")):
        work.plot(full, [depth[name] / 1e12 for depth in depths], marker="o", label=label)
    for name in plan["weights_bytes"]:
        memory.plot(full, [depth["precisions"][name]["peak_bytes"] / 1e9 for depth in depths], marker="o", label=name)
    if plan["profile"]:
        memory.axhline(plan["profile"]["usable_bytes"] / 1e9, color="black", linestyle="--", label="usable")
    for axis, what in ((work, "arithmetic of the prompt, TFLOPs"), (memory, "peak memory, GB")):
        axis.set(xlabel="full layers (K - 1)", ylabel=what, ylim=(0, None))
        axis.legend()
    figure.suptitle(f"{plan['model']['name']}, {plan['text_tokens']} text and {plan['vision_tokens']} vision tokens")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise RequestError(f"cannot write the plot {path} ({e}); name another --plot FILE.png") from e
