"""Series of repeated figures: their median and spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    median: float
    q1: float
    q3: float
    min: float
    max: float
    n: int


def spread(values: Sequence[float]) -> Series:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Series(middle, low, high, min(values), max(values), len(values))


def shown(series: Series, digits: int = 2) -> str:
    """Median and quartiles; the extremes for fewer than four figures, which have no quartiles."""
    low, high = (series.q1, series.q3) if series.n >= 4 else (series.min, series.max)
    return f"{series.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
