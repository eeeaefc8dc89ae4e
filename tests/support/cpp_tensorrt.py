"""What `make cpp-tensorrt` built: stand-ins that are compiled with TensorRT's own headers and watch every call."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bundles import copy
from tests.support.cpp import BUILD, needs_cpp, run
from tests.support.gpu_standin import build_all
from tests.support.json_files import read_json
from tests.support.tiny import random_image
from vtx.tools.tensorrt.releases import TENSORRT, Release

RELEASES = {
    "10.3": ("jetson-orin", "8.7", "trt10"),
    "10.16": ("jetson-thor", "11.0", "trt"),
    "11.1": ("sm90", "9.0", "trt"),
}
BUILT = [release for release in RELEASES if (BUILD / f"libvtx-standin-{release}.so").exists()]
Machine = Callable[[str], Callable[[], dict[str, int]]]
DUAL = "mustdrop:gamma=0.05,alpha=1,tau=off,layers=1/2,key=0.1"
REDUCTIONS = (DUAL, "fastv:k=2", "cls:keep=0.5+dart:keep=8,k=2", "cdpruner:keep=5")

needs_releases = [
    needs_cpp,
    pytest.mark.skipif(not BUILT, reason="built without TensorRT's headers: make cpp-tensorrt TENSORRT=DIRECTORIES"),
]


def build(bundle: Path, release: str) -> None:
    """Engines of the stand-in of a release."""
    target, _, dialect = RELEASES[release]
    major, minor = map(int, release.split("."))
    build_all(bundle, target, Release(TENSORRT, (major, minor)), dialect, version_of(release))


def version_of(release: str) -> str:
    return f"{release}.0"


def machine_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(release)`: from then on tools find the stand-ins of that release; what it gives reads their report."""

    def become(release: str) -> Callable[[], dict[str, int]]:
        libraries, report = tmp_path / release, tmp_path / f"{release}.json"
        libraries.mkdir()
        library = f"libnvinfer.so.{release.partition('.')[0]}"
        for name in (library, "libcuda.so.1"):
            (libraries / name).symlink_to(BUILD / f"libvtx-standin-{release}.so")
        monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(libraries))
        monkeypatch.setenv("VTX_STANDIN_CAPABILITY", RELEASES[release][1])
        monkeypatch.setenv("VTX_STANDIN_REPORT", os.fspath(report))
        return lambda: dict[str, int](read_json(report))

    return become


def ask(bundle: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    random_image(1).save(folder / "a.png")
    return run("run", "--bundle", bundle, "--device", "tensorrt", "--json", folder / "a.png", "red?", *options)


def everything_given_back(report: dict[str, int]) -> bool:
    return not any(report[key] for key in ("device", "host", "queued", "graphs", "engines", "contexts"))


def only_for(bundle: Path, folder: Path, target: str = "sm90") -> Path:
    """A copy without the engines of other targets."""
    copied = copy(bundle, folder)
    for other in {other for other, _, _ in RELEASES.values()} - {target}:
        shutil.rmtree(copied / "engines" / other, ignore_errors=True)
    return copied
