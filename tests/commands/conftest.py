"""A bundle and a picture for the tests of commands, and a home without any."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.export_all(tiny_checkpoint(), tmp_path_factory.mktemp("cli") / "bundle").folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image.png"
    random_image(0, (60, 60)).save(path)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, no bundle in the environment, and signals as they were."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("VTX_BUNDLE", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "160")
    before = signal.getsignal(signal.SIGTERM)
    yield home
    signal.signal(signal.SIGTERM, before)
