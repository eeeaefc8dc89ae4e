"""The configurations to choose from, and the full model that they are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from vtx.runtime.backends.devices import DeviceChoice, choose
from vtx.runtime.backends.engines import AUTO, ENGINES
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import Configuration, manifest_digest
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import DeviceError, ImageError, RequestError
from vtx.runtime.host.profiles import Profile
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.policies.make import check_layout, check_provided, read_rest, withdrawal
from vtx.runtime.precision import PRECISIONS
from vtx.runtime.units import size
from vtx.runtime.vision.layout import Layout, limited_layout
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.bench.measure import K
from vtx.tools.bench.methods import NONE, Method
from vtx.tools.fit.planning import PlannedEngine

RESTS = ("5%", "10%", "20%")  # of the image tokens stay from a K on
CONTROL = "random"  # a measure of other reductions, not one to ship
HALVINGS = 3  # of an image's tiles or tokens
KEPT = (0.75, 0.5, 0.25, 0.125)  # shares of the image tokens
DROPPED = (0.25, 0.5, 0.75, 0.9)
STRENGTHS = (
    *(f"cls:keep={share}" for share in KEPT),
    *(f"divprune:keep={share}" for share in KEPT),
    *(f"visionzip:dominant={share},contextual={share / 8}" for share in KEPT),
    *(f"hiprune:keep={share},layer={block}" for share in KEPT for block in (2, 9)),
    *(f"lsm:tau={tau}" for tau in (0.95, 0.9, 0.8, 0.6)),
    *(f"cdpruner:keep={share}" for share in KEPT),
    *(f"cdpruner:keep={share},text=none" for share in KEPT),
    *(f"cdpruner:keep={share},text=tower" for share in KEPT),
    *(f"dart:keep={share}" for share in KEPT),
    *(f"dart:keep={share},k=0" for share in KEPT),
    *(f"fastv:k=2,ratio={share}" for share in DROPPED),
    *(f"pyramiddrop:ratio={share},layers={a}/{2 * a}/{3 * a}" for a in (6, 8) for share in KEPT[:3]),
    "mustdrop:192", "mustdrop:64", "mustdrop:64,tau=off", "mustdrop:gamma=0.02,alpha=0.03,tau=off",
    "mustdrop:gamma=0.05,alpha=0.1,tau=off",
)  # fmt: skip


class ImageLimit(NamedTuple):
    """Limits of an image as `load` takes them; at most one of them is given."""

    max_tiles: int | None = None
    max_pixels: int | None = None


NO_LIMIT = ImageLimit()
Sizes = Callable[[], Iterable[tuple[int, int]]]  # widths and heights of images, which are read when they are asked for


@dataclass(frozen=True, slots=True)
class LoadedOn:
    """A bundle on an engine, with the memory that it is predicted to take; `digest` is its manifest's.

    `planned`: the engine that it is to be shipped for, with times by estimate; answers are computed on `device`.
    """

    bundle: Bundle
    device: str
    compute: str
    memory: int
    digest: str
    planned: PlannedEngine | None = None

    @property
    def name(self) -> str:
        return self.bundle.folder.name

    def __hash__(self) -> int:
        return hash((self.digest, self.device, self.compute))


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration to choose from: an engine, K, a spec of reductions, limits of an image, the rest from K on."""

    on: LoadedOn
    k: K
    reduce: str
    limit: ImageLimit = NO_LIMIT
    rest: str | None = None

    @property
    def configuration(self) -> Configuration:
        engine = self.on.planned or self.on
        return Configuration(engine.device, engine.compute, self.k, self.reduce, *self.limit, self.rest)

    @property
    def name(self) -> str:
        return f"{self.on.name}: {self.configuration.name}"

    @property
    def key(self) -> str:
        limit = "" if self.limit == NO_LIMIT else f" tiles={self.limit.max_tiles} pixels={self.limit.max_pixels}"
        limit += "" if self.rest is None else f" rest={self.rest}"
        on = self.on
        planned = self.on.planned
        planned_for = "" if planned is None else f" for {planned.engine.software} of {planned.profile.name}"
        return f"{on.digest} {on.device} {on.compute} k={self.k} reduce={self.reduce}{limit}{planned_for}"


def engines_of(bundle: Bundle, device: str = AUTO, compute: str | None = None) -> list[LoadedOn]:
    """The engines that can run a bundle here, each with the arithmetic that kept its answers at export.

    Float32 comes first. An arithmetic that is asked for is taken whether or not it was measured.
    """
    engines = list[LoadedOn]()
    digest = manifest_digest(bundle)
    for name, engine in ENGINES.items() if device == AUTO else [(device, ENGINES[device])]:
        kinds = [kind for kind in engine.compute if kind == "f32" or kind in bundle.manifest.arithmetic]
        if engine.gpu:  # whose narrower arithmetic is the usual one
            kinds = list(engine.compute)
        for kind in sorted(kinds if compute is None else [compute], key=lambda kind: kind != "f32"):
            with contextlib.suppress(DeviceError):
                choice: DeviceChoice = choose(bundle, name, kind)
                memory = needed_memory(bundle, choice.device, choice.compute)
                engines.append(LoadedOn(bundle, choice.device, choice.compute, memory, digest))
    if not engines:
        choose(bundle, device, compute)  # which says why
        raise DeviceError(f"no engine here runs {bundle.folder.name} in {compute or 'any arithmetic'}")
    return engines


