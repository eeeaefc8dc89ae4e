"""Bundles with engines for the stand-in of a GPU, and that GPU, found wherever the backend looks for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import copy, export_all
from tests.support.engines import DUAL, SMALL_GROWTH, build_for, on_standin
from tests.support.fixtures import Checkpoints
from tests.support.gpu_standin import Gpu, build_all
from tests.support.ort_standin import Ort
from tests.support.tiny import Tiny
from vtx.runtime.backends import device_lanes
from vtx.runtime.backends.ort import backend as ort_backend
from vtx.runtime.backends.ort import cuda as ort_cuda


@pytest.fixture(scope="module")
def with_engines(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt") / "bundle"
    export_all(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3))
    build_all(folder)
    return folder


@pytest.fixture(scope="module")
def reducing(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt") / "bundle"
    words = (f"{DUAL},key=0.1", "fastv:k=2", "cls", "lsm", "mustdrop:192,layers=1/2", "dart")
    export_all(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), reductions=words)
    build_all(folder)
    return folder


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The stand-in for the GPU, found wherever the backend looks for one."""
    return on_standin(monkeypatch)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Ort:
    """The stand-in for onnxruntime-gpu, on a stand-in GPU."""
    found = Ort(Gpu())
    for module in (ort_backend, ort_cuda):
        monkeypatch.setattr(module, "load_onnxruntime", lambda: found)
    monkeypatch.setattr(ort_cuda, "load_driver", lambda: found.gpu)
    monkeypatch.setattr(device_lanes, "GROWTH", SMALL_GROWTH)
    return found


@pytest.fixture
def on_jetpack_6(with_engines: Path, tmp_path: Path, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with engines for JetPack 6, on that machine."""
    folder = copy(with_engines, tmp_path / "jetpack-6")
    build_for("trt10", folder, monkeypatch)
    return folder
