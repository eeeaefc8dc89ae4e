"""Each extra, installed as its page says into an environment of its own, runs the commands of that page.

This downloads packages, so it runs only when it is asked for: `make test-extras`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.distribution import ROOT, build_wheel, run
from tests.support.json_files import read_json
from vtx.exporter.bundling.prepare import demo_checkpoint

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif("VTX_TEST_EXTRAS" not in os.environ, reason="downloads packages; `make test-extras` runs it"),
]
PICTURE, QUESTION = ROOT / "examples/scene-1.jpg", "How many shapes are there?"
Command = Callable[..., str]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(demo_checkpoint(), tmp_path_factory.mktemp("extras") / "demo", (16,), "fp16").folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def install(wheel: Path, bundle: Path, tmp_path: Path) -> Callable[[str], Command]:
    """`install(extra)(command, ...)`: the output of a command of a new environment with that extra and nothing else."""

    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def commands(extra: str) -> Command:
        programs = tmp_path / "env" / "bin"
        venv.create(tmp_path / "env")
        pip_install = ("-m", "pip", "--python", programs / "python", "install", f"{wheel}[{extra}]")
        run(sys.executable, *pip_install, cwd=tmp_path, env=env)
        own = env | {"HOME": str(tmp_path), "PATH": os.pathsep.join((str(programs), os.defpath))}
        return lambda name, *words, code=0: run(programs / name, *words, cwd=tmp_path, env=own, code=code)

    shutil.copytree(bundle, tmp_path / "demo")
    return commands


def answers_on_a_cpu(command: Command) -> None:
    answer = json.loads(command("vtx-run", "--bundle", "demo", PICTURE, QUESTION, "--k", "16", "--json"))
    assert answer["text"] == "5"
    command("vtx-inspect", "demo")
    assert "OK: the bundle computes what its weights say" in command("vtx-doctor", "demo")


def test_cpu_answers_and_certifies(install: Callable[[str], Command]) -> None:
    command = install("cpu")
    assert "onnxruntime" in command("vtx-doctor")
    answers_on_a_cpu(command)
    command("vtx-bench", "--bundle", "demo", "--repeats", "1", "--new-tokens", "2")
    refusal = command("vtx-export", "--k", "16", code=1)
    assert refusal.startswith("vtx-export: ")
    assert 'pip install "vtx-edge[export]"' in refusal
    assert 'pip install "vtx-edge[serve]"' in command("vtx-serve", "--bundle", "demo", code=1)


def test_cpu_ort_answers_without_openvino(install: Callable[[str], Command]) -> None:
    command = install("cpu-ort")
    assert 'not installed: pip install "vtx-edge[openvino]"' in command("vtx-doctor")
    answers_on_a_cpu(command)


def test_openvino_answers_and_certifies(install: Callable[[str], Command]) -> None:
    command = install("openvino")
    assert "openvino" in command("vtx-doctor")
    answers_on_a_cpu(command)


def test_gpu_brings_all_but_the_driver(install: Callable[[str], Command]) -> None:
    command = install("gpu")
    state = command("vtx-doctor")
    if "on NVIDIA" not in state:
        assert "NVIDIA's driver is missing" in state
        refusal = command("vtx-run", "--bundle", "demo", "--device", "cuda", PICTURE, QUESTION, code=1)
        assert "install NVIDIA's driver" in refusal
    answers_on_a_cpu(command)


def checks_graphs(command: Command) -> None:
    """The graphs are checked for every machine, and answering on a GPU that is not there is refused in one line."""
    checked = command("vtx-build", "--bundle", "demo", "--target", "jetson-orin,jetson-orin-jp7,sm90,sm89", "--check")
    assert checked.count("TensorRT reads every graph") == 4
    refusal = command("vtx-run", "--bundle", "demo", "--device", "tensorrt", PICTURE, QUESTION, code=1)
    assert refusal.startswith("vtx-run: ")
    assert len(refusal.splitlines()) == 1
    assert "vtx-build --bundle" in refusal


def test_rtx_builds_engines_without_a_gpu(install: Callable[[str], Command]) -> None:
    command = install("rtx")
    assert "TensorRT-RTX 1." in command("vtx-doctor")
    checks_graphs(command)
    table = command("vtx-build", "--bundle", "demo", "--target", "sm89,sm120")
    assert table.count("head.trt.engine") == 2
    refusal = command("vtx-run", "--bundle", "demo", "--device", "tensorrt", PICTURE, QUESTION, code=1)
    assert "no NVIDIA GPU" in refusal


def test_tensorrt_checks_graphs_and_names_the_machine_that_builds(install: Callable[[str], Command]) -> None:
    command = install("tensorrt")
    assert "TensorRT 1" in command("vtx-doctor")
    checks_graphs(command)
    refusal = command("vtx-build", "--bundle", "demo", "--target", "sm90", code=1)
    assert "builds engines on the machine that runs them: copy the bundle to the H100, H200" in refusal


def test_jetson_checks_graphs_and_asks_for_jetpack(install: Callable[[str], Command]) -> None:
    command = install("jetson")
    checks_graphs(command)
    assert "TensorRT" in command("vtx-doctor", code=1)


def test_tune_trains_and_its_checkpoint_exports(install: Callable[[str], Command]) -> None:
    command = install("tune")
    command("pip", "install", "--no-deps", ROOT / "plugins/tune")
    told = command("vtx-tune", "--k", "5", "--items", "4", "--held-out", "2", "--batch", "2", "--out", "tuned")
    assert "earliest K within 1 point" in told
    command("vtx-export", "--model", "tuned/merged", "--k", "5", "--out", "bundle")


@pytest.mark.parametrize(("python", "glibc"), [("3.10", 35), ("3.12", 39)], ids=["JetPack 6", "JetPack 7"])
def test_a_jetson_finds_a_wheel_of_every_package_and_needs_none_of_cuda(
    python: str, glibc: int, wheel: Path, tmp_path: Path
) -> None:
    """Resolved from the metadata of wheels, for the Python and the glibc of its Ubuntu: 22.04 and 24.04."""
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, glibc + 1))]
    options = [word for platform in platforms for word in ("--platform", platform)]
    options += ["--python-version", python, "--only-binary", ":all:", "--target", str(tmp_path / "packages")]
    report = tmp_path / "report.json"
    install = ("-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report)
    run(sys.executable, *install, *options, f"{wheel}[jetson]", cwd=tmp_path)
    packages = {item["metadata"]["name"] for item in read_json(report)["install"]}
    assert {"vtx-edge", "onnx", "polygraphy", "tokenizers"} <= packages
    assert not any(name.startswith(("cuda", "nvidia", "onnxruntime")) for name in packages)
