"""The picture of forms of weights, as SVG: KL from float32 against bits of a weight, ours beside others'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, DOWN = 720, 220, 80, 44, 300  # of a panel; of the first panel's corner; to the next
BITS = 4.0, 9.0  # the ends of the axes: others are left out
KL = 1e-4, 1.0
OURS, THEIRS = "#1f6feb", "#8b949e"
TEXT = '<text x="{:.0f}" y="{:.0f}" {}>{}</text>'
STYLE = "text{font:12px sans-serif;fill:#1f2328}.h{font-weight:bold}"
Results = Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]]


def forms(results: Results) -> str:
    """An SVG with a panel for each decoder of `results` (columns and rows)."""
    parts = [
        TEXT.format(LEFT, 18, 'class="h"', "KL from float32, nats, against bits of a weight;"),
        TEXT.format(LEFT + 320, 18, f'class="h" style="fill:{OURS}"', "vtx"),
        TEXT.format(LEFT + 350, 18, f'class="h" style="fill:{THEIRS}"', "others"),
    ]
    for number, (decoder, (columns, rows)) in enumerate(results.items()):
        top = TOP + number * DOWN
        cells = [dict(zip(columns, row, strict=True)) for row in rows]
        parts.append(TEXT.format(LEFT, top - 6, "", decoder))
        parts += _axes(top)
        for cell in cells:
            parts += _point(top, cell)
    height = TOP + len(results) * DOWN
    label = "Divergence of rounded weights from float32 against the bits of a weight"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" aria-label="{label}">'
        f'<style>{STYLE}</style><rect width="860" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _point(top: int, cell: Mapping[str, str]) -> list[str]:
    """A dot and its name, nothing if it is beyond the axes or a variant of another form."""
    bits = float(cell["bits"] or "nan")
    kl = float(cell["KL"])
    if "," in cell["form"] or not (BITS[0] <= bits <= BITS[1] and KL[0] <= kl <= KL[1]):
        return []
    colour = OURS if cell["form"].startswith("int") else THEIRS
    x = _across(bits)
    y = top + _down(kl)
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    below = 0 if colour == OURS else 18  # so that neighbours do not hide each other
    name = cell["form"].replace("int4-32@", "@").replace(" activation-", " ")
    if name.startswith("nncf") or (name.startswith("@") and " " not in name):  # others are right of it
        return [dot, TEXT.format(x - 7, y + 14, f'text-anchor="end" style="fill:{colour}"', name)]
    return [dot, TEXT.format(x + 7, y - 4 + below, f'style="fill:{colour}"', name)]


def _axes(top: int) -> list[str]:
    parts = [f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>']
    for power in range(round(math.log10(KL[0])), 1 + round(math.log10(KL[1]))):
        parts.append(TEXT.format(LEFT - 6, top + _down(10**power) + 4, 'text-anchor="end"', f"{10**power:g}"))
    for bits in range(round(BITS[0]), 1 + round(BITS[1])):
        parts.append(TEXT.format(_across(bits), top + HEIGHT + 16, 'text-anchor="middle"', bits))
    return parts


def _across(bits: float) -> float:
    return LEFT + WIDTH * (bits - BITS[0]) / (BITS[1] - BITS[0])


def _down(kl: float) -> float:
    return HEIGHT * (math.log(KL[1]) - math.log(kl)) / (math.log(KL[1]) - math.log(KL[0]))
