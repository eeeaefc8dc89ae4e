"""The cases that `covering` chooses have every value, or every pair of values, of a test's parameters, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import covering


@pytest.mark.parametrize(
    ("sizes", "strength", "most"), [((7, 2), 1, 7), ((7, 3), 2, 21), ((3, 4, 3), 2, 12), ((3, 2, 2, 2), 2, 8)]
)
def test_every_combination_of_values_is_covered_by_few_cases(sizes: tuple[int, ...], strength: int, most: int) -> None:
    cases = [dict(enumerate(values)) for values in product(*map(range, sizes))]
    named = [{str(name): value for name, value in case.items()} for case in cases]
    chosen = [cases[number] for number in covering(named, strength)]
    assert len(chosen) <= most
    for names in combinations(range(len(sizes)), strength):
        for values in product(*(range(sizes[name]) for name in names)):
            assert any(all(case[n] == v for n, v in zip(names, values, strict=True)) for case in chosen)


def test_a_combination_that_no_case_has_is_not_asked_for() -> None:
    assert covering([{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 0, "b": 0}], 2) == [0, 1]
