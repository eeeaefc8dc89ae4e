"""What `vtx-doctor` reports: this machine and its devices, and whether a bundle computes what was exported."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vtx.runtime.api.load import load
from vtx.runtime.backends.engines import ENGINES, DeviceState
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError, VtxError
from vtx.runtime.host.confined import confinement
from vtx.runtime.host.device import Device, recognise, swap
from vtx.runtime.host.machine import available_memory, version
from vtx.runtime.precision import ARITHMETIC
from vtx.runtime.report.golden import Check, check_golden, choice_limit, logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index
from vtx.runtime.report.traces.record import Progress, write_traces
from vtx.runtime.units import size

EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "safetensors", "huggingface-hub")


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One line about this machine; `ok` is False where it keeps vtx from running."""

    name: str
    value: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine, every device that vtx knows, and what keeps vtx from running."""

    device: Device
    facts: tuple[MachineFact, ...]
    devices: tuple[DeviceState, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One line each; empty where at least one device's library is installed and nothing is broken."""
        broken = tuple(f"{fact.name}: {fact.value}" for fact in self.facts if not fact.ok)
        if any(state.installed for state in self.devices):
            return broken
        return (
            *broken,
            'no engine is installed: pip install "vtx-edge[cpu]" (docs/how-to/tensorrt.md has those for GPUs)',
        )

    @property
    def cpu_device(self) -> str | None:
        """The device that answers on the CPU: OpenVINO is the faster one at the sizes of known models."""
        usable = [state.device for state in self.devices if state.usable]
        return next((name for name in ("openvino", "cpu") if name in usable), None)

    def to_dict(self) -> dict[str, Any]:
        machine = {fact.name: fact.value for fact in self.facts}
        devices = [asdict(state) for state in self.devices]
        return {
            "machine": machine, "profile": self.device.profile, "devices": devices, "problems": list(self.problems)
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class BundleReport:
    """One bundle computed again: where, and each comparison with what its export recorded."""

    bundle: str
    files: int
    device: str
    compute: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.passed)

    def to_dict(self) -> dict[str, Any]:
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {
            "bundle": self.bundle, "files": self.files, "device": self.device, "compute": self.compute, "checks": checks
        }  # fmt: skip


# --- the machine ----------------------------------------------------------------------------------


def look_at_machine(device: Device | None = None) -> MachineReport:
    """Everything that decides what vtx can do here; `device` is what `recognise` gives unless it is passed."""
    device = device or recognise()
    facts = (
        MachineFact("vtx", version("vtx-edge") or "not installed as a package"),
        MachineFact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        MachineFact("processor", f"{_processor()}, {os.cpu_count()} cores"),
        MachineFact("memory", _memory()),
        _confinement(),
        *_hardware(device),
        *_two_onnxruntimes(),
        _export_extra(),
    )
    return MachineReport(device, facts, tuple(engine.load().state(device) for engine in ENGINES.values()))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def _memory() -> str:
    free, swapped = available_memory(), swap()
    swapping = "" if swapped is None else f", {size(swapped)} of swap" if swapped else ", no swap"
    return ("unknown" if free is None else f"{size(free)} available") + swapping


def _confinement() -> MachineFact:
    """What holds the child processes that parse files of strangers."""
    try:
        held = confinement()
    except VtxError as error:
        return MachineFact("confinement", str(error), ok=False)
    return MachineFact("confinement", ", ".join(held) or "time limits only: untrusted files are parsed less safely")


def _hardware(device: Device) -> list[MachineFact]:
    """The Jetson, or each NVIDIA GPU."""
    profile = f"profile {device.profile}" if device.profile else "no profile of vtx fits"
    if device.jetson:
        j = device.jetson
        parts = [j.model, f"module {j.module or 'unknown'}", "CPU and GPU share the memory", profile]
        jetpack = f"JetPack {j.jetpack or 'unknown'} (Linux for Tegra {j.l4t or 'unknown'})"
        return [
            MachineFact("Jetson", ", ".join(parts)),
            MachineFact("JetPack", f"{jetpack}, TensorRT {j.tensorrt or 'not installed'}"),
        ]
    names = ["GPU"] if len(device.gpus) == 1 else [f"GPU {number}" for number in range(len(device.gpus))]
    return [
        MachineFact(name, f"{g.name} ({g.sm}), {size(g.memory)}, its driver supports CUDA {_dotted(g.cuda)}, {profile}")
        for name, g in zip(names, device.gpus, strict=True)
    ]


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _two_onnxruntimes() -> list[MachineFact]:
    """A problem where both packages are there: they overwrite each other's files."""
    cpu, gpu = version("onnxruntime"), version("onnxruntime-gpu")
    if not (cpu and gpu):
        return []
    fix = 'pip uninstall -y onnxruntime onnxruntime-gpu, then pip install "vtx-edge[cpu]" or "vtx-edge[gpu]"'
    return [MachineFact("onnxruntime", f"both onnxruntime {cpu} and onnxruntime-gpu {gpu} are installed: {fix}", False)]


def _export_extra() -> MachineFact:
    packages = {package: version(package) for package in EXPORT_PACKAGES}
    missing = [package for package, number in packages.items() if number is None]
    if missing:
        return MachineFact("export", f'not possible without {", ".join(missing)}: pip install "vtx-edge[export]"')
    return MachineFact("export", ", ".join(f"{package} {number}" for package, number in packages.items()))


# --- a bundle -------------------------------------------------------------------------------------


def altered_files(bundle: Bundle, report: Callable[[str, int, int], None]) -> list[str]:
    """What is wrong with each file that is not as it was exported; `report` gets the bytes that are hashed."""
    total, done = sum(record.bytes for record in bundle.manifest.files.values()), 0

    def hashed(count: int) -> None:
        nonlocal done
        done += count
        report("checksums", done, total)

    return [problem for _, problem in bundle.verify(hashed) if problem]


def check_traces(
    folder: str, given: Path, device: str, compute: str | None, require_signature: Path | None, progress: Progress
) -> BundleReport:
    """Write a bundle's traces anew on a device and judge those in `given` by them."""
    model = load(folder, device=device, compute=compute, require_signature=require_signature)
    theirs = read_index(given).compute
    if theirs not in ARITHMETIC:
        raise RequestError(f"{given}: compute is {theirs!r:.40}, not one of {', '.join(ARITHMETIC)}")
    limit = max(logits_limit(model.manifest, compute) for compute in (model.backend.compute, theirs))
    with TemporaryDirectory(prefix="vtx-traces-") as own:
        write_traces(model, Path(own), progress)
        checks = tuple(compare_traces(Path(own), given, limit, choice_limit(model.manifest)))
    return BundleReport(
        str(model.bundle.folder), len(model.manifest.files), model.backend.device, model.backend.compute, checks
    )  # fmt: skip


def check_bundle(folder: str, device: str, compute: str | None, require_signature: Path | None = None) -> BundleReport:
    """Compute a bundle's golden vectors again on a device."""
    model = load(folder, device=device, compute=compute, require_signature=require_signature)
    return BundleReport(
        bundle=str(model.bundle.folder),
        files=len(model.manifest.files),
        device=model.backend.device,
        compute=model.backend.compute,
        checks=tuple(check_golden(model)),
    )
