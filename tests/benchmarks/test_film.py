"""The film of drawn shapes: what is still is equal in pixels, what is true is told, and answers are judged by it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from benchmarks.film import Judged, film, judge


def test_a_film_is_the_same_each_time_and_changes_only_where_something_does() -> None:
    shots = list(film(30, 10, seed=1))
    assert len(shots) == 300
    pixels = [np.asarray(shot.image) for shot in shots]
    for one, other in zip(pixels, film(30, 10, seed=1), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other.image))
    still = [np.array_equal(one, other) for one, other in pairwise(pixels)]
    assert 0.3 < np.mean(still) < 0.95
    changes = [n for n in range(1, 300) if shots[n].truth != shots[n - 1].truth]
    assert len(changes) > 3
    assert not any(still[n - 1] for n in changes), "what is told to be true is to be seen"
    noisy = [np.asarray(shot.image) for shot in film(1, 10, seed=1, noise=3)]
    assert not any(np.array_equal(one, other) for one, other in pairwise(noisy))


def test_answers_are_judged_by_the_truth_of_their_frames() -> None:
    truths = [{"count": text} for text in "1122333"]
    answers = [(0, "count", "1", False), (1, "count", "4", False), (3, "count", "2", False), (5, "count", "2", True)]
    assert judge(truths, answers, 2.0) == Judged(4, 2, 1, found=1, missed=1, false=1, delays=[0.5])
