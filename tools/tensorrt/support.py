"""The engines of vtx that answer a model on a device, by the refusals of exporter and runtime; without a bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtx.runtime.backends.engines import ENGINES, TENSORRT_COSTS, EngineCost
from vtx.runtime.backends.ort.cuda import WINDOWS
from vtx.runtime.backends.tensorrt.backend import NO_FRAMES
from vtx.runtime.bundle.spec.stored import Precisions
from vtx.runtime.errors import RequestError
from vtx.runtime.host.device import Device
from vtx.runtime.host.profiles import Profile
from vtx.tools.estimate.sizes import ModelSize
from vtx.tools.model.mixture import ON_CPU
from vtx.tools.tensorrt.releases import RTX, TENSORRT, Release, parse_release
from vtx.tools.tensorrt.targets import TARGETS


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """One engine on a device (of --device); `obstacles`: by precision the reason why it does not answer, or None.

    `cost`: its use of memory.
    """

    device: str
    software: str
    dialect: str | None
    obstacles: Mapping[str, str | None]
    cost: EngineCost

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "software": self.software,
            "dialect": self.dialect,
            "precisions": self.answered,
            "obstacles": self.refusals,
        }

    @property
    def answered(self) -> list[str]:
        return [name for name, obstacle in self.obstacles.items() if obstacle is None]

    @property
    def refusals(self) -> dict[str, str]:
        """The reason for each precision in which it does not."""
        return {name: obstacle for name, obstacle in self.obstacles.items() if obstacle is not None}


def engines_on(profile: Profile, model: ModelSize, parts: Mapping[str, Precisions]) -> tuple[EngineSupport, ...]:
    """Every engine of the processor of `profile`, with the precisions of `model` that it answers."""
    engines = [*_on_tensorrt(profile, model, parts), *_on_others(profile, model, parts)]
    if not any(engine.answered for engine in engines):
        by_reason: dict[str, dict[str, None]] = {}
        for engine in engines:
            for reason in engine.refusals.values():
                by_reason.setdefault(reason, {})[engine.software] = None
        reasons = "; ".join(f"{', '.join(software)}: {reason}" for reason, software in by_reason.items())
        raise RequestError(
            f"no engine of vtx answers {model.name} on the GPU of {profile.name}: {reasons}; leave out --profile for "
            "the memory alone, or answer on a CPU (--profile cpu)"
        )
    return tuple(engines)


def _on_tensorrt(profile: Profile, model: ModelSize, parts: Mapping[str, Precisions]) -> Iterator[EngineSupport]:
    """The releases of TensorRT for the processor."""
    for jetpack in profile.jetpack if profile.kind == "jetson" else ():  # TensorRT of each JetPack
        software = f"TensorRT {jetpack.tensorrt} of JetPack {jetpack.version}"
        try:
            release = parse_release(TENSORRT, jetpack.tensorrt)
        except RequestError as e:
            yield EngineSupport("tensorrt", software, None, dict.fromkeys(parts, str(e)), TENSORRT_COSTS[TENSORRT])
        else:
            yield _tensorrt(software, release, model, parts)
    capability = tuple(map(int, (profile.compute_capability or "0.0").split(".")))
    for target in TARGETS.values() if profile.kind == "desktop" else ():
        if target.portable and target.capability == capability:
            yield _tensorrt(target.release.name, target.release, model, parts)


def _on_others(profile: Profile, model: ModelSize, parts: Mapping[str, Precisions]) -> Iterator[EngineSupport]:
    """The other engines of the processor."""
    for device, spec in ENGINES.items():
        if device != "tensorrt" and spec.gpu == (profile.kind != "cpu"):
            refusal = spec.load().refusal
            reason = WINDOWS if model.decoder.sliding is not None else _experts(model)
            refusals = {
                name: (reason if spec.gpu else None) or refusal(p.kv_dtype, jetson=profile.kind == "jetson")
                for name, p in parts.items()
            }
            yield EngineSupport(device, spec.title, spec.dialect, refusals, spec.costs[spec.dialect])


def gpu_cost(device: Device) -> EngineCost:
    """The use of memory on this machine of TensorRT-RTX, if it is for its first GPU, else of TensorRT."""
    portable = {target.capability for target in TARGETS.values() if target.portable}
    return TENSORRT_COSTS[RTX if device.gpus and device.gpus[0].capability in portable else TENSORRT]


def choose_engine(engines: Sequence[EngineSupport], device: str | None, jetpack: str | None) -> EngineSupport:
    """The one that a plan counts: of `device` and of that release of JetPack, by default the newest that answers.

    Raises RequestError.
    """
    ending = f" of JetPack {jetpack}"
    findings = [
        engine
        for engine in engines
        if engine.answered and device in (None, engine.device) and (jetpack is None or engine.software.endswith(ending))
    ]
    if not findings:
        options = " ".join(
            [*(["--device " + device] if device else []), *(["--jetpack " + jetpack] if jetpack else [])]
        )
        able = "; ".join(f"--device {engine.device}: {engine.software}" for engine in engines if engine.answered)
        raise RequestError(f"no engine for {options} answers this model there; those that do: {able}")
    same = [engine for engine in findings if engine.device == findings[0].device]
    return same[-1]  # releases are in ascending order


def _experts(model: ModelSize) -> str | None:
    """The reason why a mixture of experts has no graphs for GPUs, None for any other model."""
    return None if model.decoder.mixture is None else ON_CPU


def _tensorrt(software: str, release: Release, model: ModelSize, parts: Iterable[str]) -> EngineSupport:
    reason = NO_FRAMES if model.vision is not None and model.vision.towers > 1 else _experts(model)
    refusals = dict.fromkeys(parts, reason)
    return EngineSupport("tensorrt", software, release.dialect, refusals, TENSORRT_COSTS[release.flavour])
