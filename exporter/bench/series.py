"""Series of repeated figures: their median and spread, and tables that paste into Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Series = dict[str, float]


def spread(values: Sequence[float]) -> Series:
    """Median, quartiles, extremes and count of at least one figure."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "n": len(values)}


def shown(series: Series, digits: int = 2) -> str:
    """Median and quartiles; with fewer than four figures, which have no quartiles, the extremes."""
    low, high = ("q1", "q3") if series["n"] >= 4 else ("min", "max")
    return f"{series['median']:.{digits}f} ({series[low]:.{digits}f} to {series[high]:.{digits}f})"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
