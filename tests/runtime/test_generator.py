"""Random numbers are SplitMix64's as published, and normal ones are normal."""

from __future__ import annotations

import numpy as np
import pytest

from vtx.runtime.generator import SplitMix

PUBLISHED = (  # of the seed 1234567
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
)  # fmt: skip


def test_numbers_are_the_published_ones() -> None:
    generator = SplitMix(1234567)
    assert [generator.uniform() for _ in PUBLISHED] == [(bits >> 11) / 2**53 for bits in PUBLISHED]
    generator = SplitMix(987654321)
    fifths = np.bincount([int(5 * generator.uniform()) for _ in range(100_000)])
    assert fifths.tolist() == [20027, 19892, 20073, 19978, 20030]


def test_normals_have_the_moments_of_the_normal_distribution() -> None:
    numbers = SplitMix(3).normals(100_001).astype(np.float64)
    assert len(numbers) == 100_001
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert np.mean(numbers**power) == pytest.approx(moment, abs=0.05)
    assert np.abs(numbers).max() > 4
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.01)


def test_choices_follow_their_odds_and_have_none_without() -> None:
    generator = SplitMix(1)
    counts = np.bincount([generator.choice(np.array([0.0, 0.5, 0.0, 0.2, 0.3])) for _ in range(10_000)])
    np.testing.assert_allclose(counts / 10_000, [0, 0.5, 0, 0.2, 0.3], atol=0.02)
