"""The bundles that a server answers from, by name, loaded on demand within a limit of memory."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from vtx.runtime.api.model import Model
from vtx.runtime.backends.memory import needed_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import read_card
from vtx.runtime.bundle.seal import PublicKey
from vtx.runtime.errors import BundleError, DeviceError, RequestError, VtxError
from vtx.runtime.policies import parse
from vtx.runtime.scheduler.choosing import Chooser
from vtx.runtime.scheduler.engine import Engine
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.refusal import Refusal, shutting_down
from vtx.runtime.units import size
from vtx.runtime.vision.preprocess import trained_fit

log = logging.getLogger(__name__)
LATEST = ":latest"  # that Ollama's clients put behind a name
LOOK_SECONDS = 0.05  # between two looks if an engine is still used
ROOM_SECONDS = 1.0  # a client has its answer a moment before the engine counts as unused


def close(engine: Engine) -> None:
    """End its answers and free the model, unless its thread does not end and may still use it."""
    if engine.close():
        engine.model.close()
    else:
        log.error("%s still computes; its engine is not closed", engine.name)


def _accept(_: Model) -> None:
    """Accept every model."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings of the bundles that are served.

    `needed`: the forecast of a bundle's memory on the device. `key` must have signed each bundle. `fit`: the treatment
    by `load` of pictures of another shape; None: each bundle's own. `choosers` choose K and reductions of requests with
    a deadline, by the bundle's name. `verify` raises VtxError for a model that does not compute what it must; it judges
    bundles that `reload` puts in place of others. `aliases`: further names, and the bundle that each means.
    """

    needed: Callable[[Bundle], int] = needed_memory
    key: PublicKey | None = None
    fit: str | None = None
    choosers: Mapping[str, Chooser] = field(default_factory=dict)
    verify: Callable[[Model], None] = _accept
    aliases: Mapping[str, str] = field(default_factory=dict)


USUAL = Serving()


class Engines:
    """Bundles by name, loaded on demand by `acquire`; engines that nobody uses make room.

    `memory`: bytes that all loaded bundles may need together; None: no limit but the memory that is free when one is
    loaded. Errors of the forecast and the signature are raised here, not to the first client of a bundle.
    """

    def __init__(
        self,
        bundles: Mapping[str, Path],
        load: Callable[[Path], Model],
        limits: Limits,
        memory: int | None = None,
        serving: Serving = USUAL,
    ) -> None:
        self._load = load
        self._limits = limits
        self._memory = memory
        self._serving = serving
        self._bundles = {name: Bundle.open(folder, key=serving.key) for name, folder in bundles.items()}
        self._needed = {name: self._needs(name, bundle) for name, bundle in self._bundles.items()}
        self._loaded: dict[str, Engine] = {}
        self._replaced: list[Engine] = []  # whose last answers run
        self._counted = Counter[str]()  # by engines that are closed
        for alias, name in serving.aliases.items():
            if alias in self._bundles or name not in self._bundles:
                raise RequestError(
                    f"the alias {alias}={name} is a bundle's name, or names none; there is {', '.join(self._bundles)}"
                )
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self.closed = False

    @property
    def names(self) -> list[str]:
        return list(self._bundles)

    @property
    def loaded(self) -> list[Engine]:
        """The engines in memory."""
        with self._lock:
            return list(self._loaded.values())

    @contextmanager
    def use(self, engine: Engine) -> Iterator[None]:
        """Hold an engine that `acquire` gave, until the end of the block."""
        try:
            yield
        finally:
            with self._lock:
                engine.users -= 1
                engine.used_at = time.monotonic()

    def named(self, name: str) -> str:
        """The name of the bundle that a client means: also with Ollama's tag, or, if there is but one, without a name.

        Raises Refusal (404) if there is none.
        """
        if not name and len(self._bundles) == 1:
            return next(iter(self._bundles))
        for given in (name, name.removesuffix(LATEST)):
            known = self._serving.aliases.get(given, given)
            if known in self._bundles:
                return known
        raise self._unknown(name)

    def _unknown(self, name: str) -> Refusal:
        problem = f"there is no model {name[:80]!r}" if name else "the request has no model"
        return Refusal(
            404,
            f"{problem}; this server has {', '.join([*self._bundles, *self._serving.aliases]) or 'none'}",
            code="model_not_found",
            param="model",
        )

    def acquire_loaded(self, name: str) -> Engine | None:
        """The engine of this name if it is loaded; `use` must follow."""
        with self._lock:
            if self.closed:
                raise shutting_down()
            engine = self._loaded.get(name)
            if engine is not None:
                engine.users += 1
            return engine

    def acquire(self, name: str) -> Engine:
        """The engine of this name, loaded now if it is not; `use` must follow. May take long.

        Raises Refusal if the memory that it needs is in use.
        """
        with self._loading:
            engine = self.acquire_loaded(name)
            if engine is not None:
                return engine
            if name not in self._bundles:  # removed since it was named
                raise self._unknown(name)
            self._make_room(name, self._needed[name])
            engine = self._opened(name, self._load(Path(self._bundles[name].folder)))
            engine.users = 1
            with self._lock:
                self._loaded[name] = engine
            return engine

    def reload(self) -> list[str]:
        """Put bundles that have changed on disk in the place of those that are served, and say what was done.

        A bundle in use is loaded beside the old one and verified, then takes its place; answers that run end with the
        old one. What fails leaves the old one in its place. May take long.
        """
        told = []
        for name, bundle in list(self._bundles.items()):
            try:
                replaced = self.replace(name, Path(bundle.folder))
                told.append(f"{name} was replaced" if replaced else f"{name} is unchanged")
            except (VtxError, OSError, MemoryError) as e:
                told.append(f"{name} was not replaced: {e}")
        self.retire()
        return told

    def replace(self, name: str, folder: Path, *, whole: bool = False) -> bool:
        """Serve the bundle of a folder under this name, in the place of what it was; False if it is the same.

        `whole`: each of its files is hashed first. Answers that run end with the old one, which `retire` closes. Raises
        VtxError, OSError or MemoryError, and changes nothing.
        """
        with self._loading:
            if self.closed:
                raise shutting_down()
            bundle = Bundle.open(folder, key=self._serving.key)
            old = self._bundles.get(name)
            served = self._loaded.get(name)
            refitted = served is not None and served.model.loaded.card != read_card(bundle)
            if old is not None and bundle.manifest == old.manifest and not refitted:
                return False
            damage = [problem for _, problem in bundle.verify() if problem is not None] if whole else []
            if damage:
                raise BundleError(damage[0])
            needed = self._needs(name, bundle)
            engine = self._beside(name, bundle, needed) if served is not None else None
            with self._lock:
                # Whole new mappings, since other threads may read the old ones.
                self._bundles = {**self._bundles, name: bundle}
                self._needed = {**self._needed, name: needed}
                if engine is not None:
                    self._replaced.append(self._loaded[name])
                    self._loaded[name] = engine
            return True

    def remove(self, name: str) -> None:
        """Serve the bundle of this name no more. Answers that run end, and `retire` closes it."""
        with self._loading, self._lock:
            self._bundles = {other: bundle for other, bundle in self._bundles.items() if other != name}
            engine = self._loaded.pop(name, None)
            if engine is not None:
                self._replaced.append(engine)

    def retire(self, *, wait: bool = True) -> None:
        """Close engines that are replaced or removed, once their last answers have ended; without `wait` those idle."""
        with self._lock:
            replaced = list(self._replaced)
        for engine in replaced:
            while wait and engine.users and not self.closed:
                time.sleep(LOOK_SECONDS)
            with self._lock:
                if engine not in self._replaced or (engine.users and not self.closed):
                    continue
                self._replaced.remove(engine)
                self._count(engine)
            close(engine)

    def _beside(self, name: str, bundle: Bundle, needed: int) -> Engine:
        """An engine of this bundle, verified, beside the one of the same name."""
        self._make_room(name, needed)
        model = self._load(Path(bundle.folder))
        try:
            self._serving.verify(model)
            return self._opened(name, model)
        except BaseException:
            model.close()
            raise

    def _needs(self, name: str, bundle: Bundle) -> int:
        try:
            needed = self._serving.needed(bundle)
        except VtxError as e:
            raise RequestError(f"{name}: {e}") from e
        if self._memory is not None and needed > self._memory:
            raise DeviceError(
                f"{name} needs about {size(needed)} of memory, the limit is {size(self._memory)}; raise --memory, or "
                "export with a smaller --precision"
            )
        return needed

    def _opened(self, name: str, model: Model) -> Engine:
        blank = Image.new("RGB", (64, 64))
        model.backend.vision(model.loaded.images.layout.views(blank, model.manifest.image)[0][None])  # loads it now
        return Engine(name, model, self._limits, self._serving.choosers.get(name))

    def _make_room(self, name: str, needed: int) -> None:
        """Close engines that nobody uses, the least recently used first, until a bundle of this name fits.

        Waits up to ROOM_SECONDS for an engine in use, then raises Refusal (503).
        """
        end = time.monotonic() + ROOM_SECONDS
        while (
            self._memory is not None
            and sum(self._needed[engine.name] for engine in self.loaded) + needed > self._memory
        ):
            with self._lock:
                idle = [
                    engine
                    for engine in self._loaded.values()
                    if not (engine.users or engine.scheduler.active or engine.name == name)
                ]
                if idle:
                    oldest = min(idle, key=lambda engine: engine.used_at)
                    del self._loaded[oldest.name]
                    self._count(oldest)
            if not idle:
                if time.monotonic() >= end:
                    raise Refusal(
                        503,
                        f"{name} does not fit into memory next to the models in use; try again later",
                        code="model_busy",
                        retry_after=10,
                    )
                time.sleep(LOOK_SECONDS)
                continue
            log.info("closing %s to make room for %s", oldest.name, name)
            close(oldest)

    def close(self) -> None:
        """End all answers and free all engines."""
        with self._lock:
            self.closed = True
        with self._loading:
            for engine in self.loaded:
                close(engine)
            self._loaded.clear()
            self.retire()

    def silences(self) -> dict[str, float]:
        """Seconds since the last sign of life of each loaded model's thread, by name."""
        return {engine.name: engine.scheduler.silence for engine in self.loaded}

    def figures(self) -> dict[str, float]:
        """The current state for the metrics, and the counts (`_total`) of all engines since the start."""
        with self._lock:
            engines = [*self._loaded.values(), *self._replaced]
            counted = self._counted.copy()
        figures = {name: sum(map(of, engines)) + counted[name] for name, of in FIGURES.items()}
        return {"models_loaded": len(engines), **figures}

    def _count(self, engine: Engine) -> None:
        """Keep the counts of an engine that is closed."""
        self._counted.update({name: int(of(engine)) for name, of in FIGURES.items() if name.endswith("_total")})

    def describe(self) -> list[dict[str, Any]]:
        """The objects of /v1/models."""
        batching = {engine.name: engine.batching for engine in self.loaded}
        objects = list[dict[str, Any]]()
        depths = {engine.name: engine.model.loaded.defaults.k for engine in self.loaded}  # a card's, where there is one
        for name, bundle in self._bundles.items():
            m = bundle.manifest
            loaded = batching.get(name)
            batch = None
            if loaded is not None:  # the number of answers decoded in one pass, and the reason if it is 1
                one = {"most": 1, "reason": loaded.obstacle}
                batch = {"most": loaded.most} if loaded.obstacle is None else one
            height, width = m.image.sides
            facts = {
                "layers": m.model.layers,
                "ks": m.variants,
                "default_k": depths.get(name, m.default_k),
                "gates": m.gates,
                "reductions": m.reductions,
                "methods": {spec: _about(spec) for spec in m.reductions},
                "precision": m.precision,
                "videos": m.video is not None,
                "max_context": m.max_context,
                "batch": batch,
                "image": {
                    "width": width,
                    "height": height,
                    "fit": self._serving.fit or trained_fit(m.image),
                    "layout": m.layout.name,
                    "grid": m.model.tower.grid,
                    "tokens": m.layout.max_tokens,
                },
            }
            described = {"object": "model", "created": 0, "owned_by": "vtx", "vtx": facts}
            names = [name, *(alias for alias, meant in self._serving.aliases.items() if meant == name)]
            objects += [{"id": each, **described, "root": name} for each in names]
        return objects


