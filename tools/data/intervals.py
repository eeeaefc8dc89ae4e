"""Confidence intervals of means and shares over a sample of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Groups = Sequence[int]  # of each sample; those of a group, such as questions about one image, are not independent
CONFIDENCE = 0.95
NORMAL = 1.959964
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


def mean_intervals(values: NDArray[np.float64], groups: Groups | None = None) -> list[MeanInterval]:
    """Mean and interval of each column of [samples, columns], by resampling rows with a fixed seed.

    With `groups` those of a group are drawn together. Of the difference of two columns it is the paired interval.
    """
    rows = sums_by_group(np.column_stack([values, np.ones(len(values))]), groups)
    sums = resampled_sums(rows, np.random.default_rng(0))
    low, high = spread_of(sums[:, :-1] / sums[:, -1:])
    return [MeanInterval(*map(float, ends)) for ends in zip(values.mean(0), low, high, strict=True)]


def sums_by_group(values: NDArray[np.float64], groups: Groups | None) -> NDArray[np.float64]:
    """Sums [groups, columns] of [samples, columns] over each group; None: every sample is one of its own."""
    if groups is None:
        return values
    _, numbers = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.zeros((numbers.max() + 1, values.shape[1]))
    np.add.at(sums, numbers, values)
    return sums


def grouped_share(hits: Sequence[bool], groups: Groups) -> ShareInterval:
    """The share of hits, and its Wilson interval at the number of independent questions."""
    rows = sums_by_group(np.column_stack([np.array(hits, float), np.ones(len(hits))]), groups)
    return clustered_share(rows[:, 0], rows[:, 1])


def clustered_share(hits: NDArray[np.float64], counts: NDArray[np.float64]) -> ShareInterval:
    """The same from the hits and questions of each group, an image for example."""
    share = float(hits.sum() / counts.sum())
    return ShareInterval(share, *wilson(share, effective_count(hits, counts)), int(counts.sum()))


def wilson(share: float, count: float) -> tuple[float, float]:
    """The Wilson interval of a share of `count`, which need not be whole; it contains the share despite rounding."""
    z2 = NORMAL**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = NORMAL * (share * (1 - share) / count + z2 / count / 4) ** 0.5 / (1 + z2)
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def effective_count(hits: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """The number of independent questions with the variance of a share over groups, at most the number of questions.

    `hits` and `counts` are per group. Questions about one image tend to be right or wrong together. Where all are hits,
    or none, nothing shows how much they do, and each group counts as one.
    """
    total = counts.sum()
    groups = len(counts)
    share = hits.sum() / total
    variance = ((hits - share * counts) ** 2).sum() / total**2 * groups / max(1, groups - 1)
    worth = share * (1 - share) / variance if variance > 0 else groups if share in (0, 1) else total
    return float(min(total, worth))
