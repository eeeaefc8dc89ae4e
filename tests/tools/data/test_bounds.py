"""Bounds of the share of changed answers: right as often as they say, also with many questions about an image."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vtx.tools.data.bounds import BETTING, EXACT, RISK, ImageLosses, least_images, passing, quantile_upper

DRAWS = 3000
SLACK = 3 * (RISK * (1 - RISK) / DRAWS) ** 0.5


def wrong(means: NDArray[np.float64], share: float, *, single: bool) -> float:
    """How often the bound of [draws, images] is below the true share: the test of that share then rejects it."""
    return float(np.mean([ImageLosses(of_draw, single).p_value(share) <= RISK for of_draw in means]))


def test_the_bound_of_a_quantile_is_the_smallest_that_so_many_values_show() -> None:
    """Of a 99th percentile: from 299 values on the largest, from 473 on the second largest."""
    found = {count: quantile_upper(range(count), 0.99) for count in (298, 299, 472, 473)}
    assert found == {298: None, 299: 298, 472: 471, 473: 471}


def test_the_exact_bound_is_the_one_of_tables() -> None:
    """0 of 299 show less than 1%, 0 of 298 do not; 3 of 200 show 3.83% (Clopper and Pearson, one-sided)."""
    assert least_images(0.01, single=True) == 299
    assert ImageLosses(np.zeros(298), True).upper() > 0.01 > ImageLosses(np.zeros(299), True).upper()
    assert ImageLosses(np.repeat([1.0, 0.0], [3, 197]), True).upper() == pytest.approx(0.0383, abs=1e-4)
    assert ImageLosses(np.repeat([1.0, 0.0], [3, 197]), True).lower() == pytest.approx(0.00411, abs=1e-4)
    assert ImageLosses(np.ones(5), True).upper() == 1.0


@pytest.mark.parametrize(("share", "images"), [(0.01, 150), (0.02, 300), (0.05, 80), (0.5, 40)])
def test_the_exact_bound_is_wrong_in_at_most_one_of_twenty_samples(share: float, images: int) -> None:
    changed = np.random.default_rng(1).random((DRAWS, images)) < share
    assert wrong(changed.astype(float), share, single=True) <= RISK + SLACK


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("share", "images"), [(0.02, 60), (0.05, 200), (0.2, 40)])
@pytest.mark.parametrize("together", [0.05, 1.0, 50.0])
def test_betting_holds_however_much_the_questions_of_an_image_change_together(
    share: float, images: int, together: float
) -> None:
    """Ten questions an image, whose chances are drawn from a beta distribution: all or none at 0.05, alike at 50."""
    rng = np.random.default_rng(2)
    chance = rng.beta(together * share, together * (1 - share), (DRAWS, images))
    assert wrong(rng.binomial(10, chance) / 10, share, single=False) <= RISK + SLACK


def test_ten_questions_that_change_together_are_not_ten_images() -> None:
    """Twenty images, of which one changes all of its ten answers: as 200 images they would show 10%."""
    changed = [1.0] * 10 + [0.0] * 190
    together = ImageLosses.of(changed, [n // 10 for n in range(200)])
    apart = ImageLosses.of(changed, range(200))
    assert (together.method, apart.method) == (BETTING, EXACT)
    assert together.mean == apart.mean == 0.05
    assert apart.upper() < 0.085
    assert together.upper() > 0.18


def test_betting_costs_little_where_nothing_changes() -> None:
    assert least_images(0.02, single=True) == 149 < least_images(0.02, single=False) < 230


def test_searching_among_many_does_not_raise_the_risk() -> None:
    """Twenty configurations just beyond the limit, in turn until one fails: a wrong one passes in 5% of samples."""
    rng, limit, wrongly = np.random.default_rng(3), 0.02, 0
    for _ in range(DRAWS):
        shared = rng.random(150) < limit  # the same images change in all of them, or others in each
        candidates = [shared | (rng.random(150) < 0.002) for _ in range(20)]
        wrongly += passing([ImageLosses(c.astype(float), True) for c in candidates], limit) > 0
    assert wrongly / DRAWS <= RISK + SLACK


def test_the_first_failure_ends_the_sequence() -> None:
    good, bad = ImageLosses(np.zeros(200), True), ImageLosses(np.ones(200), True)
    assert [passing(order, 0.02) for order in ([good, good, bad, good], [bad, good], [good], [])] == [2, 0, 1, 0]


def test_times_whose_99th_percentile_is_the_limit_pass_in_5_of_100_searches_at_most() -> None:
    """Times of which 1 of 100 is beyond the limit."""
    rng, promised, rounds = np.random.default_rng(11), 0, 2000
    limit = float(np.exp(2.3263))  # the 99th percentile of the exponential of a normal number
    for _ in range(rounds):
        upper = quantile_upper(list(np.exp(rng.standard_normal(600))), 0.99)
        promised += upper is not None and upper <= limit
    assert promised <= 0.05 * rounds + 3 * np.sqrt(0.05 * 0.95 * rounds)
    assert promised > 0.005 * rounds, "a bound that never promises anything would pass, too"
