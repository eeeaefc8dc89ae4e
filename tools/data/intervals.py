"""Confidence intervals of means and shares over a sample of questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE, NORMAL = 0.95, 1.959964
DRAWS = 4000


@dataclass(frozen=True, slots=True)
class MeanInterval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ShareInterval:
    """A share of `count` items and its Wilson interval."""

    share: float
    low: float
    high: float
    count: int


def resampled_sums(rows: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Sums [draws, columns] of len(rows) rows, resampled from [rows, columns] with replacement."""
    count = len(rows)
    block = max(1, (1 << 22) // count)
    return np.concatenate(
        [
            rng.multinomial(count, np.full(count, 1 / count), min(block, DRAWS - start)) @ rows
            for start in range(0, DRAWS, block)
        ]
    )


def spread_of(draws: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The ends of the interval of each column of [draws, columns]."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high


def mean_intervals(values: NDArray[np.float64]) -> list[MeanInterval]:
    """Mean and interval of each column of [samples, columns], by resampling rows with a fixed seed."""
    low, high = spread_of(resampled_sums(values, np.random.default_rng(0)) / len(values))
    return [MeanInterval(*map(float, ends)) for ends in zip(values.mean(0), low, high, strict=True)]


def share_interval(hits: int, count: int) -> ShareInterval:
    """A share of `count` and its Wilson interval."""
    low, high = wilson(hits / count, count)
    return ShareInterval(hits / count, low, high, count)


def wilson(share: float, count: float) -> tuple[float, float]:
    """The Wilson interval of a share of `count`, which need not be whole; it contains the share despite rounding."""
    z2 = NORMAL**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = NORMAL * (share * (1 - share) / count + z2 / count / 4) ** 0.5 / (1 + z2)
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def effective_count(hits: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """The number of independent questions with the variance of a share over groups, at most the number of questions.

    `hits` and `counts` are per group. Questions about one image tend to be right or wrong together.
    """
    total, groups = counts.sum(), len(counts)
    share = hits.sum() / total
    variance = ((hits - share * counts) ** 2).sum() / total**2 * groups / max(1, groups - 1)
    worth = share * (1 - share) / variance if variance > 0 else total
    return float(min(total, worth))
