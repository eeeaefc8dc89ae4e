"""Engines of a bundle for one target: judged, built one at a time, each in its place as soon as it is whole.

An engine stays where its graph, its weights, its profiles, the options and TensorRT are what they were.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vtx.exporter.tensorrt.child import Built, Order, build
from vtx.exporter.tensorrt.graph import SeenGraph, load_graph
from vtx.exporter.tensorrt.lint import dialect_graphs, lint
from vtx.exporter.tensorrt.profiles import graph_profiles, input_shapes, used_sizes
from vtx.exporter.tensorrt.releases import RTX, Release
from vtx.exporter.tensorrt.targets import Target
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import (
    FOLDER,
    FORMAT,
    RECORD,
    EngineRecord,
    EngineSet,
    Profile,
    open_engine,
    read_engines,
)
from vtx.runtime.errors import BundleError, ExportError, RequestError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.units import size

Report = Callable[[str, int, int], None]
# Measured with TensorRT-RTX 1.7 on engines from 130 MB to 2 GB of weights: see docs/tensorrt.md.
BUILDER_MEMORY = 500 << 20  # of the process, and of kernels
MEMORY_PER_BYTE = 3.5  # for each byte of weights
MEMORY_PER_PROFILE = 1.5  # and for each of a further profile


@dataclass(frozen=True, slots=True)
class Item:
    """One engine to be: its graph, the sizes it is built for, the bundle's files it comes from, their bytes."""

    graph: SeenGraph
    profiles: tuple[dict[str, tuple[int, int, int]], ...]
    sources: dict[str, str]
    weights: int

    @property
    def memory(self) -> int:
        """Bytes that building it is expected to take at its peak."""
        share = MEMORY_PER_BYTE + MEMORY_PER_PROFILE * (len(self.profiles) - 1)
        return BUILDER_MEMORY + int(share * self.weights)

    @property
    def file(self) -> str:
        return self.graph.name.removesuffix(".onnx") + ".engine"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one dialect for one target, and what TensorRT builds them."""

    bundle: Bundle
    target: Target
    release: Release
    version: str
    dialect: str
    workspace: int | None
    timing_cache: Path | None
    items: tuple[Item, ...]

    @property
    def folder(self) -> Path:
        return self.bundle.path(FOLDER) / self.target.name

    @property
    def memory(self) -> int:
        return max(item.memory for item in self.items)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One engine and what it took; `built` is None where the engine that was there still holds."""

    item: Item
    record: EngineRecord
    built: Built | None


def plan_engines(
    bundle: Bundle,
    target: Target,
    release: Release,
    version: str,
    dialect: str,
    *,
    workspace: int | None = None,
    timing_cache: Path | None = None,
) -> EnginePlan:
    """Everything that can be said before a builder runs.

    Raises:
        RequestError: the target does not compute in the bundle's precision.
        BundleError: no such dialect, or graphs that the release does not read.

    """
    m = bundle.manifest
    lacking = sorted({m.precision, m.vision_precision, m.head_precision} & target.lacks)
    if lacking:
        raise RequestError(
            f"{target.name} ({target.what}) does not compute with {lacking[0]} weights; export with --precision fp16"
        )
    graphs = [load_graph(bundle.path(name)) for name in dialect_graphs(bundle, dialect)]
    found = [finding for graph in graphs for finding in lint(graph, release)]
    if found:
        more = f" (and {len(found) - 1} more: vtx-build --check lists them)" if len(found) > 1 else ""
        raise BundleError(f"{found[0]}{more}")
    apart = release.flavour != RTX
    items = tuple(
        _item(bundle, graph, graph_profiles(bundle.manifest, dialect, graph.name, apart=apart)) for graph in graphs
    )
    return EnginePlan(bundle, target, release, version, dialect, workspace, timing_cache, items)


def check_memory(plan: EnginePlan) -> None:
    """Raise ExportError where the largest engine is expected to need more memory than is free."""
    free, largest = available_memory(), max(plan.items, key=lambda item: item.memory)
    if free is not None and largest.memory > free:
        raise ExportError(
            f"building {largest.file} needs about {size(largest.memory)} of memory, {size(free)} is free; "
            "use a machine with more, or export with more K or a smaller precision, so that the largest graph shrinks "
            "(--force tries all the same)"
        )


