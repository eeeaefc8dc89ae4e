"""The examples, and a project of somebody else that finds an installed libvtx by CMake and by pkg-config."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cpp import BUILD, needs_cpp, onnxruntime
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not (BUILD / "examples").exists(), reason="this build of libvtx has no examples: make cpp"),
]

ROOT = Path(__file__).parents[3]
QUESTIONS = "red?", "How many circle shapes are there?"
ENVIRONMENT = {**os.environ, "VTX_ONNXRUNTIME": onnxruntime()}


@pytest.fixture(scope="module")
def model(models: Callable[..., Model]) -> Model:
    return models()


def done(*command: str | Path, **variables: str) -> str:
    """What a command that must succeed prints."""
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**ENVIRONMENT, **variables})
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def ask_answers(program: Path, model: Model, picture: Path, **variables: str) -> None:
    """The example `ask` must print what Python answers."""
    random_image(2).save(picture)
    lines = done(program, model.bundle.folder, picture, *QUESTIONS, **variables)
    with model.open(picture) as conversation:
        answers = [conversation.ask(question) for question in QUESTIONS]
    assert lines == "".join(f"{answer.text}  ({len(answer.token_ids)} tokens)\n" for answer in answers)


def test_the_example_ask_prints_the_answers_of_python(model: Model, tmp_path: Path) -> None:
    ask_answers(BUILD / "examples/vtx-example-ask", model, tmp_path / "a.png")


def test_the_example_camera_answers_about_frames_and_goes_on_after_a_damaged_one(model: Model, tmp_path: Path) -> None:
    for number in (1, 3):
        random_image(number).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    command = [BUILD / "examples/vtx-example-camera", model.bundle.folder, tmp_path, "red?"]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    with model.open(tmp_path / "3.png") as conversation:  # the last frame is always answered
        text = conversation.ask("red?", max_new_tokens=32).text
    assert run.stdout.endswith(f"{tmp_path}/3.png: {text}\n")
    assert "frames were replaced by newer ones" in run.stderr


@pytest.mark.slow
def test_a_project_finds_an_installed_libvtx(model: Model, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done("cmake", "--install", BUILD, "--prefix", prefix)
    done("cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}")
    done("cmake", "--build", tmp_path / "b", "--target", "vtx-example-ask")
    ask_answers(tmp_path / "b/vtx-example-ask", model, tmp_path / "a.png")
    [libraries] = {path.parent for path in prefix.rglob("libvtx.so")}
    listed = done(prefix / "bin/vtx-cpp-run", "--help", LD_LIBRARY_PATH=str(libraries))
    assert "--bundle" in listed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_names_what_a_compiler_needs(model: Model, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done("cmake", "--install", BUILD, "--prefix", prefix)
    [libraries] = {path.parent for path in prefix.rglob("libvtx.so")}
    variables = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    flags = done("pkg-config", "--define-prefix", "--cflags", "--libs", "vtx", **variables).split()
    program = tmp_path / "ask"
    done(os.environ.get("CXX", "c++"), "-std=c++17", ROOT / "examples/cpp/ask.cpp", "-o", program, *flags)
    ask_answers(program, model, tmp_path / "a.png", LD_LIBRARY_PATH=str(libraries))
