"""Engines' libraries that are missing, too old or of another release: libvtx says which, and where it looked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cpp import BUILD, needs_cpp, needs_openvino, onnxruntime
from tests.support.exported import Models
from vtx.runtime.backends.ort.library import SILENCE

pytestmark = [
    needs_cpp,
    pytest.mark.dialects("ort", "plain"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make old libraries with"),
]

OLD_ONNXRUNTIME = """
struct base { const void *(*api)(unsigned); const char *(*version)(void); };
static const void *none(unsigned version) { return version > 15 ? 0 : "an API"; }
static const char *version(void) { return "1.15.1"; }
const struct base *OrtGetApiBase(void) { static const struct base it = {none, version}; return &it; }
"""
ENGINES = ("VTX_ONNXRUNTIME", "VTX_OPENVINO", "VTX_PLUGINS", "VTX_TENSORRT", "VTX_CUDA", "VTX_LLGUIDANCE")
OTHER_OPENVINO = "int get_openvino_version(void) { return 0; }\n"


@pytest.fixture(scope="module")
def bundle(models: Models) -> Path:
    return models().bundle.folder


def made(folder: Path, name: str, source: str) -> Path:
    """A shared library of this C source."""
    (folder / "library.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, folder / "library.c"], check=True)
    return folder


def refusal(bundle: Path, *arguments: str | Path, **variables: str) -> str:
    """The one line with which vtx-cpp-run ends; of the variables that name engines only `variables` are there."""
    environment = {name: value for name, value in os.environ.items() if name not in ENGINES}
    command = [str(BUILD / "vtx-cpp-run"), "--bundle", str(bundle), "--text-only", "Who?", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **variables})
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line


def test_a_missing_onnxruntime_is_named_with_where_it_was_looked_for(bundle: Path, tmp_path: Path) -> None:
    option = refusal(bundle, "--device", "cpu", "--library", tmp_path / "libonnxruntime.so.1")
    variable = refusal(bundle, "--device", "cpu", VTX_ONNXRUNTIME=str(tmp_path / "there"))
    for line, place in ((option, tmp_path / "libonnxruntime.so.1"), (variable, tmp_path / "there")):
        assert line.startswith("Error: onnxruntime was not found (")
        assert str(place) in line
        assert "name its library with the option library or in VTX_ONNXRUNTIME" in line


def test_a_library_that_is_no_engine_is_said_to_lack_it(bundle: Path, tmp_path: Path) -> None:
    folder = made(tmp_path, "libonnxruntime.so.1", "int nothing;")
    assert f"{folder}/libonnxruntime.so.1 has no OrtGetApiBase" in refusal(
        bundle, "--device", "cpu", "--library", folder
    )


def test_an_onnxruntime_that_is_too_old_is_named_with_its_release(bundle: Path, tmp_path: Path) -> None:
    folder = made(tmp_path, "libonnxruntime.so.1", OLD_ONNXRUNTIME)
    line = refusal(bundle, "--device", "cpu", VTX_ONNXRUNTIME=str(folder))
    assert f"onnxruntime 1.15.1 in {folder}/libonnxruntime.so.1 is too old, 1.22 or newer is needed" in line


@needs_openvino
def test_openvino_that_is_missing_or_of_another_release_is_named(bundle: Path, tmp_path: Path) -> None:
    line = refusal(bundle, "--device", "openvino", "--library", tmp_path / "libopenvino.so")
    assert line.startswith("Error: OpenVINO was not found (")
    assert str(tmp_path / "libopenvino.so") in line
    folder = made(tmp_path, "libopenvino.so.2020", OTHER_OPENVINO)
    line = refusal(bundle, "--device", "openvino", VTX_OPENVINO=str(folder))
    assert f"was built for another release of OpenVINO than the one in {folder}/libopenvino.so.2020" in line
    assert "VTX_OPENVINO" in line


def test_a_build_without_the_bridge_to_openvino_says_so(bundle: Path, tmp_path: Path) -> None:
    tool = shutil.copy(BUILD / "vtx-cpp-run", tmp_path)
    shutil.copy(BUILD / "libvtx.so.0", tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("VTX_OPENVINO", None)
    command = [tool, "--bundle", str(bundle), "--text-only", "Who?", "--device", "openvino"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "libvtx_openvino.so cannot be loaded" in done.stderr
    assert "use device cpu" in done.stderr


def test_onnxruntime_leaves_nothing_in_the_user_s_home(bundle: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (SILENCE, "XDG_CACHE_HOME")}
    environment |= {"HOME": str(tmp_path), "VTX_ONNXRUNTIME": onnxruntime()}
    command = [str(BUILD / "vtx-cpp-run"), "--bundle", str(bundle), "--text-only", "Who?", "--device", "cpu"]
    subprocess.run(command, env=environment, check=True)
    assert [*tmp_path.rglob("*")] == []
