"""What this machine has: processors, memory, onnxruntime and its providers, the libraries of the extras."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vtx.runtime.host.device import Device, recognise, swap
from vtx.runtime.units import size

EXPORT_PACKAGES = ("torch", "transformers", "onnx-ir", "safetensors", "huggingface-hub")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report: what was looked at, what was found, and whether it is as it should be."""

    name: str
    value: str
    ok: bool = True


def look(device: Device | None = None) -> list[Finding]:
    """Everything that decides what vtx can do here. `device` is what `recognise` found, asked when left out."""
    return [
        Finding("vtx", version("vtx-edge") or "not installed as a package"),
        Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("processor", f"{_processor()}, {os.cpu_count()} cores"),
        Finding("memory", _memory()),
        *_device(device or recognise()),
        *_onnxruntime(),
        _extra("openvino", ("openvino",), optional=True),
        _extra("export", EXPORT_PACKAGES),
        _extra("rtx", ("tensorrt-rtx", "cuda-python"), optional=True),
        _extra("tensorrt", ("tensorrt", "cuda-python"), optional=True),
    ]


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes of memory that a new program could take, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(table["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in table else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "processor unknown"


def _memory() -> str:
    free = available_memory()
    swapped = swap()
    swapping = "" if swapped is None else f", {size(swapped)} of swap" if swapped else ", no swap"
    return ("unknown" if free is None else f"{free / 1e9:.1f} GB available") + swapping


def _device(device: Device) -> list[Finding]:
    """The Jetson, or each NVIDIA card; nothing where there is neither."""
    profile = f"profile {device.profile}" if device.profile else "no profile of vtx fits"
    found = []
    if device.jetson:
        j = device.jetson
        parts = [j.model, f"module {j.module or 'unknown'}", "CPU and GPU share the memory", profile]
        found.append(Finding("Jetson", ", ".join(parts)))
        jetpack = f"JetPack {j.jetpack or 'unknown'} (Linux for Tegra {j.l4t or 'unknown'})"
        found.append(Finding("JetPack", f"{jetpack}, TensorRT {j.tensorrt or 'not installed'}"))
    for gpu in () if device.jetson else device.gpus:
        memory = f"{size(gpu.free or 0)} of {size(gpu.memory)} free" if gpu.memory else "memory unknown"
        found.append(Finding("GPU", f"{gpu.name} ({gpu.target}), {memory}, driver {gpu.driver}, {profile}"))
    return found


def _onnxruntime() -> list[Finding]:
    """The one onnxruntime that should be here; two overwrite each other's files."""
    cpu, gpu = version("onnxruntime"), version("onnxruntime-gpu")
    if cpu and gpu:
        cure = 'pip uninstall -y onnxruntime onnxruntime-gpu, then pip install "vtx-edge[cpu]" or "vtx-edge[gpu]"'
        return [Finding("onnxruntime", f"both onnxruntime {cpu} and onnxruntime-gpu {gpu}: {cure}", ok=False)]
    if not (cpu or gpu):
        return [
            Finding(
                "onnxruntime", 'missing: pip install "vtx-edge[cpu]" (or "vtx-edge[gpu]")', ok=bool(version("openvino"))
            )
        ]
    try:
        import onnxruntime
    except Exception as e:
        return [Finding("onnxruntime", f"{cpu or gpu} does not load ({e}); install it again", ok=False)]
    providers = ", ".join(p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers())
    name = "onnxruntime-gpu" if gpu else "onnxruntime"
    return [Finding(name, f"{cpu or gpu}, providers: {providers}; vtx answers on: CPU")]


def _extra(name: str, packages: tuple[str, ...], *, optional: bool = False) -> Finding:
    found = {package: version(package) for package in packages}
    missing = [package for package, number in found.items() if number is None]
    if missing:
        note = f'not installed ({", ".join(missing)}): pip install "vtx-edge[{name}]"'
        return Finding(f"[{name}]", note, ok=optional or name == "export")
    return Finding(f"[{name}]", ", ".join(f"{package} {number}" for package, number in found.items()))
