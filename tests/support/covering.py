"""Few cases of a test that between them have every value, or every pair of values, of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """The numbers of cases that have each combination of `strength` parameters' values that any case has.

    Each next case is the one that adds the most; of equals one whose values are chosen least so far, and the first.
    """
    parts = [set(combinations(sorted(case.items(), key=lambda item: item[0]), strength)) for case in cases]
    missing = set[object]().union(*parts)
    chosen, uses = list[int](), Counter[object]()

    def worth(number: int) -> tuple[int, int, int]:
        return len(parts[number] & missing), -sum(uses[value] for value in cases[number].items()), -number

    while missing:
        best = max(range(len(cases)), key=worth)
        missing -= parts[best]
        uses.update(cases[best].items())
        chosen.append(best)
    return sorted(chosen)
