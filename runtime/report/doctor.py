"""The reports of `vtx-doctor`: this machine and its devices, and a bundle compared with its export."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends.backend import DeviceState
from vtx.runtime.backends.engines import ENGINES
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError, RequestError, VtxError
from vtx.runtime.host.confined import confinement
from vtx.runtime.host.device import Device, recognise, swap
from vtx.runtime.host.machine import available_memory, version
from vtx.runtime.installing import install
from vtx.runtime.precision import ARITHMETIC
from vtx.runtime.report.golden import (
    QUESTION,
    Check,
    check_golden,
    choice_limit,
    exact_limit,
    golden_image,
    logits_limit,
)
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index
from vtx.runtime.report.traces.record import write_traces
from vtx.runtime.units import Progress, counter, size
from vtx.runtime.vision.preprocess import without_notes

EXACT = "openvino", "f32"  # the engine and the arithmetic that round nothing that quantised matrices read
EXPECTED_TOKENS = 8  # of the answer whose time is told
EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "safetensors", "huggingface-hub")


@dataclass(frozen=True, slots=True)
class MachineFact:
    """One line about this machine; `ok` is False if it keeps vtx from running."""

    name: str
    value: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine, every device that vtx knows, and the problems that keep vtx from running."""

    device: Device
    facts: tuple[MachineFact, ...]
    devices: tuple[DeviceState, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One line each; empty if at least one device's library is installed and nothing is broken."""
        none = f"no engine is installed: {install('cpu')} (docs/how-to/tensorrt.md has those for GPUs)"
        broken = tuple(f"{fact.name}: {fact.value}" for fact in self.facts if not fact.ok)
        return broken if any(state.installed for state in self.devices) else (*broken, none)

    @property
    def cpu_device(self) -> str | None:
        """The device that answers on the CPU: of several the last, as the fastest at the sizes of known models."""
        usable = [state.device for state in self.devices if state.usable and not ENGINES[state.device].gpu]
        return usable[-1] if usable else None

    def to_dict(self) -> dict[str, Any]:
        machine = {fact.name: fact.value for fact in self.facts}
        devices = [asdict(state) for state in self.devices]
        problems = list(self.problems)
        return {"machine": machine, "profile": self.device.profile, "devices": devices, "problems": problems}


@dataclass(frozen=True, slots=True)
class Expectation:
    """The time of a question about a new picture, asked once on this device after the golden prompt.

    `first_token_ms` runs from the question to its first token, picture included; `token_ms` is that of each further
    one, None if the answer had no more.
    """

    k: int | None
    prompt_tokens: int
    image_tokens: int
    first_token_ms: float
    token_ms: float | None

    @classmethod
    def of(cls, model: Model) -> Expectation | None:
        """None for a model that does not answer in text."""
        if model.manifest.action is not None:
            return None
        with without_notes(), model.open(golden_image()) as image:
            stats = image.ask(QUESTION, max_new_tokens=EXPECTED_TOKENS, temperature=0.0).stats
        first = stats.timings_ms["first_token"]
        return cls(stats.k, stats.prompt_tokens, stats.vision_tokens, first, stats.timings_ms.get("decode_per_token"))

    def in_words(self) -> str:
        further = "" if self.token_ms is None else f", {self.token_ms:.1f} ms for each further one"
        return (
            f"expected here: {self.first_token_ms:.0f} ms to the first token of a question about a new picture, of "
            f"{self.prompt_tokens} tokens ({self.image_tokens} of the picture) at K = {self.k or 'none'}{further}"
        )


@dataclass(frozen=True, slots=True)
class BundleReport:
    """One bundle computed again: the device, the reason for it, and each comparison with the record of its export."""

    bundle: str
    files: int
    device: str
    compute: str
    why: str
    checks: tuple[Check, ...]
    expected: Expectation | None = None
    unasked: str | None = None  # the reason why its default question cannot be asked

    @classmethod
    def of(cls, model: Model, checks: Iterable[Check]) -> BundleReport:
        bundle = str(model.bundle.folder)
        files = len(model.manifest.files)
        return cls(bundle, files, model.backend.device, model.backend.compute, model.loaded.why, tuple(checks))

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.passed)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checks": [{**asdict(check), "passed": check.passed} for check in self.checks]}


def look_at_machine(device: Device | None = None) -> MachineReport:
    """All facts that matter to vtx here; `device` is the result of `recognise` unless it is passed."""
    device = device or recognise()
    facts = [*_host_facts(), *_device_facts(device), *_package_facts()]
    return MachineReport(device, tuple(facts), tuple(engine.load().state(device) for engine in ENGINES.values()))


def _host_facts() -> Iterator[MachineFact]:
    """Versions, processor, memory, and how untrusted files are parsed."""
    free = available_memory()
    swapped = swap()
    swapping = "" if swapped is None else f", {size(swapped)} of swap" if swapped else ", no swap"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    processor = next(named, platform.processor() or "unknown processor")
    yield MachineFact("vtx", version("vtx-edge") or "not installed as a package")
    yield MachineFact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield MachineFact("processor", f"{processor}, {os.cpu_count()} cores")
    yield MachineFact("memory", ("unknown" if free is None else f"{size(free)} available") + swapping)
    try:
        limits = ", ".join(confinement()) or "time limits only: untrusted files are parsed less safely"
        yield MachineFact("confinement", limits)
    except VtxError as error:
        yield MachineFact("confinement", str(error), ok=False)