def limits_of(layout: Layout, sizes: Sizes) -> list[ImageLimit]:
    """Limits that halve, again and again, the tiles or the tokens of images of these sizes; without effect left out."""
    if layout.max_views == 1 and layout.min_tokens is None:
        return []
    sides_of = list[tuple[int, int]]()
    for sides in dict.fromkeys(sizes()):
        with contextlib.suppress(ImageError):  # it will be refused when it is asked about
            layout.count(*sides)
            sides_of.append(sides)
    limits = list[ImageLimit]()
    counts = [layout.count(*sides) for sides in sides_of]
    if not sides_of:
        return []
    if layout.max_views > 1:
        tiles = [max(layout.passes(*sides) for sides in sides_of) - 1]  # beside the whole image
        while tiles[-1] > 0:
            tiles.append(tiles[-1] // 2)
        limits = [ImageLimit(max_tiles=1 + count) for count in tiles[1:]]
    else:
        largest, most = max(zip(sides_of, counts, strict=True), key=lambda pair: pair[1])
        fitting = [layout.fitting([largest], most >> step) for step in range(1, HALVINGS + 1)]
        limits = [ImageLimit(max_pixels=pixels) for pixels in fitting if pixels]
    useful = list[ImageLimit]()
    for limit in limits:
        now = [limited_layout(layout, *limit).count(*sides) for sides in sides_of]
        if now != counts:
            useful.append(limit)
        counts = now
    return useful


def settings_of(on: LoadedOn, sizes: Sizes = tuple) -> list[Setting]:
    """No method, every K, the gates, every reduction with each of these, and other strengths of each reduction.

    All but the last also with images of fewer tiles or pixels, if that changes anything for images of these `sizes`.
    Every K also with each rest that can stay there.
    """
    manifest = on.bundle.manifest
    dialects = {ENGINES[engine.device].dialect for engine in (on, on.planned or on)}
    methods = _methods(manifest)
    layout = read_layout(manifest.layout, manifest.model.tower)
    candidates = [(method, NO_LIMIT) for method in (*methods, *_strengths(manifest))]
    candidates += [(method, limit) for limit in limits_of(layout, sizes) for method in methods]
    settings = list[Setting]()
    for method, limit in dict.fromkeys(candidates):
        with contextlib.suppress(RequestError):
            reductions = () if method.reduce == NONE else parse(method.reduce)
            for dialect in dialects:
                check_provided(reductions, manifest, dialect)
            check_layout(reductions, limited_layout(layout, *limit))
            settings.append(Setting(on, method.k, method.reduce, limit))
    return [*settings, *(setting for setting in pairs_of(Setting(on, None, NONE)) if setting.rest)]


def _methods(manifest: Manifest) -> list[Method]:
    """No reduction and each of the bundle's, at no K, every K, and the gates."""
    ks: list[K] = [None, *manifest.variants, *(["auto"] if manifest.gates else [])]
    exported = [spec for spec in manifest.reductions if spec != NONE]
    return [Method(k, spec) for spec in (NONE, *exported) for k in ks]


def _strengths(manifest: Manifest) -> list[Method]:
    """Other strengths of the bundle's reductions."""
    families = {part.name for spec in manifest.reductions if spec != NONE for part in parse(spec)} - {CONTROL}
    specs = [spec for spec in STRENGTHS if parse(spec)[0].name in families]
    return [Method(None, to_spec(parse(spec))) for spec in specs]


def pairs_of(base: Setting) -> list[Setting]:
    """`base` at every K of its bundle, each without a rest and with each of `RESTS` that can stay there."""
    manifest = base.on.bundle.manifest
    engines = (base.on, base.on.planned or base.on)
    dialects = {ENGINES[engine.device].dialect for engine in engines}
    pairs = list[Setting]()
    for k, rest in product(manifest.variants, (None, *RESTS)):
        with contextlib.suppress(RequestError):
            for dialect in dialects:
                withdrawal(k, None if rest is None else read_rest(rest), manifest, dialect)
            pairs.append(replace(base, k=k, rest=rest))
    return pairs


def planned_on(bundle: Bundle, profile: Profile, device: str, max_new_tokens: int) -> LoadedOn:
    """A bundle for `device` of a profile, on the engine that answers with it here in float32."""
    planned = PlannedEngine.of(bundle, profile, device, max_new_tokens)
    here = choose(bundle, compute="f32")
    return LoadedOn(bundle, here.device, here.compute, planned.memory, manifest_digest(bundle), planned)


def find_settings(
    engines: Sequence[LoadedOn], memory: int | None, sizes: Sizes = tuple
) -> tuple[Setting, list[Setting]]:
    """The reference, and all that fit into `memory` bytes; `sizes` are those of the images to be asked about.

    The reference is the full model of the most precise bundle (of equals the first) in float32 where that is possible.
    Raises RequestError if nothing fits, with the memory that would do.
    """
    first = max(engines, key=lambda on: (_bits(on.bundle.manifest), on.compute == "f32"))
    fitting = [on for on in engines if memory is None or on.memory <= memory]
    if not fitting:
        least = min(engines, key=lambda on: on.memory)
        raise RequestError(
            f"nothing fits into {size(memory or 0)} of memory: {least.name} on {(least.planned or least).device}, the "
            f"smallest, is predicted to take {size(least.memory)}; allow that with --memory, or give a bundle of a "
            "smaller precision"
        )
    return Setting(first, None, NONE), [setting for on in fitting for setting in settings_of(on, sizes)]


def _bits(manifest: Manifest) -> int:
    row = PRECISIONS[manifest.precision]
    return row.bits or (32 if row.stored == "F32" else 16)
