"""libvtx on TensorRT, over the stand-ins of `test_tensorrt`: engines, GPUs and libraries that fail or do not fit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bundles import copy
from tests.support.cpp import BUILD, run
from tests.support.cpp_tensorrt import (
    BUILT,
    Machine,
    ask,
    everything_given_back,
    needs_releases,
    only_for,
)
from tests.support.engines import rewrite
from tests.support.gpu_standin import build_all
from tests.support.tiny import random_image
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import write_sealed

pytestmark = needs_releases


@pytest.mark.parametrize("release", BUILT[-1:])
def test_a_gpu_that_is_lost_in_an_answer_is_one_error_with_its_fix(
    release: str, engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine(release)
    options = ("--k", "3", "--reduce", "none", "--max-new-tokens", "10", "--ignore-eos")
    assert ask(engines, tmp_path, *options).returncode == 0
    waits = report()["cuStreamSynchronize"]
    monkeypatch.setenv("VTX_STANDIN_WAITS", str(waits - 4))
    done = ask(engines, tmp_path, *options)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg" in line


@pytest.mark.parametrize("release", BUILT)
def test_an_engine_that_does_not_start_is_one_error_and_nothing_is_freed_before_the_work_behind_it(
    release: str, engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to its inputs, and before them other engines' runs, are queued then: the process ends with them."""
    report, options = machine(release), ("--k", "3", "--reduce", "none", "--max-new-tokens", "2", "--ignore-eos")
    assert ask(engines, tmp_path, *options).returncode == 0
    runs = report()["enqueueV3"]
    for number in (1, 2, runs // 2, runs - 1, runs):
        monkeypatch.setenv("VTX_STANDIN_REFUSED_RUN", str(number))
        done = ask(engines, tmp_path, *options)
        assert (done.returncode, done.stdout) == (1, b""), done.stderr
        [line] = done.stderr.decode().splitlines()
        assert "it does not start the graph" in line
        assert everything_given_back(report())


GONE = "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg"
FAULTS = {
    "answer": r"the KV cache of layers \d to \d needs .* of device memory, 0 B of .* is free; end other programs",
    "prompt": r"the KV cache of layers \d to \d needs .* of device memory, 0 B of .* is free; end other programs",
    "gone": rf"{GONE}\n.*{GONE}\n.*{GONE}",
}


@pytest.mark.parametrize("release", BUILT)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_gpu_that_fails_in_an_answer_is_a_typed_error_and_the_conversation_stays_usable(
    fault: str, release: str, engines: Path, machine: Machine
) -> None:
    """The program compares its answers with those before; a device that is gone gives the same error each time."""
    report = machine(release)
    done = run("faults", engines, "tensorrt", fault)
    assert (done.returncode, done.stderr) == (0, b""), done
    assert re.search(FAULTS[fault], done.stdout.decode())
    assert everything_given_back(report())


@pytest.mark.skipif(len(BUILT) < 2, reason="built with the headers of one release of TensorRT")
def test_the_tensorrt_that_a_program_has_loaded_is_not_taken_for_the_other_one(
    engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same symbols; a stand-in of another release bears the name of TensorRT-RTX here."""
    report = machine(BUILT[-1])
    other = tmp_path / "libtensorrt_rtx.so.1"
    other.symlink_to(BUILD / f"libvtx-standin-{BUILT[0]}.so")
    monkeypatch.setenv("LD_PRELOAD", os.fspath(other))
    monkeypatch.setenv("VTX_PLUGINS", os.fspath(BUILD))
    done = ask(engines, tmp_path)
    assert done.returncode == 0, done.stderr
    assert report()["enqueueV3"] > 0


def _another_version(bundle: Path, target: str) -> None:
    rewrite(bundle, target, version="11.0.7")


def _another_card(bundle: Path, target: str) -> None:
    rewrite(bundle, target, capability=(10, 0))


def _no_engines(bundle: Path, target: str) -> None:
    shutil.rmtree(bundle / "engines")


def _cut_short(bundle: Path, target: str) -> None:
    path = bundle / f"engines/{target}/head.trt.engine"
    path.write_bytes(path.read_bytes()[:-5])


def _refused(bundle: Path, target: str) -> None:
    path = bundle / f"engines/{target}/head.trt.engine"
    path.write_bytes(b"not an engine")
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], bytes=13, sha256=hashlib.sha256(b"not an engine").hexdigest())
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _of_another_graph(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    engines = {**found.engines, "head.trt.onnx": found.engines["embed.trt.onnx"]}
    rewrite(bundle, target, engines=engines)


def _of_other_weights(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], sources={"vtx.json": "0" * 64})
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _outside(bundle: Path, target: str) -> None:
    found = fingerprint.read_engines(Bundle.open(bundle), target)
    record = replace(found.engines["head.trt.onnx"], file="../../../x")
    rewrite(bundle, target, engines={**found.engines, "head.trt.onnx": record})


def _damaged(bundle: Path, target: str) -> None:
    write_sealed(bundle / f"engines/{target}/engines.json", b'{"format": 1}')


PROBLEMS: dict[Callable[[Path, str], None], str] = {
    _another_version: "were built for TensorRT 11.0.7 and compute capability 9.0; here is TensorRT 11.1.0 and",
    _another_card: "compute capability 10.0; here is compute capability 9.0 (Stand-in); build them with: vtx-build",
    _no_engines: "holds no engines; build them with: vtx-build",
    _cut_short: "it is cut short; build them with",
    _refused: "TensorRT does not take head.trt.engine: Serialization assertion stdArchiveReader failed; build them",
    _of_another_graph: "is not the graph that vtx.json says it is",
    _of_other_weights: "was built from another vtx.json than this bundle's",
    _outside: "leaves the bundle",
    _damaged: "engines.json is damaged",
}


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize("change", PROBLEMS, ids=lambda change: change.__name__.strip("_"))
def test_engines_that_do_not_fit_are_refused_in_one_line(
    change: Callable[[Path, str], None], engines: Path, machine: Machine, tmp_path: Path
) -> None:
    machine("11.1")
    bundle = only_for(engines, tmp_path / "bundle")
    change(bundle, "sm90")
    done = ask(bundle, tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert PROBLEMS[change] in line


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VTX_STANDIN_CAPABILITY", "", "no NVIDIA GPU answers here"),
        ("VTX_STANDIN_MEMORY", "100000", "100 kB of 100 kB of the device is free; export with a smaller --precision"),
        (
            "VTX_PLUGINS",
            "/nowhere",
            "TensorRT 11.1.0 is here (libnvinfer.so.11), but /nowhere has no plug-in of libvtx",
        ),
        ("VTX_TENSORRT", "/nowhere/libnvinfer.so.11", "TensorRT was not found (/nowhere/libnvinfer.so.11"),
        ("VTX_CUDA", "/nowhere/libcuda.so.1", "NVIDIA's driver was not found (/nowhere/libcuda.so.1"),
    ],
)
def test_a_machine_that_cannot_run_engines_says_why(
    variable: str,
    value: str,
    message: str,
    engines: Path,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine("11.1")
    monkeypatch.setenv(variable, value)
    bundle = only_for(engines, tmp_path / "bundle")
    done = ask(bundle, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.decode()


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
@pytest.mark.parametrize(
    ("library", "instead", "message"),
    [
        ("libcuda.so.1", None, "no NVIDIA GPU answers here"),
        ("libnvinfer.so.11", None, "TensorRT was not found (libnvinfer.so.11"),
        ("libnvinfer.so.11", "libnvinfer.so.10", "TensorRT was not found (libnvinfer.so.11"),
    ],
)
def test_a_library_that_is_missing_or_of_another_major_release_is_named(
    library: str, instead: str | None, message: str, engines: Path, machine: Machine, tmp_path: Path
) -> None:
    machine("11.1")
    found = Path(os.environ["LD_LIBRARY_PATH"]) / library
    if instead:
        (found.parent / instead).symlink_to(BUILD / "libvtx-standin-11.1.so")
    found.unlink()
    done = ask(only_for(engines, tmp_path / "bundle"), tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    [line] = done.stderr.decode().splitlines()
    assert message in line


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
def test_memory_that_is_gone_after_the_forecast_is_named_with_its_purpose(
    engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each amount of memory, from where the forecast fits to where an answer does, gives an error of one line."""
    report, bundle, said = machine("11.1"), only_for(engines, tmp_path / "bundle"), []
    for memory in range(180_000, 3_000_000, 150_000):
        monkeypatch.setenv("VTX_STANDIN_MEMORY", str(memory))
        done = ask(bundle, tmp_path, "--max-new-tokens", "2")
        assert everything_given_back(report())
        if done.returncode == 0:
            break
        [line] = done.stderr.decode().splitlines()
        said.append(line)
    assert done.returncode == 0
    assert any(re.search(r"the tensor \w+ needs .* of device memory, .* is free; end other", line) for line in said)
    assert all("device memory" in line or "of the device is free" in line for line in said)


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
def test_the_page_cache_in_memory_that_gpu_and_host_share_is_free(
    engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Jetson just after a bundle was copied: CUDA reports 1,000 bytes as free."""
    report = machine("11.1")
    monkeypatch.setenv("VTX_STANDIN_PAGE_CACHE", "1")
    done = ask(only_for(engines, tmp_path / "bundle"), tmp_path, "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert everything_given_back(report())


@pytest.mark.skipif("11.1" not in BUILT, reason="built without the headers of TensorRT 11.1")
def test_auto_goes_on_where_the_gpu_has_no_room(
    engines: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = machine("11.1")
    monkeypatch.setenv("VTX_STANDIN_MEMORY", "20000")
    bundle = only_for(engines, tmp_path / "bundle")
    assert ask(bundle, tmp_path).returncode == 1
    asked = (tmp_path / "image.png", "red?", "--max-new-tokens", "2")
    random_image(1).save(asked[0])
    done = run("run", "--bundle", bundle, "--device", "auto", "--json", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] in ("cpu", "openvino")
    assert everything_given_back(report())


def test_engines_of_tensorrt_rtx_are_refused(engines: Path, machine: Machine, tmp_path: Path) -> None:
    machine(BUILT[-1])
    bundle = copy(engines, tmp_path / "bundle")
    shutil.rmtree(bundle / "engines")
    build_all(bundle)
    assert (
        "libvtx does not run engines of TensorRT-RTX; run them with vtx in Python"
        in ask(bundle, tmp_path).stderr.decode()
    )
