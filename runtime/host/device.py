"""Recognition of the device: a Jetson by its device tree, GPUs by their driver, and the profile that fits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.host.gpu import Gpu, find_gpus
from vtx.runtime.host.profiles import load_profile, profile_names

MAX_FILE = 16 << 20  # of a system file; the list of Debian packages is the largest
# JetPack by the major release of Linux for Tegra that it contains (NVIDIA's JetPack archive).
JETPACK_OF_L4T = {35: "5", 36: "6", 38: "7", 39: "7"}


@dataclass(frozen=True, slots=True)
class Jetson:
    """A Jetson: its model line, the number of its module, and the software that it runs; None: unknown."""

    model: str
    module: str | None
    l4t: str | None
    jetpack: str | None
    tensorrt: str | None


@dataclass(frozen=True, slots=True)
class Device:
    """A machine: `profile` names one of `vtx.profiles`, None if none fits."""

    jetson: Jetson | None
    gpus: tuple[Gpu, ...]
    profile: str | None


def recognise(root: Path = Path("/"), library: Any = None) -> Device:
    """The machine, by the system files under `root` and its GPUs' driver; `library` replaces it in tests."""
    jetson = _jetson(root)
    gpus = find_gpus(library)
    profiles = [load_profile(name) for name in profile_names()]
    names = [gpu.name for gpu in gpus]
    fits = (jetson.module in profile.modules if jetson else profile.name in names for profile in profiles)
    fitting = (name for name, fit in zip(profile_names(), fits, strict=True) if fit)
    return Device(jetson, gpus, next(fitting, None))


def swap(root: Path = Path("/")) -> int | None:
    """Bytes of swap that this machine has; None if the system does not report it."""
    total = re.search(r"^SwapTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(total[1]) << 10 if total else None


def _jetson(root: Path) -> Jetson | None:
    tree = root / "proc/device-tree"
    compatible = _read(tree / "compatible").split("\0")
    if not any(re.fullmatch(r"nvidia,tegra\d+", word) for word in compatible):
        return None
    matches = (re.search(r"p\d{4}-\d{4}$", word) for word in compatible)
    names = {module for name in profile_names() for module in load_profile(name).modules}
    modules = [match[0] for match in matches if match]
    module = next((number for number in modules if number in names), modules[-1] if modules else None)
    # e.g. "# R36 (release), REVISION: 4.3, ..." for 36.4.3
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _read(root / "etc/nv_tegra_release"))
    l4t = f"{release[1]}.{release[2]}" if release else None
    packages = _read(root / "var/lib/dpkg/status")
    return Jetson(
        model=_read(tree / "model").strip("\0 \n") or "unknown Jetson",
        module=module,
        l4t=l4t,
        jetpack=_package(packages, "nvidia-jetpack") or (JETPACK_OF_L4T.get(int(l4t.split(".")[0])) if l4t else None),
        tensorrt=_package(packages, r"libnvinfer\d+"),
    )


def _package(status: str, name: str) -> str | None:
    """The version of an installed Debian package, without the packager's suffix."""
    for block in status.split("\n\n"):
        if re.search(rf"^Package: {name}$", block, re.MULTILINE) and "Status: install ok installed" in block:
            version = re.search(r"^Version: ([\d.]+)", block, re.MULTILINE)
            return version[1] if version else None
    return None


def _read(path: Path) -> str:
    """The text of a system file; empty if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return ""
