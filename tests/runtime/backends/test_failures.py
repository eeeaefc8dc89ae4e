"""Engines that fail while they run, or that were closed: errors of vtx that name the graph and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.exported import DEVICES, THREADS
from tests.support.fixtures import Checkpoints
from vtx.runtime.api.load import load
from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.openvino.graph import run_row
from vtx.runtime.backends.ort import library
from vtx.runtime.errors import DeviceError, ModelClosedError
from vtx.runtime.vision.tokens import TokenStates

OUT_OF_MEMORY = """
import resource
import sys
import numpy as np
import vtx
from vtx.runtime.errors import DeviceError

backend = vtx.load(sys.argv[1], device=sys.argv[2], threads=1).backend
backend.head(np.zeros((4, 64), np.float32))
pages = int(open("/proc/self/statm").read().split()[0])
hidden = np.zeros((1 << 20, 64), np.float32)  # the logits are larger still
limit = pages * resource.getpagesize() + hidden.nbytes + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    backend.head(hidden)
except DeviceError as e:
    print(e)
"""


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(), tmp_path_factory.mktemp("failures") / "bundle", (3,)).folder


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest, folder: Path) -> Backend:
    return load(folder, device=request.param, threads=THREADS).backend


@pytest.mark.sampled
def test_a_run_that_fails_names_its_graph_and_the_fix(backend: Backend) -> None:
    narrow = np.zeros((2, 7), np.float32)
    with pytest.raises(DeviceError, match=r"failed in head\.\w+\.onnx: .*; check the bundle with vtx-doctor") as caught:
        backend.head(narrow)
    assert "\n" not in str(caught.value)
    with pytest.raises(DeviceError, match=r"failed in stage-01-02\.\w+\.onnx: "):
        backend.stage(0, 8).append(TokenStates(narrow), np.arange(2))


def test_a_cache_is_as_it_was_after_a_run_that_failed(backend: Backend) -> None:
    hidden = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    cache, fresh = backend.stage(0, 8), backend.stage(0, 8)
    cache.append(TokenStates(hidden[:3]), np.arange(3))
    with pytest.raises(DeviceError):
        cache.append(TokenStates(np.zeros((2, 7), np.float32)), np.arange(3, 5))
    assert cache.length == 3
    fresh.append(TokenStates(hidden[:3]), np.arange(3))
    np.testing.assert_array_equal(*(c.append(TokenStates(hidden[3:]), np.arange(3, 5)) for c in (cache, fresh)))


class QuietRequest:
    """As OpenVINO where memory runs out: `infer` returns and has written nothing, `wait` raises."""

    def infer(self, *_: object, **__: object) -> None:
        pass

    start_async = infer

    def wait(self) -> None:
        raise MemoryError("could not allocate")


def test_a_token_whose_run_writes_nothing_is_run_again_and_raises() -> None:
    with pytest.raises(MemoryError):
        run_row(QuietRequest(), np.ones((1, 4), np.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_without_enough_memory_is_an_error_with_the_fix(device: str, folder: Path) -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY, folder, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not enough memory to run head.")
    assert "shorter question" in done.stdout


def test_a_closed_backend_says_so_and_may_be_closed_again(backend: Backend) -> None:
    cache, hidden = backend.stage(0, 8), np.zeros((2, 64), np.float32)
    cache.append(TokenStates(hidden), np.arange(2))
    backend.close()
    backend.close()
    for call in (
        lambda: backend.embed(np.arange(3)).hidden,
        lambda: backend.head(hidden),
        lambda: backend.stage(0, 8),
        lambda: cache.append(TokenStates(hidden), np.arange(2, 4)),
        lambda: cache.append(TokenStates(hidden[:1]), np.arange(2, 3)),
    ):
        with pytest.raises(ModelClosedError, match="closed; load it again"):
            call()


@pytest.mark.parametrize(("python_310", "fix"), [(True, "use Python 3.11 or newer"), (False, 'pip install -U "onnx')])
@pytest.mark.parametrize(("release", "works"), [("1.22.1", False), ("1.26.0", False), ("1.27.0", True), ("2.0", True)])
def test_int8_caches_need_a_release_of_onnxruntime_that_has_them(
    release: str, works: bool, python_310: bool, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "OLD_PYTHON", python_310)
    ort = SimpleNamespace(__version__=release)
    library.check_release(ort, "float16")
    if works:
        library.check_release(ort, "int8")
        return
    with pytest.raises(DeviceError, match=rf"1\.27 or newer, this is {release}; {fix}"):
        library.check_release(ort, "int8")


def test_graphs_of_opset_24_need_a_release_of_onnxruntime_that_computes_them() -> None:
    old, new = SimpleNamespace(__version__="1.23.2"), SimpleNamespace(__version__="1.24.0")
    library.check_opset(new, "trt")
    for dialect in ("ort", "plain"):
        library.check_opset(old, dialect)
    with pytest.raises(DeviceError, match=r"dialect trt need onnxruntime 1\.24 or newer, this is 1\.23\.2; .* plain"):
        library.check_opset(old, "trt")
    assert library.lacks("1.23.2") == ["K and V in int8 need 1.27", "graphs of the dialect trt need 1.24"]
    assert library.lacks("1.27.0") == []
