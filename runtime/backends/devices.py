"""The choice of a device for a bundle, by its graphs, the installed packages and measured speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from vtx.runtime.backends.backend import Backend
from vtx.runtime.backends.engines import AUTO, COMPUTE, ENGINES, INSTRUCTIONS, split_device
from vtx.runtime.bundle.bundle import CARD, Bundle
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.gpu import find_gpu, find_gpus
from vtx.runtime.host.machine import cores, cpu_flags
from vtx.runtime.installing import install
from vtx.runtime.precision import PRECISIONS

if TYPE_CHECKING:
    from vtx.runtime.bundle.card import Card

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """`card`: the bundle's, if its engine is this one; `ignored`: why a bundle's card does not hold here.

    `number`: of the GPU, in the driver's order from 0.
    """

    device: str
    compute: str
    why: str
    card: Card | None = None
    ignored: str | None = None
    number: int = 0


NONE: Mapping[str, str] = MappingProxyType({})


def choose(
    bundle: Bundle, device: str = AUTO, compute: str | None = None, failed: Mapping[str, str] = NONE
) -> DeviceChoice:
    """The device that was asked for, or with "auto" the best of those that are possible. Raises DeviceError.

    `failed`: devices that a load has failed on, with the reasons; "auto" leaves them out.
    """
    device, number = split_device(device)
    if compute is not None and compute not in COMPUTE:
        raise DeviceError(f"no device computes in {compute!r}; there are: {', '.join(COMPUTE)}")
    if device != AUTO:
        obstacle = _obstacle(bundle, device, compute, number)
        if obstacle:
            raise DeviceError(obstacle)
        return _chosen(bundle.manifest, device, compute, "asked for", number)
    obstacles: dict[str, str] = {}
    merits = {name: merit for name, engine in ENGINES.items() if (merit := engine.merit(bundle))}
    for name in sorted(merits, key=lambda name: (merits[name][0], name), reverse=True):
        obstacle = failed.get(name) or _obstacle(bundle, name, compute)
        if not obstacle:
            why = "; ".join([merits[name][1], *obstacles.values()])
            return _chosen(bundle.manifest, name, compute, why)
        obstacles[name] = obstacle
    raise DeviceError(_most_telling(obstacles, compute))


def _most_telling(obstacles: Mapping[str, str], compute: str | None) -> str:
    """The obstacle to tell a user of those of all devices, the best device's first."""
    able = {name: obstacle for name, obstacle in obstacles.items() if compute in (None, *ENGINES[name].compute)}
    first, obstacle = next(iter((able or obstacles).items()))
    cpu = [able[name] for name in able if not ENGINES[name].gpu]
    if ENGINES[first].gpu and cpu and find_gpu() is None:  # no package makes a GPU
        return f"{cpu[0]} (this bundle's engines need an NVIDIA GPU, and there is none here)"
    return obstacle


def _chosen(manifest: Manifest, device: str, compute: str | None, why: str, number: int = 0) -> DeviceChoice:
    """A device with the arithmetic that was asked for, or its default; says which measured one this processor lacks."""
    lacking = [kind for kind in manifest.arithmetic if kind in ENGINES[device].compute and missing_instructions(kind)]
    if compute is None and lacking:
        why = f"{why}; not in {' or '.join(lacking)}, for which this processor has no instructions"
    return DeviceChoice(device, compute or default_compute(manifest, device), why, number=number)


def missing_instructions(compute: str) -> str | None:
    """The reason why no engine on this processor computes so, and the fix; None if it has the instructions."""
    instructions = INSTRUCTIONS.get(compute, ())
    if not instructions or not cpu_flags().isdisjoint(instructions):
        return None
    return (
        f"{compute} arithmetic needs one of the instruction sets {', '.join(instructions)}, and this processor reports "
        "none; use --compute f32, or leave it out"
    )


def default_compute(manifest: Manifest, device: str) -> str:
    """The fastest arithmetic of a device that kept the bundle's answers at export, or the device's first."""
    kinds = tuple(ENGINES[device].compute)
    accepted = accepted_arithmetic(manifest)
    able = (kind for kind in reversed(kinds) if kind in accepted and not missing_instructions(kind))
    return next(able, kinds[0])


def accepted_arithmetic(manifest: Manifest) -> tuple[str, ...]:
    """Narrower arithmetic that may be used by default: what kept the bundle's answers at export.

    int4 weights do not multiply integers by default, since they would take three times the memory.
    """
    wide = PRECISIONS[manifest.precision].bits == 4
    return tuple(kind for kind in manifest.arithmetic if kind != "int8" or not wide)


def choose_by_card(
    bundle: Bundle, device: str = AUTO, compute: str | None = None, failed: Mapping[str, str] = NONE
) -> DeviceChoice:
    """As `choose`, but where nothing else was asked for the engine of the bundle's card. Raises DeviceError."""
    card = None
    if bundle.files.exists(CARD):
        from vtx.runtime.bundle.card import read_card

        card = read_card(bundle)
    if card is None:
        return choose(bundle, device, compute, failed)
    fitted = card.chosen.configuration
    name, number = split_device(device)
    if name not in (AUTO, fitted.device) or compute not in (None, fitted.compute):
        return replace(choose(bundle, device, compute, failed), ignored="another device or arithmetic was asked for")
    obstacle: str | None = "it is unknown"
    if fitted.device in ENGINES:
        obstacle = failed.get(fitted.device) or _obstacle(bundle, fitted.device, fitted.compute, number)
    if obstacle:
        ignored = f"{fitted.compute} on {fitted.device} is not possible here: {obstacle}"
        return replace(choose(bundle, device, compute, failed), ignored=ignored)
    return DeviceChoice(fitted.device, fitted.compute, "by card.json", card, number=number)


def _obstacle(bundle: Bundle, name: str, compute: str | None, number: int = 0) -> str | None:
    """The reason why this device cannot answer, and the fix; None if it can."""
    engine = ENGINES[name]
    if compute is not None and compute not in engine.compute:
        able = [other for other, d in ENGINES.items() if compute in d.compute]
        return f"{name} computes in {', '.join(engine.compute)}, not {compute}; that has: {', '.join(able)}"
    weights = bundle.manifest.precision
    if compute == "int8" and not PRECISIONS[weights].bits:
        return f"--compute int8 multiplies weights of int8 and int4; this bundle's are {weights}, so leave it out"
    if not engine.costs.keys() & bundle.manifest.dialects.keys():
        return (
            f"{name} reads graphs of the {engine.dialect!r} dialect and this bundle holds none; "
            f"export it with --dialect ort,{engine.dialect}"
        )
    if not any(map(find_spec, engine.modules)):
        return f"{engine.modules[0]} is not installed; {install(engine.extra)}"
    if compute is not None and (missing := missing_instructions(compute)):
        return missing
    if number and (gpus := len(find_gpus())) <= number:
        return f"{name}:{number} is not there: the NVIDIA driver shows {gpus} GPUs, numbered from 0; see nvidia-smi"
    return engine.load().obstacle(bundle, number)


def open_backend(bundle: Bundle, chosen: DeviceChoice, threads: int | None) -> Backend:
    """The bundle's graphs on a device, which compute on `threads`, at most one a core. Raises DeviceError."""
    if threads is not None and threads > (most := cores()):
        log.warning("%d threads are more than the %d cores that this process may use; it uses %d", threads, most, most)
        threads = most
    return ENGINES[chosen.device].load()(bundle, threads, chosen.compute, chosen.number)
