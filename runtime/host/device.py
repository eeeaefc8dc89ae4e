"""Which device this is: a Jetson by its device tree, a desktop card by `nvidia-smi`, and the profile that fits."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vtx.profiles import load_profile, profile_names

MAX_FILE = 16 << 20  # of a system file; the list of Debian packages is the largest
QUERY = "name,compute_cap,memory.total,memory.free,driver_version"
PATIENCE = 10  # seconds for nvidia-smi, which waits for a driver that hangs
# The major release of Linux for Tegra that each JetPack stands on (NVIDIA's JetPack archive).
JETPACK_OF_L4T = {35: "5", 36: "6", 38: "7", 39: "7"}


@dataclass(frozen=True, slots=True)
class Jetson:
    """A Jetson: its model line, the number of its module, and the software that it runs; None: not found."""

    model: str
    module: str | None
    l4t: str | None
    jetpack: str | None
    tensorrt: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA card as its driver describes it. Memory is in bytes, None where CPU and GPU share it."""

    name: str
    compute_capability: str
    memory: int | None
    free: int | None
    driver: str

    @property
    def target(self) -> str:
        """The word for it in `vtx-build --target`: sm89 for compute capability 8.9."""
        return "sm" + self.compute_capability.replace(".", "")


@dataclass(frozen=True, slots=True)
class Device:
    """What this machine is. `profile` names one of `vtx.profiles`, None where none fits."""

    jetson: Jetson | None
    gpus: tuple[Gpu, ...]
    profile: str | None


def recognise(root: Path = Path("/")) -> Device:
    """Look at the device tree and the system files under `root`, and ask `nvidia-smi` where there is one."""
    jetson = _jetson(root)
    gpus = tuple(_gpus())
    return Device(jetson, gpus, _profile(jetson, gpus))


def swap(root: Path = Path("/")) -> int | None:
    """Bytes of swap that this machine has; None where the system does not say."""
    found = re.search(r"^SwapTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _jetson(root: Path) -> Jetson | None:
    tree = root / "proc/device-tree"
    compatible = _read(tree / "compatible").split("\0")
    if not any(re.fullmatch(r"nvidia,tegra\d+", word) for word in compatible):
        return None
    modules = (re.search(r"p\d{4}-\d{4}$", word) for word in compatible)
    known = {module for name in profile_names() for module in load_profile(name).modules}
    found = [m[0] for m in modules if m]
    module = next((number for number in found if number in known), found[-1] if found else None)
    l4t = _l4t(_read(root / "etc/nv_tegra_release"))
    packages = _read(root / "var/lib/dpkg/status")
    return Jetson(
        model=_read(tree / "model").strip("\0 \n") or "unknown Jetson",
        module=module,
        l4t=l4t,
        jetpack=_package(packages, "nvidia-jetpack") or (JETPACK_OF_L4T.get(int(l4t.split(".")[0])) if l4t else None),
        tensorrt=_package(packages, r"libnvinfer\d+"),
    )


def _l4t(text: str) -> str | None:
    """36.4.3 from "# R36 (release), REVISION: 4.3, ..."."""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    return f"{found[1]}.{found[2]}" if found else None


def _package(status: str, name: str) -> str | None:
    """The version of an installed Debian package, without the packager's suffix."""
    for block in status.split("\n\n"):
        if re.search(rf"^Package: {name}$", block, re.MULTILINE) and "Status: install ok installed" in block:
            found = re.search(r"^Version: ([\d.]+)", block, re.MULTILINE)
            return found[1] if found else None
    return None


def _gpus() -> Iterator[Gpu]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(QUERY.split(",")) and re.fullmatch(r"\d+\.\d+", fields[1]):
            name, capability, total, free, driver = fields
            yield Gpu(name, capability, _mebibytes(total), _mebibytes(free), driver)


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None


def _profile(jetson: Jetson | None, gpus: tuple[Gpu, ...]) -> str | None:
    for name in profile_names():
        profile = load_profile(name)
        if jetson and jetson.module in profile.modules:
            return name
        if not jetson and any(gpu.name == profile.name for gpu in gpus):
            return name
    return None


def _read(path: Path) -> str:
    """The text of a system file; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return ""