FIGURES: dict[str, Callable[[Engine], float]] = {
    "requests_active": lambda engine: engine.scheduler.active,
    "requests_waiting": lambda engine: engine.scheduler.waiting,
    "kv_kept_bytes": lambda engine: engine.pool.kept_bytes,
    "image_cache_bytes": lambda engine: engine.images.bytes,
    "conversation_hits_total": lambda engine: engine.pool.hits,
    "conversation_misses_total": lambda engine: engine.pool.misses,
    "image_cache_hits_total": lambda engine: engine.images.hits,
    "image_cache_misses_total": lambda engine: engine.images.misses,
    "batched_passes_total": lambda engine: engine.batching.passes,
    "batched_tokens_total": lambda engine: engine.batching.tokens,
}


def _about(spec: str) -> str:
    """A sentence about each method of a spec, as the file of the method begins."""
    modules = dict.fromkeys(sys.modules[type(method).__module__] for method in parse(spec))
    return " ".join((module.__doc__ or "").partition("\n")[0] for module in modules)


def named(specs: tuple[str, ...]) -> dict[str, Path]:
    """Bundles by name from NAME=DIR or DIR; the name of the latter is the directory's."""
    bundles: dict[str, Path] = {}
    for spec in specs:
        name, separator, folder = spec.partition("=")
        path = Path(folder if separator else spec)
        name = name if separator else path.resolve().name
        if not name or name in bundles:
            raise RequestError(f"two bundles are named {name!r}, or one has no name; give names: --bundle NAME=DIR")
        bundles[name] = path
    return bundles
