"""Quantities as messages show them."""

from __future__ import annotations

import pytest

from vtx.runtime.units import duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (84.6, "85 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations_are_shown_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
