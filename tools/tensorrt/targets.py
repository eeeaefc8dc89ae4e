"""The machines that engines can be built for: their GPU, their TensorRT, and the libraries to build."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from vtx.runtime.bundle.fingerprint import FLAVOURS
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.host.gpu import Gpu, find_gpu
from vtx.runtime.host.profiles import load_profile
from vtx.runtime.installing import install
from vtx.tools.tensorrt.releases import OLDEST, RTX, TENSORRT, Release, parse_release

THIS = "this"
_NONE = Gpu("none", (0, 0), 0, (0, 0))


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of machine. `release` is the one of its system, or the oldest that vtx supports."""

    name: str
    machine: str
    capability: tuple[int, int]
    release: Release

    @property
    def portable(self) -> bool:
        """True if engines for it can be built on a machine without its GPU."""
        return self.release.flavour == RTX

    @property
    def is_jetson(self) -> bool:
        return self.capability in _JETSONS


def _jetson(name: str, machine: str, device: str, jetpack: str) -> Target:
    """A Jetson with the newest release of a JetPack of the profile `device`."""
    profile = load_profile(device)
    *_, release = (pack.tensorrt for pack in profile.jetpack if pack.version.partition(".")[0] == jetpack)
    major, minor = map(int, (profile.compute_capability or "").split("."))
    return Target(name, f"{machine} with JetPack {jetpack}", (major, minor), parse_release(TENSORRT, release))


_RTX = Release(RTX, OLDEST[RTX])
_SERVER = Release(TENSORRT, (11, 0))
# Compute capabilities of TensorRT-RTX 1.7 (`ComputeCapability`), precisions by its support matrix; of the others by
# NVIDIA's list of GPUs.
TARGETS = {
    target.name: target
    for target in (
        Target("sm80", "A100", (8, 0), _RTX),
        Target("sm86", "GeForce RTX 30", (8, 6), _RTX),
        Target("sm89", "GeForce RTX 40", (8, 9), _RTX),
        Target("sm120", "GeForce RTX 50", (12, 0), _RTX),
        Target("sm121", "DGX Spark", (12, 1), _RTX),
        Target("sm90", "H100, H200", (9, 0), _SERVER),
        Target("sm100", "B200", (10, 0), _SERVER),
        _jetson("jetson-orin", "Jetson Orin", "agx-orin-64", "6"),
        _jetson("jetson-orin-jp7", "Jetson Orin", "agx-orin-64", "7"),
        _jetson("jetson-thor", "Jetson Thor", "agx-thor", "7"),
    )
}
_JETSON_INSTALL = "sudo apt-get install tensorrt python3-libnvinfer (both are part of JetPack)"
_JETSONS = frozenset(target.capability for target in TARGETS.values() if target.name.startswith("jetson"))


def find_target(name: str, gpu: Gpu | None = None) -> Target:
    """The target of that name; `this` is this machine, with `gpu` or the first one detected."""
    if name == THIS:
        return _this(gpu or find_gpu())
    if name in TARGETS:
        return TARGETS[name]
    same = [t for t in TARGETS.values() if name == f"sm{t.capability[0]}{t.capability[1]}"]
    if same:
        raise RequestError(
            f"TensorRT-RTX does not support {name}; use TensorRT itself: --target "
            + " or ".join(f"{target.name} ({target.machine}, {target.release.name})" for target in same)
        )
    targets = ", ".join(f"{target.name} ({target.machine})" for target in TARGETS.values())
    raise RequestError(f"target {name!r} is unknown; the targets are: {THIS}, {targets}")


def load_tensorrt(target: Target, gpu: Gpu | None = None) -> tuple[ModuleType, Release]:
    """The Python module that builds for a target here, and its release. Raises DeviceError."""
    flavour = target.release.flavour
    if not target.portable and (gpu or find_gpu() or _NONE).capability != target.capability:
        raise DeviceError(
            f"{FLAVOURS[flavour].title} builds engines on the machine that runs them: copy the bundle to the "
            f"{target.machine} and run vtx-build --target this there (--check checks the graphs here)"
        )
    try:
        module = importlib.import_module(flavour)
        return module, parse_release(flavour, module.__version__)
    except (ImportError, OSError, AttributeError) as e:  # a wheel can be installed without its libraries
        reason = "" if isinstance(e, ModuleNotFoundError) else f" ({type(e).__name__}: {e})"
        raise DeviceError(
            f"engines for {target.name} are built with {FLAVOURS[flavour].title}, which is not installed{reason}; "
            f"{_installation(target)}"
        ) from e


def check_libraries(target: Target, *, building: bool) -> None:
    """Raise DeviceError unless the libraries to read graphs, and with `building` to build engines, are installed."""
    packages = ("onnx", "polygraphy") if building else ("onnx",)
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DeviceError(f"vtx-build needs {' and '.join(missing)}, not installed here; {_pip_install(target)}")


def _installation(target: Target) -> str:
    return _JETSON_INSTALL if target.is_jetson else _pip_install(target)


def _pip_install(target: Target) -> str:
    extra = "jetson" if target.is_jetson else "rtx" if target.portable else "tensorrt"
    return install(extra)


def _this(gpu: Gpu | None) -> Target:
    if gpu is None:
        raise DeviceError("no NVIDIA GPU was detected here; name a --target: " + ", ".join(TARGETS))
    portable = [t for t in TARGETS.values() if t.portable and t.capability == gpu.capability]
    if portable and importlib.util.find_spec(RTX) is not None:
        return Target(gpu.sm, gpu.name, gpu.capability, portable[0].release)
    if importlib.util.find_spec(TENSORRT) is None:
        target = portable[0] if portable else Target(gpu.sm, gpu.name, gpu.capability, _SERVER)
        raise DeviceError(f"{gpu.name} ({gpu.sm}) has no TensorRT to build with; {_installation(target)}")
    import tensorrt

    return Target(gpu.sm, gpu.name, gpu.capability, parse_release(TENSORRT, tensorrt.__version__))
