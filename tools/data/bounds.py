"""Upper bounds of a mean loss that hold at every sample size, not only for large ones.

A loss is 1 for a changed answer and 0 for an equal one. The mean is over images: each counts the same, by the mean of
its questions, since questions about one image tend to change together.

    one question an image    Clopper and Pearson: the exact tail of the binomial distribution
    several                  betting on image means (Waudby-Smith and Ramdas 2024): if the mean is at least m, the
                             capital of a bettor who stakes c of it on every image being below m has a mean of at most
                             1, so it is 20 or more with a probability of at most 5% (Markov); many c are averaged

Both ask only that the images were drawn independently.

A quantile, such as the 99th percentile of times, has an upper bound among the largest values: how many independent
values lie beyond the quantile is binomial, whatever their distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RISK = 0.05  # that a stated bound is wrong
EXACT = "Clopper-Pearson"
BETTING = "betting on image means"
_STAKES = (np.arange(64) + 0.5) / 64
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class ImageLosses:
    """The mean loss of each image, from 0 to 1. `single`: no image has more than one question."""

    means: NDArray[np.float64]
    single: bool

    @classmethod
    def of(cls, losses: Sequence[float], images: Sequence[Hashable]) -> ImageLosses:
        """From the loss of each question and the image that it is about."""
        by_image: dict[Hashable, list[float]] = {}
        for loss, image in zip(losses, images, strict=True):
            by_image.setdefault(image, []).append(loss)
        single = all(len(of_image) == 1 for of_image in by_image.values())
        return cls(np.array([sum(of_image) / len(of_image) for of_image in by_image.values()], np.float64), single)

    @property
    def mean(self) -> float:
        return float(self.means.mean())

    @property
    def method(self) -> str:
        return EXACT if self.single else BETTING

    def p_value(self, limit: float) -> float:
        """The probability, at most, of losses so small if their mean were `limit` or more; `limit` in (0, 1)."""
        if self.single:
            return _binomial_tail(round(float(self.means.sum())), len(self.means), limit)
        gains = (limit - self.means) / (1 - limit)
        logs = np.log1p(_STAKES[:, None] * gains).sum(1)
        most = float(logs.max())
        capital = most + math.log(float(np.exp(logs - most).mean()))
        return math.exp(-capital) if capital > 0 else 1.0

    def upper(self) -> float:
        """The upper end of the one-sided 95% interval of the mean."""
        return _bisect(lambda limit: self.p_value(limit) > RISK)

    def lower(self) -> float:
        """The lower end of the one-sided 95% interval of the mean."""
        return 1 - ImageLosses(1 - self.means, self.single).upper()


def least_images(limit: float, *, single: bool) -> int:
    """The images that a bound of `limit` takes if no answer changes."""
    most = 1
    while ImageLosses(np.zeros(most), single).p_value(limit) > RISK:
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        enough = ImageLosses(np.zeros(middle), single).p_value(limit) <= RISK
        least, most = (least, middle) if enough else (middle, most)
    return most


def quantile_upper(values: Sequence[float], quantile: float) -> float | None:
    """The upper end of the one-sided 95% interval of a quantile: one of the largest values, None if these are too few.

    `least_images(1 - quantile, single=True)` values are enough.
    """
    beyond = 1 - quantile
    rank = 0
    while _binomial_tail(rank, len(values), beyond) <= RISK:
        rank += 1
    return sorted(values)[-rank] if rank else None


def passing(ordered: Sequence[ImageLosses], limit: float) -> int:
    """The number of `ordered`, from the first on, whose mean is shown to be below `limit`.

    Fixed-sequence testing: each is tested at the whole risk, and the first that fails ends it. The risk that any of
    those counted is not below the limit is then `RISK` at most, however many there are (Learn then Test, Angelopoulos
    and others 2021). The order must not depend on these losses.
    """
    for number, losses in enumerate(ordered):
        if losses.p_value(limit) > RISK:
            return number
    return len(ordered)


def _binomial_tail(hits: int, count: int, share: float) -> float:
    """The probability of at most `hits` of `count` at `share`."""
    if hits >= count:
        return 1.0
    ways = math.lgamma(count + 1)
    logs = (
        ways - math.lgamma(n + 1) - math.lgamma(count - n + 1) + n * math.log(share) + (count - n) * math.log1p(-share)
        for n in range(hits + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _bisect(below: Callable[[float], bool]) -> float:
    """The end of the range from 0 on in which `below` holds."""
    low = 0.0
    high = 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
