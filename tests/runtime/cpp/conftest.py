"""Fixtures of several files of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bundles import export_all
from tests.support.cabi import Loaded
from tests.support.cpp import write_pictures
from tests.support.cpp_tensorrt import BUILT, REDUCTIONS, Machine, build, machine_in
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny


@pytest.fixture(scope="module")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pictures of the `SIZES` that the file names."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), request.module.SIZES)


@pytest.fixture
def opened() -> Iterator[Callable[..., Loaded]]:
    """`opened(folder, device, fit)`: the bundle in libvtx, closed at the end of the test."""
    made: list[Loaded] = []

    def make(folder: Path, device: str = "cpu", fit: str | None = None) -> Loaded:
        made.append(Loaded(folder, device, fit=fit))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def engines(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines of the stand-ins for every release of TensorRT."""
    folder = tmp_path_factory.mktemp("cpp-tensorrt") / "bundle"
    export_all(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), reductions=REDUCTIONS)
    for release in BUILT:
        build(folder, release)
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return machine_in(tmp_path, monkeypatch)
