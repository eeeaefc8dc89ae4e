"""The picture of rests, as SVG: answers that survive against the share of layer-tokens run, by model and kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {  # the heading of each, and the share that is drawn
    "fact": ("facts, the same answer", "same answer, %"), "yes-no": ("yes or no, the right answer", "right, %")
}  # fmt: skip
COLOURS = {
    "0%": "#57606a", "2%": "#bc4c00", "5%": "#bf8700", "10%": "#1f6feb", "20%": "#8250df", "40%": "#1a7f37"
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP = 330, 170, 70, 60  # of a panel; of the first panel's corner
ACROSS, DOWN = 420, 240  # from a panel to the next
COST = 50, 100  # percent, the ends of the axis
TEXT = '<text x="{:.0f}" y="{:.0f}" {}>{}</text>'
Results = Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]


def curves(results: Results) -> str:
    """An SVG with a row of panels for each model of `results` (columns and rows), and a column for each kind."""
    parts = _legend()
    for row, (model, (columns, rows)) in enumerate(results.items()):
        cells = [dict(zip(columns, cells, strict=True)) for cells in rows]
        for column, (kind, (heading, share)) in enumerate(KINDS.items()):
            x, y = LEFT + column * ACROSS, TOP + row * DOWN
            parts.append(TEXT.format(x, y - 8, 'class="h"', f"{model}: {heading}"))
            parts += _axes(x, y)
            for rest, points in _points(cells, kind, share).items():
                path = " ".join(f"{_across(x, cost):.1f},{_down(y, percent):.1f}" for cost, percent in sorted(points))
                parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[rest]}" stroke-width="2"/>')
    height = TOP + len(results) * DOWN
    label = "Answers that survive against the share of layer-tokens run, for rests of 0 to 40%"
    style = "text{font:12px sans-serif;fill:#1f2328}.h{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" aria-label="{label}">'
        f'<style>{style}</style><rect width="860" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _points(cells: Sequence[Mapping[str, Any]], kind: str, share: str) -> dict[str, list[tuple[float, float]]]:
    """For each rest that the last token chose the cost and the `share` at each K, in percent."""
    points = defaultdict[str, list[tuple[float, float]]](list)
    for cell in cells:
        if cell["kind"] == kind and cell["choice"] == "last":
            points[cell["rest"]].append((float(cell["cost, %"]), float(cell[share][0])))
    return points


def _legend() -> list[str]:
    parts = [TEXT.format(LEFT, 18, "", "answers, %, against the share of layer-tokens run, %; a rest of")]
    for number, (rest, colour) in enumerate(COLOURS.items()):
        parts.append(TEXT.format(540 + 50 * number, 18, f'style="fill:{colour};font-weight:bold"', rest))
    return parts


def _axes(x: int, y: int) -> list[str]:
    parts = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>']
    parts += [TEXT.format(x - 6, _down(y, share) + 4, 'text-anchor="end"', share) for share in (0, 50, 100)]
    costs = range(COST[0], COST[1] + 1, 10)
    parts += [TEXT.format(_across(x, cost), y + HEIGHT + 16, 'text-anchor="middle"', cost) for cost in costs]
    return parts


def _across(x: int, cost: float) -> float:
    return x + WIDTH * (cost - COST[0]) / (COST[1] - COST[0])


def _down(y: int, share: float) -> float:
    return y + HEIGHT * (1 - share / 100)