def build_engines(plan: EnginePlan, report: Report) -> Iterator[Outcome]:
    """Build what is missing or stale, one engine at a time; each is recorded as soon as it is whole."""
    with _alone(plan.folder):
        known = _known(plan)
        for item in plan.items:
            record = known.get(item.graph.name)
            built = None
            if record is None or not _holds(plan, item, record):
                record, built = _build_item(plan, item, report)
                known[item.graph.name] = record
                _write_record(plan, known)
            report(item.file, 100, 100)
            yield Outcome(item, record, built)
        _remove_strangers(plan, known)


def _item(bundle: Bundle, graph: SeenGraph, wanted: tuple[Profile, ...]) -> Item:
    profiles = tuple(used_sizes(graph, profile) for profile in wanted)
    unique = tuple(profile for number, profile in enumerate(profiles) if profile not in profiles[:number])
    files = [graph.name, *sorted(graph.files)]
    missing = [name for name in files if name not in bundle.manifest.files]
    if missing:
        raise BundleError(
            f"{graph.name} takes weights from {missing[0]!r}, which is no file of the bundle; do not use it"
        )
    return Item(graph, unique, {name: bundle.manifest.files[name].sha256 for name in files}, graph.weights)


def _known(plan: EnginePlan) -> dict[str, EngineRecord]:
    """The engines that are there, unless another TensorRT or other options made them."""
    try:
        found = read_engines(plan.bundle, plan.target.name)
    except BundleError:
        return {}
    return dict(found.engines) if replace(found, engines={}) == _engine_set(plan, {}) else {}


def _holds(plan: EnginePlan, item: Item, record: EngineRecord) -> bool:
    if record.sources != item.sources or record.profiles != item.profiles:
        return False
    try:
        open_engine(plan.bundle, _engine_set(plan, {}), record).close()
    except BundleError:
        return False
    return True


def _build_item(plan: EnginePlan, item: Item, report: Report) -> tuple[EngineRecord, Built]:
    partial = plan.folder / f".{item.file}.partial-{secrets.token_hex(4)}"
    order = Order(
        flavour=plan.release.flavour,
        graph=plan.bundle.path(item.graph.name),
        engine=partial,
        capability=plan.target.capability,
        profiles=tuple(input_shapes(item.graph, profile) for profile in item.profiles),
        workspace=plan.workspace,
        timing_cache=plan.timing_cache,
    )
    report(item.file, 0, 100)
    try:
        built = build(order, lambda phase, share: report(item.file, int(100 * share), 100))
        partial.replace(plan.folder / item.file)
    finally:
        partial.unlink(missing_ok=True)
    return EngineRecord(item.file, built.bytes, built.sha256, item.sources, item.profiles), built


def _engine_set(plan: EnginePlan, engines: Mapping[str, EngineRecord]) -> EngineSet:
    return EngineSet(
        format=FORMAT,
        target=plan.target.name,
        flavour=plan.release.flavour,
        version=plan.version,
        capability=plan.target.capability,
        dialect=plan.dialect,
        precision=plan.bundle.manifest.precision,
        workspace=plan.workspace,
        engines=dict(engines),
    )


def _write_record(plan: EnginePlan, engines: Mapping[str, EngineRecord]) -> None:
    partial = plan.folder / f".{RECORD}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(_engine_set(plan, engines).to_json())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(plan.folder / RECORD)


def _remove_strangers(plan: EnginePlan, engines: Mapping[str, EngineRecord]) -> None:
    """Engines that the record does not name, as another cut or a killed build left them."""
    wanted = {record.file for record in engines.values()}
    for path in [*plan.folder.glob("*.engine"), *plan.folder.glob(".*.partial-*")]:
        if path.name not in wanted:
            path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other vtx-build works on these engines meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise ExportError(f"cannot write engines to {folder} ({e.strerror}); copy the bundle to where you may") from e
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        raise ExportError(f"another vtx-build works on {folder}; wait for it") from e
    try:
        yield
    except OSError as e:
        raise ExportError(f"cannot write engines to {folder} ({e.strerror}); those that were there are kept") from e
    finally:
        os.close(descriptor)
