"""What `make cpp` built, and how it is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.tiny import random_image
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.model import Model

BUILD = Path(os.environ.get("VTX_CPP_BUILD", Path(__file__).parents[2] / "build/cpp"))


def _obstacle() -> str:
    """Why libvtx cannot be tested here; empty where it can."""
    if not (BUILD / "vtx-cpp-run").exists():
        return "libvtx is not built: make cpp"
    cache = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
    if re.search(r"^(JPEG|PNG)_LIBRARY_RELEASE:\w+=\S*NOTFOUND", cache, re.MULTILINE):
        return "libvtx was built without libjpeg or libpng: install their headers, remove build/cpp, make cpp"
    return ""


needs_abi = pytest.mark.skipif("sanitize" in BUILD.name, reason="a sanitized library needs its runtime loaded first")
needs_cpp = pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())


def _openvino_obstacle() -> str:
    if not (BUILD / "libvtx_openvino.so").exists():
        return "libvtx was built without OpenVINO: install the extra, make cpp"
    if "sanitize" in BUILD.name:
        return "OpenVINO's TBB opens a library with RTLD_DEEPBIND, at which AddressSanitizer ends the process"
    return ""


needs_openvino = pytest.mark.skipif(bool(_openvino_obstacle()), reason=_openvino_obstacle())
ENGINES = ["cpu", pytest.param("openvino", marks=needs_openvino)]
DEVICES = pytest.mark.parametrize("device", ENGINES)


def onnxruntime() -> str:
    """The directory of the library inside the wheel."""
    return str(_wheel("onnxruntime") / "capi")


def openvino() -> str:
    """The directory of the library inside the wheel; of no use where that is not installed."""
    return str(_wheel("openvino") / "libs")


def _wheel(module: str) -> Path:
    from importlib.util import find_spec

    spec = find_spec(module)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("not-installed")


def run(tool: str, *arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """A tool with the wheels' engines; its exit code is the caller's to look at."""
    environment = {**os.environ, "VTX_ONNXRUNTIME": onnxruntime(), "VTX_OPENVINO": openvino()}
    command = [str(BUILD / f"vtx-cpp-{tool}"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, env=environment)


def output(tool: str, *arguments: str | Path, stdin: bytes | None = None) -> bytes:
    """What a tool prints; it must succeed."""
    done = run(tool, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def failure(tool: str, *arguments: str | Path) -> str:
    """What a tool says that fails."""
    done = run(tool, *arguments)
    assert done.returncode == 1
    return done.stderr.decode()


def ask(bundle: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """The answers of vtx-cpp-run, as JSON."""
    lines = output("run", "--bundle", bundle, "--threads", "1", "--json", *arguments).decode().splitlines()
    return [json.loads(line) for line in lines]


def write_pictures(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Path]:
    """A random picture of each (width, height), as PNG files."""
    paths = [folder / f"{width}x{height}.png" for width, height in sizes]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        random_image(number, size).save(path)
    return paths


def assert_prepared_equal(model: Model, pictures: Sequence[Path]) -> None:
    """libvtx gives each picture the tokens and the pixels of Python."""
    lines = output("probe", "layout", model.bundle.folder, *pictures).decode().splitlines()
    for path, line in zip(pictures, lines, strict=True):
        want = model.loaded.images.prepare(path)
        assert line == f"{want.tokens} {want.key.split()[0]}", path.name


def expected(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two runs."""
    facts: dict[str, Any] = json.loads(json.dumps(answer))
    for key in ("timings_ms", "question", "image", "bundle", "stopped"):
        facts.pop(key, None)
    for decision in facts.get("gate", []):
        decision.pop("ms")
    return facts


def assert_budgets_equal(model: Model, paths: Sequence[Path], budgets: Sequence[int]) -> None:
    """With each budget of image tokens libvtx sees the pixels of Python in every picture, and answers alike."""
    bundle = model.bundle.folder
    for tokens in budgets:
        lines = output("probe", "layout", bundle, f"tokens={tokens}", *paths).decode().splitlines()
        for path, line in zip(paths, lines, strict=True):
            image = model.loaded.images.prepare(path, image_tokens=tokens)
            assert line == f"{image.tokens} {image.key.split()[0]}", path.name
        [answer] = ask(bundle, paths[0], "red?", "--image-tokens", str(tokens), "--max-new-tokens", "3")
        with model.open(paths[0], image_tokens=tokens) as conversation:
            assert expected(answer) == expected(conversation.ask("red?", max_new_tokens=3).to_dict())


def assert_asked_equal(
    model: Model, pictures: Sequence[Path], questions: Sequence[str], *more: str, **options: str | int
) -> list[Answer]:
    """vtx-cpp-run answers as `model` does about these pictures, with these options; returns the answers.

    `more`: arguments for what `model` was loaded with.
    """
    images: list[str | Path] = [word for path in pictures[1:] for word in ("--image", path)]
    chosen = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    found, wanted = ask(model.bundle.folder, pictures[0], *questions, *images, *chosen, *more), list[Answer]()
    with model.open(pictures) as conversation:
        for question, answer in zip(questions, found, strict=True):
            wanted.append(conversation.ask(question, **options))  # type: ignore[arg-type]
            assert expected(answer) == expected(wanted[-1].to_dict()), (pictures[0].name, question, chosen)
    return wanted


def assert_answers_equal(
    model: Model, pictures: list[Path], questions: Sequence[str], ks: tuple[Literal["none"] | int, ...]
) -> None:
    """vtx-cpp-run answers as Python does about the second picture, the third, and both, each at its K of `ks`."""
    for k, shown in zip(ks, (pictures[1:2], pictures[2:3], pictures[1:3]), strict=True):
        assert_asked_equal(model, shown, questions, k=k, max_new_tokens=6)
