"""The configurations to choose from, and the full model that they are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from vtx.runtime.backends.devices import DeviceChoice, choose, float_bytes
from vtx.runtime.backends.engines import AUTO, ENGINES
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import Configuration, manifest_digest
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.policies.make import check_layout, check_provided
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.units import size
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.bench.ladder import SETTINGS
from vtx.tools.bench.measure import K
from vtx.tools.bench.methods import NONE, Method

CONTROL = "random"  # a measure of other reductions, not one to ship


@dataclass(frozen=True, slots=True)
class LoadedOn:
    """A bundle on an engine, with the memory that it is predicted to take; `digest` is its manifest's."""

    bundle: Bundle
    device: str
    compute: str
    memory: int
    digest: str

    @property
    def name(self) -> str:
        return self.bundle.folder.name

    def __hash__(self) -> int:
        return hash((self.digest, self.device, self.compute))


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration to choose from: an engine, K and a spec of reductions."""

    on: LoadedOn
    k: K
    reduce: str

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.on.device, self.on.compute, self.k, self.reduce)

    @property
    def name(self) -> str:
        return f"{self.on.name}: {self.configuration.name}"

    @property
    def key(self) -> str:
        return f"{self.on.digest} {self.on.device} {self.on.compute} k={self.k} reduce={self.reduce}"


def engines_of(bundle: Bundle, device: str = AUTO, compute: str | None = None) -> list[LoadedOn]:
    """The engines that can run a bundle here, each with the arithmetic that kept its answers at export.

    Float32 comes first. An arithmetic that is asked for is taken whether or not it was measured.
    """
    found, digest = list[LoadedOn](), manifest_digest(bundle)
    for name, engine in ENGINES.items() if device == AUTO else [(device, ENGINES[device])]:
        kinds = [kind for kind in engine.compute if kind == "f32" or kind in bundle.manifest.arithmetic]
        if engine.gpu:  # whose narrower arithmetic is the usual one
            kinds = list(engine.compute)
        for kind in sorted(kinds if compute is None else [compute], key=lambda kind: kind != "f32"):
            with contextlib.suppress(DeviceError):
                chosen: DeviceChoice = choose(bundle, name, kind)
                needed = needed_memory(bundle, float_bytes(chosen))
                found.append(LoadedOn(bundle, chosen.device, chosen.compute, needed, digest))
    if not found:
        choose(bundle, device, compute)  # which says why
        raise DeviceError(f"no engine here runs {bundle.folder.name} in {compute or 'any arithmetic'}")
    return found


def settings_of(on: LoadedOn) -> list[Setting]:
    """No method, every K, the gates, every reduction with each of these, and other strengths of each reduction."""
    manifest, dialect = on.bundle.manifest, ENGINES[on.device].dialect
    ks: list[K] = [None, *manifest.variants, *(["auto"] if manifest.gates else [])]
    exported = [spec for spec in manifest.reductions if spec != NONE]
    families = {part.name for spec in exported for part in parse(spec)} - {CONTROL}
    strengths = (spec for steps in SETTINGS.values() for spec in steps if parse(spec)[0].name in families)
    methods = [Method(k, spec) for spec in (NONE, *exported) for k in ks]
    layout = read_layout(manifest.layout, manifest.model.tower)
    settings = list[Setting]()
    for method in dict.fromkeys([*methods, *(Method(None, to_spec(parse(spec))) for spec in strengths)]):
        with contextlib.suppress(RequestError):
            reductions = () if method.reduce == NONE else parse(method.reduce)
            check_provided(reductions, manifest, dialect)
            check_layout(reductions, layout)
            settings.append(Setting(on, method.k, method.reduce))
    return settings


def find_settings(
    bundles: Sequence[Bundle], device: str, compute: str | None, memory: int | None
) -> tuple[Setting, list[Setting]]:
    """The reference, and all that fit into `memory` bytes.

    The reference is the full model of the most precise bundle (of equals the first) in float32 where that is possible.
    Raises RequestError if nothing fits, with the memory that would do.
    """
    engines = [on for bundle in bundles for on in engines_of(bundle, device, compute)]
    first = max(engines, key=lambda on: (_bits(on.bundle.manifest), on.compute == "f32"))
    fitting = [on for on in engines if memory is None or on.memory <= memory]
    if not fitting:
        least = min(engines, key=lambda on: on.memory)
        raise RequestError(
            f"nothing fits: --memory is {size(memory or 0)}, and {least.name} on {least.device}, the smallest, is "
            f"predicted to take {size(least.memory)}; give that, or a bundle of a smaller precision"
        )
    return Setting(first, None, NONE), [setting for on in fitting for setting in settings_of(on)]


def _bits(manifest: Manifest) -> int:
    row = PRECISIONS[manifest.precision]
    return row.bits or (32 if row.stored == "F32" else 16)
