"""Charts made of results, as SVG.

`bars` is the README's: first token and second question, vtx as installed beside others as installed. `scatter` is of
methods compared: right answers over arithmetic. `by_k` is of shares at each K, a line for each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

KINDS = {"fp32": "fp32", "bf16": "bf16", "f16": "bf16", "int8": "int8", "q8_0": "int8", "int4": "int4", "q4_0": "int4"}
PANELS = {"first token, s": 210, "second question, s": 560}  # columns of the results, and where their bars begin
LENGTH, ROW, GAP, TOP = 250, 17, 12, 46  # of a panel's longest bar; of a line; between weights; of the first line
OURS, THEIRS = "#1f6feb", "#a8b1bb"
TEXT = '<text x="{}" y="{}" {}>{}</text>'


def bars(columns: Sequence[str], results: Sequence[Sequence[Any]]) -> str:
    """An SVG with a group of bars for each type of weights; the C++ runtime and what failed are in the tables only."""
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row in (dict(zip(columns, result, strict=True)) for result in results):
        if row["contender"] != "libvtx" and not row["computed"].startswith("failed"):
            groups.setdefault(KINDS[row["weights"]], []).append((row["contender"], row))
    parts, y = [TEXT.format(x, 22, 'class="h"', column) for column, x in PANELS.items()], TOP
    longest = {column: max(_median(row[column]) for group in groups.values() for _, row in group) for column in PANELS}
    for kind, group in groups.items():
        parts.append(TEXT.format(8, y + 12, 'class="h"', kind))
        for who, row in group:
            parts.append(TEXT.format(PANELS["first token, s"] - 6, y + 12, 'text-anchor="end"', who))
            for column, x in PANELS.items():
                value = _median(row[column])
                width = max(1.0, LENGTH * value / longest[column])
                color = OURS if who.startswith("vtx") else THEIRS
                parts.append(f'<rect x="{x}" y="{y + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{color}"/>')
                parts.append(TEXT.format(f"{x + width + 4:.1f}", y + 12, "", f"{value:.2f}"))
            y += ROW
        y += GAP
    return _picture(y, "First token and second question in seconds, shorter is better", parts)


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = {
    "circle": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "square": "M-4.5,-4.5h9v9h-9z", "triangle": "M0,-6l6,10h-12z",
    "diamond": "M0,-6l6,6l-6,6l-6,-6z", "wedge": "M0,6l6,-10h-12z",
}  # fmt: skip
LEFT, RIGHT, UPPER, LOWER = 60, 610, 30, 410  # of the plot, in a picture of 860 by 460
WITHDRAWAL, UNCUT = "withdrawal (K)", "none"


def scatter(columns: Sequence[str], results: Sequence[Sequence[Any]]) -> str:
    """An SVG with a marker and its interval for each method, the settings of one method joined by a line."""
    right, cost = columns.index("right, %"), columns.index("relative FLOPs")
    families: dict[str, list[tuple[float, list[float]]]] = {}  # cost; share, least, most
    for row in results:
        method, _, setting = row[0].partition(":")
        family = WITHDRAWAL if method.startswith("K =") else method + ", text=none" * ("text=none" in setting)
        families.setdefault(family, []).append((float(row[cost].rstrip("%")), [*map(float, row[right])]))
    [(_, (uncut, *_))] = families.pop(UNCUT)
    costs = [cost for points in families.values() for cost, _ in points]
    least, most, floor = min(costs) - 2, max(costs) + 2, min(s[1] for points in families.values() for _, s in points)

    def x(cost: float) -> float:
        return LEFT + (RIGHT - LEFT) * (cost - least) / (most - least)

    def y(share: float) -> float:
        return LOWER - (LOWER - UPPER) * (share - floor + 2) / (102 - floor + 2)

    line = '<path d="M{:.1f},{:.1f}L{:.1f},{:.1f}" stroke="{}" stroke-width="{}" {}/>'
    parts = [TEXT.format(LEFT, 18, 'class="h"', "right answers, %")]
    parts.append(TEXT.format((LEFT + RIGHT) // 2, 448, 'class="h" text-anchor="middle"', "arithmetic, % of full"))
    for share in range(10 * (int(floor) // 10 + 1), 101, 10):
        parts.append(line.format(LEFT, y(share), RIGHT, y(share), "#e4e4e4", 1, ""))
        parts.append(TEXT.format(LEFT - 8, f"{y(share) + 4:.1f}", 'text-anchor="end"', share))
    for percent in range(10 * (int(least) // 10 + 1), int(most) + 1, 10):
        parts.append(line.format(x(percent), UPPER, x(percent), LOWER, "#e4e4e4", 1, ""))
        parts.append(TEXT.format(f"{x(percent):.1f}", LOWER + 18, 'text-anchor="middle"', percent))
    parts.append(line.format(LEFT, y(uncut), RIGHT, y(uncut), "#666", 1, 'stroke-dasharray="5 4"'))
    parts.append(TEXT.format(RIGHT + 8, f"{y(uncut) + 4:.1f}", "", f"none: {uncut:.0f}"))
    best = sorted(families, key=lambda family: (family != WITHDRAWAL, -max(s[0] for _, s in families[family])))
    for number, family in enumerate(best):
        color, shape = COLORS[number % len(COLORS)], [*MARKERS.values()][number % len(MARKERS)]
        points, width = sorted(families[family]), 3 if family == WITHDRAWAL else 1.2
        for (before, share), (after, next_share) in pairwise(points):
            parts.append(line.format(x(before), y(share[0]), x(after), y(next_share[0]), color, width, ""))
        at = [(x(cost), y(share[0])) for cost, share in points]
        for cost, (_, low, high) in points:
            parts.append(line.format(x(cost), y(low), x(cost), y(high), color, 1, 'stroke-opacity="0.45"'))
        for here, there in [*at, (RIGHT + 24.0, 80.0 + 26 * number)]:
            parts.append(f'<path d="{shape}" transform="translate({here:.1f},{there:.1f})" fill="{color}"/>')
        parts.append(TEXT.format(RIGHT + 38, 84 + 26 * number, "", family))
    return _picture(460, "Right answers over arithmetic, a marker for each setting of a method", parts)


def by_k(columns: Sequence[str], results: Sequence[Sequence[Any]]) -> str:
    """An SVG with a line for each column of shares in percent, with intervals; the last row is what chance gives."""
    shares = [n for n, column in enumerate(columns) if column.endswith("on the named shape, %")]
    *points, chance = sorted(results, key=lambda row: (row[0][0] == "n", len(row[0]), row[0]))

    def y(share: float) -> float:
        return LOWER - (LOWER - UPPER) * share / 100

    line = '<path d="M{:.1f},{:.1f}L{:.1f},{:.1f}" stroke="{}" stroke-width="{}" {}/>'
    parts = [TEXT.format(LEFT, 18, 'class="h"', "episodes that end on the named shape, %")]
    parts.append(TEXT.format((LEFT + RIGHT) // 2, 448, 'class="h" text-anchor="middle"', "K"))
    for share in range(0, 101, 20):
        parts.append(line.format(LEFT, y(share), RIGHT, y(share), "#e4e4e4", 1, ""))
        parts.append(TEXT.format(LEFT - 8, f"{y(share) + 4:.1f}", 'text-anchor="end"', share))
    gap = (RIGHT - LEFT) / len(points)
    for place, row in enumerate(points):
        parts.append(TEXT.format(f"{LEFT + gap * (place + 0.5):.1f}", LOWER + 18, 'text-anchor="middle"', row[0]))
    blind = y(_median(chance[shares[0]]))
    parts.append(line.format(LEFT, blind, RIGHT, blind, "#666", 1, 'stroke-dasharray="5 4"'))
    parts.append(TEXT.format(RIGHT + 8, f"{blind + 4:.1f}", "", "pictures of another table"))
    for number, column in enumerate(shares):
        color, shape = COLORS[number], [*MARKERS.values()][number]
        at = [
            (LEFT + gap * (n + 0.46 + 0.08 * number), [y(float(v)) for v in row[column]])
            for n, row in enumerate(points)
        ]
        for (before, (share, *_)), (after, (next_share, *_)) in pairwise(at):
            parts.append(line.format(before, share, after, next_share, color, 2, ""))
        for x, (_, low, high) in at:
            parts.append(line.format(x, low, x, high, color, 1.5, 'stroke-opacity="0.6"'))
        for x, height in [*((x, share) for x, (share, *_) in at), (RIGHT + 24.0, 180.0 + 26 * number)]:
            parts.append(f'<path d="{shape}" transform="translate({x:.1f},{height:.1f})" fill="{color}"/>')
        parts.append(TEXT.format(RIGHT + 38, 184 + 26 * number, "", columns[column].partition(":")[0]))
    return _picture(460, "Episodes that end on the named shape, by K and training", parts)


def _picture(height: int, label: str, parts: Sequence[str]) -> str:
    style = "text{font:12px sans-serif;fill:#1f2328}.h{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" '
        f'aria-label="{label}"><style>{style}</style>'
        f'<rect width="860" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _median(cell: str | Sequence[str]) -> float:
    return float(cell if isinstance(cell, str) else cell[0])
