"""A bundle for tests that damage it, and copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.fixtures import Checkpoints


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.export_all(tiny_checkpoint(), tmp_path_factory.mktemp("whole") / "bundle").folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return bundles.copy(whole, tmp_path / "bundle")
