"""Accuracy against coverage: of answers to choices the share that a threshold accepts, and how many of them are right.

An answer's score is the probability that the model gives to it: its share of the choices times the mass of them all. A
threshold is stated only with a bound that accounts for the search: thresholds are tested from the strictest on, and the
first at which the accuracy is not shown ends it. Their order, and which one is first, depend on scores alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from vtx.runtime.bundle.card import Acceptance
from vtx.runtime.errors import RequestError
from vtx.tools.data.bounds import ImageLosses, least_images, passing
from vtx.tools.data.intervals import clustered_share, sums_by_group

THRESHOLDS = (0.999, 0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0)


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """The answers that a threshold accepts: the share `coverage` of the questions, of which `accuracy` is right.

    `low` and `high` are the ends of its 95% interval over images. None without an accepted answer.
    """

    threshold: float
    coverage: float
    accepted: int
    accuracy: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Answers to choices: the probability of each, its score (1: right, 0: wrong) and the image that it is about."""

    probabilities: Sequence[float]
    scores: Sequence[float]
    images: Sequence[Hashable]

    def points(self) -> tuple[CoveragePoint, ...]:
        """The answers that each of the thresholds accepts."""
        points = list[CoveragePoint]()
        numbers = {image: number for number, image in enumerate(dict.fromkeys(self.images))}
        for threshold in THRESHOLDS:
            members = self._accepted(threshold)
            coverage = len(members) / len(self.scores)
            if not members:
                points.append(CoveragePoint(threshold, coverage, 0, None, None, None))
                continue
            rows = np.array([[self.scores[n], 1.0] for n in members])
            share = clustered_share(*sums_by_group(rows, [numbers[self.images[n]] for n in members]).T)
            points.append(CoveragePoint(threshold, coverage, len(members), share.share, share.low, share.high))
        return tuple(points)

    def acceptance(self, target: float, source: str, method: str) -> Acceptance | None:
        """The laxest threshold whose answers are shown to be right at least `target` of the time; None if none is."""
        tested = list[tuple[float, ImageLosses]]()
        for threshold in THRESHOLDS:
            losses = self._losses(threshold)
            if losses is None:
                continue
            if tested or len(losses.means) >= least_images(1 - target, single=losses.single):
                tested.append((threshold, losses))
        count = passing([losses for _, losses in tested], 1 - target)
        if count == 0:
            return None
        threshold, losses = tested[count - 1]
        coverage = len(self._accepted(threshold)) / len(self.scores)
        return Acceptance(threshold, 1 - losses.mean, 1 - losses.upper(), coverage, len(self.scores), source, method)

    def _accepted(self, threshold: float) -> list[int]:
        return [n for n, probability in enumerate(self.probabilities) if probability >= threshold]

    def _losses(self, threshold: float) -> ImageLosses | None:
        members = self._accepted(threshold)
        if not members:
            return None
        return ImageLosses.of([1 - self.scores[n] for n in members], [self.images[n] for n in members])


def check_target(target: float) -> None:
    """Raise RequestError unless the accuracy that is asked for is a share between 0 and 1."""
    if not 0 < target < 1:
        raise RequestError(f"--coverage is {target:g}; it must be an accuracy between 0 and 1, such as 0.95")
