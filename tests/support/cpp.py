"""What `make cpp` built, and how it is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(os.environ.get("VTX_CPP_BUILD", Path(__file__).parents[2] / "build/cpp"))


def _obstacle() -> str:
    """Why libvtx cannot be tested here; empty where it can."""
    if not (BUILD / "vtx-cpp-run").exists():
        return "libvtx is not built: make cpp"
    cache = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
    if re.search(r"^(JPEG|PNG)_LIBRARY_RELEASE:\w+=\S*NOTFOUND", cache, re.MULTILINE):
        return "libvtx was built without libjpeg or libpng: install their headers, remove build/cpp, make cpp"
    return ""


needs_cpp = pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())


def onnxruntime() -> str:
    """The directory of the library inside the wheel."""
    from importlib.util import find_spec

    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "capi")


def run(tool: str, *arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """A tool with the wheel's onnxruntime; its exit code is the caller's to look at."""
    environment = {**os.environ, "VTX_ONNXRUNTIME": onnxruntime()}
    command = [str(BUILD / f"vtx-cpp-{tool}"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, env=environment)


def output(tool: str, *arguments: str | Path, stdin: bytes | None = None) -> bytes:
    """What a tool prints; it must succeed."""
    done = run(tool, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def ask(bundle: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """The answers of vtx-cpp-run, as JSON."""
    lines = output("run", "--bundle", bundle, "--threads", "1", "--json", *arguments).decode().splitlines()
    return [json.loads(line) for line in lines]
