"""The README's picture, as SVG: a first and a second question, vtx as installed beside others as installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = {"fp32": "fp32", "bf16": "bf16", "f16": "bf16", "int8": "int8", "q8_0": "int8", "int4": "int4", "q4_0": "int4"}
PANELS = {  # columns of the results: where their bars begin, and what a stranger reads above them
    "first token, s": (190, "a new picture: seconds to the answer"),
    "second question, s": (540, "the next question about it"),
}
LENGTH, ROW, TOP = 270, 26, 40  # of a panel's longest bar; of a line; of the first line
OURS, THEIRS = "#1f6feb", "#a8b1bb"
TEXT = '<text x="{}" y="{}" {}>{}</text>'


def bars(columns: Sequence[str], results: Sequence[Sequence[Any]], kind: str) -> str:
    """An SVG with a line for each contender with this kind of weights that sees pictures; C++ is in the tables only."""
    rows = [dict(zip(columns, result, strict=True)) for result in results]
    shown = [row for row in rows if KINDS[row["weights"]] == kind and not row["computed"].startswith("failed")]
    shown = [row for row in shown if row["contender"] != "libvtx" and "†" not in row["contender"]]
    parts = [TEXT.format(x, 22, 'class="h"', heading) for x, heading in PANELS.values()]
    longest = {column: max(_median(row[column]) for row in shown) for column in PANELS}
    y = TOP
    for row in shown:
        contender = row["contender"]
        parts.append(TEXT.format(PANELS["first token, s"][0] - 8, y + 15, 'text-anchor="end"', contender))
        color = OURS if contender.startswith("vtx") else THEIRS
        for column, (x, _) in PANELS.items():
            value = _median(row[column])
            width = max(1.0, LENGTH * value / longest[column])
            parts.append(f'<rect x="{x}" y="{y + 2}" width="{width:.1f}" height="{ROW - 8}" fill="{color}"/>')
            parts.append(TEXT.format(f"{x + width + 5:.1f}", y + 15, "", f"{value:.2f}"))
        y += ROW
    return _picture(y + 8, "Seconds until an answer begins: a new picture, the next question about it", parts)


def _picture(height: int, label: str, parts: Sequence[str]) -> str:
    style = "text{font:13px sans-serif;fill:#1f2328}.h{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" '
        f'aria-label="{label}"><style>{style}</style>'
        f'<rect width="860" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _median(cell: str | Sequence[str]) -> float:
    return float(cell if isinstance(cell, str) else cell[0])
