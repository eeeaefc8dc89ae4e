"""Models of the bundles of a file's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.exported import DEVICES, THREADS, Models
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    """The bundle in `folder`, a fixture of the file, on each device."""
    with load(folder, device=request.param, threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def loaded(models: Models) -> Callable[..., Model]:
    """`loaded(device, *what)`: the bundle that `models` makes of the rest, on that device; the last few are kept."""

    @lru_cache(4)
    def open_bundle(device: str, *what: Any) -> Model:
        return load(models.folder(*what), device=device, threads=THREADS)

    return open_bundle
