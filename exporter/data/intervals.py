"""Confidence intervals of means and shares over a sample of questions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CONFIDENCE, NORMAL = 0.95, 1.959964
DRAWS = 4000
Interval = dict[str, float]


def mean_intervals(values: NDArray[np.float64]) -> list[Interval]:
    """Mean and interval of each column of [samples, columns], by resampling rows with a fixed seed."""
    count, rng = len(values), np.random.default_rng(0)
    block = max(1, (1 << 22) // count)
    means = [
        rng.multinomial(count, np.full(count, 1 / count), min(block, DRAWS - start)) @ values / count
        for start in range(0, DRAWS, block)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return [
        {"mean": float(m), "low": float(a), "high": float(b)} for m, a, b in zip(values.mean(0), low, high, strict=True)
    ]


def share_interval(hits: int, count: int) -> Interval:
    """A share of `count` and its Wilson interval."""
    share, z2 = hits / count, NORMAL**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = NORMAL * (share * (1 - share) / count + z2 / count / 4) ** 0.5 / (1 + z2)
    return {"share": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "count": count}
