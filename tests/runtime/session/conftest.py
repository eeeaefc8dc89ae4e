"""A model of the bundle of a file's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exported import DEVICES, THREADS
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    """The bundle in `folder`, a fixture of the file, on each device."""
    with load(folder, device=request.param, threads=THREADS) as loaded:
        yield loaded
