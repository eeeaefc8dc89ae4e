"""Successive halving on made-up configurations, whose times and answers are known: what it finds, and for how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vtx.runtime.errors import RequestError
from vtx.tools.data.bounds import ImageLosses
from vtx.tools.fit.asking import TimedAnswer
from vtx.tools.fit.fit import FURTHER, TURNS, excess, measure_turns, nearest, turns_for
from vtx.tools.fit.fit import evidence_of as evidence
from vtx.tools.fit.search import FINALISTS, Budget, Rating, best, planned, rate, search
from vtx.tools.fit.settings import Setting

QUESTIONS = 400
IMAGES = [f"image {n}" for n in range(QUESTIONS)]


class Engine:
    """Stands for a bundle on an engine."""

    digest, device, compute, name, memory, planned = "bundle", "cpu", "f32", "bundle", 1, None


class Made:
    """Configuration `k` takes `ms[k]` and changes the answers to a share of `shares[k]` of the questions."""

    def __init__(self, ms: dict[int | None, float], shares: dict[int | None, float]) -> None:
        rng = np.random.default_rng(5)
        self.ms, self.asked = ms, set[tuple[int | None, int]]()
        self.changes = {k: rng.random(QUESTIONS) < share for k, share in shares.items()}

    def ask(self, settings: Sequence[Setting], numbers: Sequence[int], phase: str, turn: int = 0) -> None:
        self.asked |= {(made.k, n) for made in settings for n in numbers}  # type: ignore[misc]

    def usable(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def reply(self, made: Setting, number: int, turn: int = 0) -> TimedAnswer:
        ms = self.ms[made.k]  # type: ignore[index]
        return TimedAnswer("", ms / 2, ms / 10, ms)

    def changed(self, made: Setting, reference: Setting, number: int) -> float:
        assert {(made.k, number), (reference.k, number)} <= self.asked
        return float(made.k is not None and self.changes[made.k][number])  # type: ignore[index]


ENGINE = Engine()


def of(k: int | None) -> Setting:
    on: Any = ENGINE
    return Setting(on, k, "none")


def thirty() -> Made:
    """K = 1..30: the smaller the quicker, and from 12 on downwards each changes more answers."""
    ms: dict[int | None, float] = {None: 35.0, **{k: 4.0 + k for k in range(1, 31)}}
    return Made(ms, {k: 0.0 if k >= 12 else 0.004 * (12 - k) ** 2 for k in range(1, 31)})


def test_the_fastest_that_keeps_the_answers_is_found_for_less_than_half_of_all_answers() -> None:
    made, budget = thirty(), Budget(0.98)
    found, rungs = search([of(None), *(of(k) for k in range(1, 31))], of(None), range(QUESTIONS), IMAGES, made, budget)
    exhaustive = next(k for k in range(1, 31) if made.changes[k].mean() <= 0.02)
    assert exhaustive in {s.k for s in found}
    assert len(made.asked) <= planned(31, QUESTIONS) < 31 * QUESTIONS / 2
    assert len(found) == FINALISTS
    assert [rung.questions for rung in rungs] == [8, 16, 32, 64, 128, 256, 400]


def test_finalists_are_in_the_order_of_changed_answers_the_slower_first() -> None:
    made = thirty()
    found, rungs = search([of(k) for k in range(1, 31)], of(None), range(QUESTIONS), IMAGES, made, Budget(0.98))
    last = rungs[-1].ratings
    assert found == sorted(found, key=lambda s: (last[s].changed, -last[s].answer_ms))


def test_of_those_that_may_keep_the_answers_the_fastest_within_the_limit_come_first() -> None:
    ratings = {of(1): Rating(0.05, 10, 0, 0), of(2): Rating(0.01, 20, 0, 0), of(3): Rating(0.0, 30, 0, 0)}
    assert best(ratings, 2, 0.02) == [of(2), of(3)]
    assert best(ratings, 9, 0.02) == [of(2), of(3), of(1)]


def test_more_changes_than_allowed_exclude_only_what_certainly_has_them() -> None:
    made, budget, numbers = thirty(), Budget(0.8), range(8)
    made.changes |= {1: np.arange(QUESTIONS) < 2, 2: np.arange(QUESTIONS) < 8}
    made.ask([of(1), of(2), of(None)], numbers, "")
    few, all_of_them = (rate(of(k), of(None), numbers, IMAGES, made, budget) for k in (1, 2))
    assert (few.changed, few.excess) == (0.25, 0), "2 of 8 may be a fifth of all"
    assert all_of_them.excess > 0


def test_first_questions_that_cannot_be_asked_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made = thirty()
    monkeypatch.setattr(made, "usable", lambda numbers: [n for n in numbers if n >= 20])
    _, rungs = search([of(k) for k in range(1, 31)], of(None), range(QUESTIONS), IMAGES, made, Budget(0.98))
    assert [rung.questions for rung in rungs] == [12, 44, 108, 236, 380]


def test_what_is_late_by_its_median_goes_before_what_may_be_in_time() -> None:
    made = thirty()
    settings = [of(k) for k in range(1, 31)]
    found, _ = search(settings, of(None), range(QUESTIONS), IMAGES, made, Budget(0.5, first_token_ms=7.0))
    assert {s.k for s in found} <= set(range(1, 11))  # half of 4 + K


def test_if_everything_is_beyond_the_budget_the_nearest_remain() -> None:
    made = thirty()
    found, _ = search([of(k) for k in range(1, 31)], of(None), range(QUESTIONS), IMAGES, made, Budget(0.5, 0.1))
    assert {s.k for s in found} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("words", "budget"),
    [("50% to 99.9%", {"keep": 1.0}), ("--first-token is 0 ms", {"keep": 0.9, "first_token_ms": 0})],
)
def test_a_budget_that_means_nothing_is_refused(words: str, budget: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=words):
        Budget(**budget)


def test_if_nothing_fits_the_verdict_has_the_nearest_and_the_budgets_that_would_do() -> None:
    budget = Budget(0.98, first_token_ms=10.0)
    slow, quick = of(20), of(4)
    held = {
        of(None): evidence(of(None), None, [[TimedAnswer("", 30.0, None, 40.0)] * 300]),
        slow: evidence(slow, ImageLosses(np.zeros(200), True), [[TimedAnswer("", 12.0, None, 20.0)] * 300]),
        quick: evidence(
            quick, ImageLosses(np.repeat([1.0, 0.0], [20, 180]), True), [[TimedAnswer("", 6.0, None, 9.0)] * 300]
        ),
    }
    late = {s: excess(found, budget) for s, found in held.items()}
    assert late[slow] == pytest.approx(0.2)
    first, would_do, other = nearest(held, late, [slow], [slow, quick], budget)
    assert "nothing fits" in first
    assert "K = 20" in first
    assert would_do == "it fits with --first-token 13"
    assert "K = 4" in other
    assert "--keep 85.8%" in other  # Clopper and Pearson's upper end of 20 of 200 is 14.2%


def timed(ms: Sequence[float]) -> list[TimedAnswer]:
    return [TimedAnswer("", first, None, 2 * first) for first in ms]


def test_the_bound_of_the_99th_percentile_grows_with_what_turns_differ_by() -> None:
    rng = np.random.default_rng(3)
    alike, slower = rng.uniform(9, 10, 300), 1.5 * rng.uniform(9, 10, 300)
    first = evidence(of(4), None, [timed(alike), timed(alike)]).first_token_ms
    assert first.p99_upper == pytest.approx(sorted([*alike, *alike])[-2], abs=1e-3)
    spread = evidence(of(4), None, [timed(alike), timed(slower)]).first_token_ms.p99_upper
    assert spread is not None
    ends = [np.quantile(turn, 0.99) for turn in (alike, slower)]
    assert spread == pytest.approx(sorted(slower)[-2] * ends[1] / ends[0], abs=1e-3)


def test_too_few_times_are_never_in_time() -> None:
    few = evidence(of(4), None, [timed([1.0] * 298)])
    assert few.first_token_ms.p99_upper is None
    assert excess(few, Budget(0.9, first_token_ms=50.0)) == np.inf
    assert excess(few, Budget(0.9, first_token_ms=50.0), estimated=True) == 0
    assert excess(few, Budget(0.9)) == 0


class Busy(Made):
    """Its machine is slower in some turns, by these factors."""

    factors: Sequence[float]

    def reply(self, made: Setting, number: int, turn: int = 0) -> TimedAnswer:
        ms = self.factors[turn] * self.ms[made.k]  # type: ignore[index]
        return TimedAnswer("", ms / 2, ms / 10, ms)


def test_times_are_measured_again_until_two_turns_agree_and_no_turn_is_left_out() -> None:
    busy = Busy({4: 10.0, 5: 11.0}, {})
    settings, most = [of(4), of(5)], 2 + FURTHER
    for factors, expected in (
        ([1.0, 1.05], (2, True)), ([3.0, 1.0, 1.05], (3, True)), ([3.0, 1.5, 1.0, 1.0], (4, True)),
        ([3.0, 2.0, 1.5, 1.0], (4, False)),
    ):  # fmt: skip
        busy.factors = factors
        turns, quiet = measure_turns(settings, range(20), busy, 2)
        assert (len(turns), quiet) == expected
        assert len(turns) <= most


def test_turns_are_as_many_as_a_bound_needs() -> None:
    assert [turns_for(times, Budget(0.9, 50.0)) for times in (300, 150, 149, 15, 1)] == [2, 2, 3, 20, TURNS]
    assert turns_for(15, Budget(0.9)) == 2
