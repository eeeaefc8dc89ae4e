"""The models that fit into a device's memory, by precision, and up to which K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vtx.runtime.backends.engines import ENGINES, TENSORRT_COSTS, EngineCost
from vtx.runtime.host.device import Device
from vtx.runtime.host.machine import available_memory
from vtx.runtime.host.profiles import Profile, load_profile
from vtx.runtime.precision import PRECISIONS
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import precisions_by_name

SHOWN = ("fp16", *(row.name for row in PRECISIONS.values() if row.bits))
WORK = (64, 256)  # text tokens in addition to one image, and tokens of the answer
EXPORTED = ("llava-1.5-7b", "llava-1.5-13b")  # the known models that vtx-export can export
GPU_SHARE = 0.9  # of a GPU's memory, without a profile to give the system's part


@dataclass(frozen=True, slots=True)
class Fit:
    """One model in one precision: `deepest` is the largest K that fits, None if all or none fits."""

    model: str
    precision: str
    fits: bool
    deepest: int | None

    def __str__(self) -> str:
        if not self.fits:
            return "no"
        return f"K up to {self.deepest}" if self.deepest else "yes"


@dataclass(frozen=True, slots=True)
class Fits:
    """Every model that exports, in every precision, against `usable` bytes of one device."""

    device: str
    usable: int
    models: dict[str, tuple[Fit, ...]]

    def to_dict(self) -> dict[str, Any]:
        models = {name: [asdict(fit) for fit in fits] for name, fits in self.models.items()}
        return {"place": self.device, "usable_bytes": self.usable, "models": models}


def fits_here(device: Device, cpu_device: str | None, gpu: EngineCost = TENSORRT_COSTS["tensorrt"]) -> list[Fits]:
    """The models that fit into the memory of this machine's GPU with that engine, and of its CPU if it can answer.

    A Jetson's memory is shared, so it counts once, with the engines of its GPU.
    """
    profile = load_profile(device.profile) if device.profile else None
    fits = []
    if device.gpus or device.jetson:
        memory = int(GPU_SHARE * device.gpus[0].memory) if device.gpus else 0
        name = device.gpus[0].name if device.gpus else "the Jetson"
        usable = profile.usable_bytes if profile else memory
        fits.append(Fits(profile.name if profile else name, usable, what_fits(profile, usable, engine=gpu)))
    free = available_memory()
    if not device.jetson and cpu_device and free is not None:
        cpu = load_profile("cpu")
        cpu_name = f"this CPU with --device {cpu_device}"
        spec = ENGINES[cpu_device]
        fits.append(Fits(cpu_name, free, what_fits(cpu, free, engine=spec.costs[spec.dialect])))
    return [entry for entry in fits if entry.usable]


def what_fits(
    profile: Profile | None,
    usable: int | None = None,
    precisions: Sequence[str] = SHOWN,
    models: Sequence[str] = EXPORTED,
    *,
    engine: EngineCost | None = None,
) -> dict[str, tuple[Fit, ...]]:
    """Some models in some precisions, against `usable` bytes [default: the profile's]; `engine` as for `make_plan`."""
    free = usable if usable is not None or profile is None else profile.usable_bytes
    assert free is not None
    fits_of = dict[str, tuple[Fit, ...]]()
    for name in models:
        model = KNOWN[name]
        fits = list[Fit]()
        work = Workload(WORK[0], model.vision.image_tokens if model.vision else 0, WORK[1])
        ks = (None, *range(model.decoder.layers, 1, -1))  # from no withdrawal to the earliest
        for precision in precisions:
            plan = make_plan(
                model, work, PlannedMethods(ks), precisions_by_name(model, [precision]), profile, engine=engine
            )
            fitting = [depth.k for depth in plan.depths if depth.precisions[precision].peak_bytes <= free]
            fits.append(Fit(name, precision, bool(fitting), fitting[0] if fitting else None))
        fits_of[name] = tuple(fits)
    return fits_of
