"""The README's chart, as SVG: first token and second question, vtx as installed beside others as installed."""

from __future__ import annotations

from collections.abc import Sequence
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


def _picture(height: int, label: str, parts: Sequence[str]) -> str:
    style = "text{font:12px sans-serif;fill:#1f2328}.h{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" '
        f'aria-label="{label}"><style>{style}</style>'
        f'<rect width="860" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _median(cell: str | Sequence[str]) -> float:
    return float(cell if isinstance(cell, str) else cell[0])
