"""Pictures by name, and fresh answers about them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.fresh import NAMES, FreshAnswers
from tests.support.tiny import random_image

from vtx.runtime.api.model import Model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        random_image(number + 1).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def fresh(request: pytest.FixtureRequest, model: Model, folder: Path) -> FreshAnswers:
    """With the `OPTIONS` of the file."""
    return FreshAnswers(model, {name: folder / name for name in NAMES}, request.module.OPTIONS)
