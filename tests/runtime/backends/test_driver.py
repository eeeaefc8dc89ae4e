"""The driver's calls by ctypes, against a library of them that was compiled from C++."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from vtx.runtime.backends import driver
from vtx.runtime.backends.cuda import Buffer, Cuda
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.gpu import find_gpus

STANDIN = Path(__file__).parents[2] / "support/standin/cuda.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The stand-in for libcuda that libvtx's tests link, alone."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", STANDIN, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def test_memory_copies_and_a_recording_go_through_the_driver(library: ctypes.CDLL) -> None:
    cuda = Cuda(driver.Driver(library))
    _copy_and_record(cuda)
    gc.collect()
    with cuda:
        free, total = cuda.memory()
    assert free == total


def _copy_and_record(cuda: Cuda) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    with cuda:
        source, to = Buffer(cuda, rows.nbytes, "a"), Buffer(cuda, rows.nbytes, "b")
        assert source.address % 256 == 0
        cuda.copy_in(source.address, rows.copy())
        cuda.zero(to)
        cuda.copy_rows(to.address + 8, 24, source.address, 24, 16, 4)
        out = np.empty_like(rows)
        cuda.copy_out(out, to.address)
        cuda.wait()
        want = np.zeros_like(rows)
        want[:, 2:] = rows[:, :4]
        np.testing.assert_array_equal(out, want)
        told, answer = cuda.pinned((1,), np.int64), cuda.pinned((1,), np.int64)

        def work() -> None:
            cuda.copy_in(source.address, told)
            cuda.copy_out(answer, source.address)

        graph = cuda.record(work)
        assert graph is not None
        for number in (5, 7):
            told[0] = number
            graph.launch()
            cuda.wait()
            assert answer[0] == number
        free, total = cuda.memory()
        assert total - free == 2 * rows.nbytes


def test_a_thread_gets_its_context_back(library: ctypes.CDLL) -> None:
    calls = driver.Driver(library)
    cuda = Cuda(calls)
    calls.cuCtxSetCurrent(2)  # of another GPU
    with cuda, cuda:
        assert calls.cuCtxGetCurrent() == (0, 1)
    assert calls.cuCtxGetCurrent() == (0, 2)
    with cuda:
        buffer = Buffer(cuda, 8, "a")
        cuda.wait()
    calls.cuCtxSetCurrent(0)  # of none
    del buffer  # by the collector, in any thread
    assert calls.cuCtxGetCurrent() == (0, 0)
    calls.cuCtxSetCurrent(1)


def test_errors_have_the_drivers_names(library: ctypes.CDLL) -> None:
    cuda = Cuda(driver.Driver(library))
    with cuda, pytest.raises(DeviceError, match=r"a lot needs 1 TB of device memory, 4\.29 GB of 4\.29 GB is free"):
        cuda.malloc(10**12, "a lot")
    with pytest.raises(DeviceError, match=r"the GPU fails at cuMemAlloc_v2 \(CUDA_ERROR_OUT_OF_MEMORY\): run it again"):
        cuda.call("cuMemAlloc_v2", 10**12)


def test_gpus_are_found_through_the_same_library(library: ctypes.CDLL) -> None:
    first, second = find_gpus(library)
    assert (first, first.name, first.capability, first.cuda) == (second, "Stand-in", (8, 9), (12, 2))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "NVIDIA's driver is not installed, or a container does not pass it through"),
        ("int cuInit(unsigned flags) { return flags; }", "NVIDIA's driver is too old .*; install release 535 or newer"),
    ],
    ids=["missing", "old"],
)
def test_a_driver_that_does_not_serve_is_one_error(
    source: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libcuda.so.1"
    if source is not None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        (tmp_path / "old.c").write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "old.c", "-o", path], check=True)
    monkeypatch.setattr(driver, "open_driver", lambda: ctypes.CDLL(str(path)))
    with pytest.raises(DeviceError, match=message):
        driver.load_driver()
