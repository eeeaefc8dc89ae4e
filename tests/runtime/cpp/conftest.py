"""Fixtures of several files of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cabi import Loaded


@pytest.fixture
def opened() -> Iterator[Callable[..., Loaded]]:
    """`opened(folder, device)`: the bundle in libvtx, closed at the end of the test."""
    made: list[Loaded] = []

    def make(folder: Path, device: str = "cpu") -> Loaded:
        made.append(Loaded(folder, device))
        return made[-1]

    yield make
    for each in made:
        each.close()