def _device_facts(device: Device) -> Iterator[MachineFact]:
    """The Jetson, or each GPU."""
    profile = f"profile {device.profile}" if device.profile else "no matching profile"
    if device.jetson:
        j = device.jetson
        parts = [j.model, f"module {j.module or 'unknown'}", "CPU and GPU share the memory", profile]
        jetpack = f"JetPack {j.jetpack or 'unknown'} (Linux for Tegra {j.l4t or 'unknown'})"
        yield MachineFact("Jetson", ", ".join(parts))
        yield MachineFact("JetPack", f"{jetpack}, TensorRT {j.tensorrt or 'not installed'}")
    else:
        for number, g in enumerate(device.gpus):
            value = f"{g.name} ({g.sm}), {size(g.memory)}, its driver supports CUDA {g.cuda[0]}.{g.cuda[1]}, {profile}"
            yield MachineFact("GPU" if len(device.gpus) == 1 else f"GPU {number}", value)


def _package_facts() -> Iterator[MachineFact]:
    """Two packages of onnxruntime at once, and what an export needs."""
    cpu = version("onnxruntime")
    gpu = version("onnxruntime-gpu")
    if cpu and gpu:  # they overwrite each other's files
        fix = f'pip uninstall -y onnxruntime onnxruntime-gpu, then {install("cpu")} or "vtx-edge[gpu]"'
        conflict = f"both onnxruntime {cpu} and onnxruntime-gpu {gpu} are installed: {fix}"
        yield MachineFact("onnxruntime", conflict, ok=False)
    packages = {package: version(package) for package in EXPORT_PACKAGES}
    missing = ", ".join(package for package, number in packages.items() if number is None)
    export = ", ".join(f"{package} {number}" for package, number in packages.items())
    if missing:
        export = f"not possible without {missing}: {install('export')}"
    yield MachineFact("export", export)


def altered_files(bundle: Bundle, progress: Progress) -> list[str]:
    """The problem of each file that is not as exported; `progress` gets the bytes that are hashed."""
    hashed = counter(progress, "checksums", sum(record.bytes for record in bundle.manifest.files.values()))
    return [problem for _, problem in bundle.verify(hashed) if problem]


def check_traces(
    folder: str, given: Path, device: str, compute: str | None, require_signature: Path | None, progress: Progress
) -> BundleReport:
    """Write a bundle's traces again on a device and judge the traces in `given` by them."""
    model = load(folder, device=device, compute=compute, require_signature=require_signature)
    theirs = read_index(given).compute
    if theirs not in ARITHMETIC:
        raise RequestError(f"{given}: compute is {theirs!r:.40}, not one of {', '.join(ARITHMETIC)}")
    limit = max(logits_limit(model.manifest, compute) for compute in (model.backend.compute, theirs))
    with TemporaryDirectory(prefix="vtx-traces-") as scratch:
        write_traces(model, Path(scratch), progress)
        return BundleReport.of(model, compare_traces(Path(scratch), given, limit, choice_limit(model.manifest)))


def check_bundle(folder: str, device: str, compute: str | None, require_signature: Path | None = None) -> BundleReport:
    """A bundle's golden vectors on a device, and, if they are met, the time of a question there."""
    model = load(folder, device=device, compute=compute, require_signature=require_signature)
    report = BundleReport.of(model, check_golden(model))
    if any(check.tied for check in report.checks):
        report = _without_ties(report, require_signature)
    if report.failed:
        return report
    try:
        return replace(report, expected=Expectation.of(model))
    except RequestError as e:  # such as a picture beyond the context
        return replace(report, unasked=str(e))


def _without_ties(report: BundleReport, require_signature: Path | None) -> BundleReport:
    """The report with an engine's logits in place of those whose difference may be a router's other choice.

    It computes them in float32 and rounds nothing else, so a narrow limit tells a tie from a fault. Where it cannot
    load the bundle, the report stays as it is.
    """
    device, compute = EXACT
    if (report.device, report.compute) == EXACT:
        return report
    try:
        with load(report.bundle, device=device, compute=compute, require_signature=require_signature) as exact:
            limit = exact_limit(exact.manifest)
            checks = {check.name: check for check in check_golden(exact)}
    except (DeviceError, RequestError):
        return report
    return replace(report, checks=tuple(_judged(check, checks[check.name], limit) for check in report.checks))


def _judged(check: Check, exact: Check, limit: float) -> Check:
    if not check.tied:
        return check
    device, compute = EXACT
    apart = f"{check.difference:.1e} where experts are {check.margin:.0e} apart"
    return Check(f"{check.name}, {device} in {compute}", exact.difference, limit, apart)
