"""Equal cost: which settings are tried, how the best of each family is chosen and judged, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.bundles import export

from vtx.runtime.errors import RequestError
from vtx.tools.bench.ladder import GATES, WITHDRAWAL, Best, find_best, make_ladder, parse_budgets, verdict
from vtx.tools.bench.methods import Method

NONE, EARLY, LATE = Method(None), Method(3), Method(5)
FEW, MANY = Method(None, "cls:keep=0.25"), Method(None, "cls:keep=0.5")
METHODS = (NONE, EARLY, LATE, FEW, MANY)
LADDER = {WITHDRAWAL: (EARLY, LATE), "cls": (FEW, MANY)}
COSTS = (100.0, 30.0, 60.0, 25.0, 50.0)


def best(answers: dict[Method, Sequence[float]], budgets: Sequence[float]) -> list[Best]:
    scores = np.array([answers[method] for method in METHODS], float).T
    return [*find_best(LADDER, METHODS, scores, COSTS, budgets, range(len(scores)))]


def test_of_equally_good_settings_the_one_nearest_to_the_budget_is_taken() -> None:
    found = best(dict.fromkeys(METHODS, [1.0] * 8), (0.6, 0.4, 0.28, 0.2))
    rows = [(row.budget, row.family, row.method, row.cost) for row in found]
    assert rows == [
        (0.6, "cls", "cls:keep=0.5", 0.5),
        (0.6, WITHDRAWAL, "K = 5", 0.6),
        (0.4, "cls", "cls:keep=0.25", 0.25),
        (0.4, WITHDRAWAL, "K = 3", 0.3),
        (0.28, "cls", "cls:keep=0.25", 0.25),
    ]


def test_a_setting_is_judged_by_questions_that_it_was_not_chosen_by() -> None:
    lucky, steady = [1.0, 0.0] * 10, [0.0, 1.0] * 10  # right on the choosing half, and on the judging one
    answers = {NONE: [1.0] * 20, EARLY: lucky, LATE: steady, FEW: lucky, MANY: steady}
    found = best(answers, (1.0,))
    assert [(row.method, row.score.share, row.score.count) for row in found] == [
        ("cls:keep=0.25", 0.0, 10),
        ("K = 3", 0.0, 10),
    ]


def test_who_answers_less_is_told_apart_only_beyond_chance() -> None:
    rights = [1.0] * 40
    one_less = [1.0] * 39 + [0.0]
    never = [0.0] * 40
    close = best({NONE: rights, EARLY: never, LATE: rights, FEW: never, MANY: one_less}, (0.6,))
    assert [(row.method, row.told_apart) for row in close] == [("K = 5", False), ("cls:keep=0.5", False)]
    assert verdict(close, "the arithmetic") == [
        "Within 60% of the arithmetic, K = 5 answers most: 100.0%. Not told apart from it: cls."
    ]
    apart = best({NONE: rights, EARLY: never, LATE: rights, FEW: never, MANY: never}, (0.6,))
    assert verdict(apart, "the arithmetic") == [
        "Within 60% of the arithmetic, K = 5 answers most: 100.0%. Worse beyond chance: cls (100.0 points)."
    ]


def test_a_family_that_beats_withdrawal_is_named_first() -> None:
    never, always = [0.0] * 40, [1.0] * 40
    found = best({NONE: always, EARLY: never, LATE: never, FEW: always, MANY: always}, (0.4,))
    assert verdict(found, "the arithmetic") == [
        "Within 40% of the arithmetic, cls:keep=0.25 answers most: 100.0%. "
        "Worse beyond chance: withdrawal (100.0 points)."
    ]


def test_questions_without_a_known_answer_do_not_count() -> None:
    unknown = [1.0, np.nan, 1.0, np.nan, 1.0, 1.0]
    [row, _] = best(dict.fromkeys(METHODS, unknown), (0.6,))
    assert (row.score.share, row.score.count) == (1.0, 2)


def test_one_known_answer_judges_nothing() -> None:
    assert best({method: [1.0, np.nan] for method in METHODS}, (0.6,)) == []


def test_only_what_the_bundle_can_run_is_tried(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    manifest = export(tiny_checkpoint(), tmp_path / "bundle", reductions=("none", "fastv", "dart")).manifest
    ladder, lacking = make_ladder(manifest, "ort", (None, *manifest.variants, "auto"))
    pruned = ("cls", "visionzip", "hiprune", "lsm", "cdpruner, text=tower", "pyramiddrop", "mustdrop")
    assert lacking == (*pruned, "cls + withdrawal", "mustdrop + withdrawal")
    assert [method.k for method in ladder[WITHDRAWAL]] == [*manifest.variants]
    assert GATES not in ladder
    assert {"cdpruner", "cdpruner, text=none", "dart", "dart, k=0", "fastv", "cdpruner + withdrawal"} < set(ladder)
    assert len(ladder["cdpruner + withdrawal"]) == len(manifest.variants)


@pytest.mark.parametrize("text", ["", "a", "50,", "0", "101", "-5", "nan"])
def test_budgets_that_are_not_percentages_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--budgets is"):
        parse_budgets(text)


def test_budgets_are_shares() -> None:
    assert parse_budgets("75, 12.5") == (0.75, 0.125)
