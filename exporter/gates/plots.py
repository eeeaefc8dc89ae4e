"""Gates against a fixed K as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtx.exporter.gates.report import Judgement, Outcome
from vtx.tools.common.plots import COLORS, draw, headline, integer_axis, percent_axis


def draw_judgement(judgement: Judgement, path: Path) -> None:
    """Draw agreement over full layers, and the exits of the questions, into `path`. Raises as `draw` does."""
    draw(path, lambda figure: _fill(figure, judgement))


def _fill(figure: Any, judgement: Judgement) -> None:
    curve, histogram = figure.subplots(1, 2)
    lines: tuple[tuple[str, Sequence[Outcome]], ...]
    lines = (("fixed K", judgement.fixed), ("gates, by threshold", judgement.gates))
    for name, points in lines:
        curve.plot([p.full_layers for p in points], [100 * p.agreement for p in points], label=name)
    percent_axis(curve, "same answer as the full model, %", min(100 * p.agreement for p in judgement.fixed))
    curve.set(title="Agreement over cost")
    integer_axis(curve, "layers that see the image, mean")
    curve.legend()
    chosen = judgement.gates[0]
    histogram.bar(range(len(chosen.exits)), chosen.exits.values(), color=COLORS[1])
    histogram.set_xticks(range(len(chosen.exits)), list(chosen.exits), rotation=90, fontsize=8)
    histogram.grid(visible=False, axis="x")
    histogram.set(title=f"K that the gates choose above {chosen.threshold:g}", xlabel="K", ylabel="questions")
    headline(figure, "Gates against a fixed K", f"{judgement.items} held-out items, {judgement.layers} layers")
