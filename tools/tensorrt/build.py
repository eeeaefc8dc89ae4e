"""Engines of a bundle for one target, built one at a time; one is kept while nothing that it depends on changes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vtx.runtime.backends.engines import TENSORRT_COSTS
from vtx.runtime.backends.slots import LANES
from vtx.runtime.bundle import fingerprint
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.fingerprint import EngineRecord, EngineSet, Range
from vtx.runtime.bundle.seal import SigningKey, write_sealed
from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.bundle.tensors import float16_overflow
from vtx.runtime.errors import BundleError, ExportError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.units import Progress, size
from vtx.tools.common.files import locked, open_directory
from vtx.tools.tensorrt.child import BuildRequest, BuiltEngine, build
from vtx.tools.tensorrt.graph import SeenGraph, load_graph
from vtx.tools.tensorrt.lint import dialect_graphs, lint
from vtx.tools.tensorrt.memory import build_memory
from vtx.tools.tensorrt.profiles import graph_profiles, input_shapes
from vtx.tools.tensorrt.releases import Release
from vtx.tools.tensorrt.targets import Target

LARGEST_ENGINE = 1.3  # times its weights: beyond that they are stored twice, or wider than in the bundle
JETSON_LANES = 2  # conversations of a run: the memory of more is that of many weights there
KERNELS = 16 << 20  # bytes of an engine that are no weights, at most,
KERNELS_OF_A_NODE = 48 << 10  # and for each node of its graph: each layer has kernels of its own, of any width


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One engine to build: its graph and profiles, the SHA-256 of its source files.

    `int8`: bytes that the engine holds an int8 weight in, as vtx-plan counts them.
    """

    graph: SeenGraph
    profiles: tuple[dict[str, Range], ...]
    sources: dict[str, str]
    int8: int = 1

    @property
    def memory(self) -> int:
        """Predicted peak memory of the build in bytes."""
        return build_memory(self.graph.weights + (self.int8 - 1) * self.graph.int8, len(self.profiles))

    @property
    def file(self) -> str:
        return self.graph.name.removesuffix(".onnx") + ".engine"

    def excess(self, engine: EngineRecord) -> float | None:
        """Times the graph's weights that its engine has, where that is more than kernels explain."""
        times = engine.bytes / max(1, self.graph.weights)
        kernels = KERNELS + KERNELS_OF_A_NODE * len(self.graph.nodes)
        return times if times > LARGEST_ENGINE and engine.bytes - self.graph.weights > kernels else None


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one dialect for one target, and the release of TensorRT that builds them.

    `workspace`: bytes of device memory for the builder; `key` signs the record of the engines.
    """

    bundle: Bundle
    target: Target
    release: Release
    version: str
    dialect: str
    jobs: tuple[EngineJob, ...]
    workspace: int | None = None
    timing_cache: Path | None = None
    key: SigningKey | None = None

    @property
    def folder(self) -> Path:
        return self.bundle.path(fingerprint.FOLDER) / self.target.name

    @property
    def memory(self) -> int:
        return max(job.memory for job in self.jobs)

    def record(self, engines: dict[str, EngineRecord]) -> EngineSet:
        """The record of `engines` by graph, with everything that makes an engine of another build stale."""
        return EngineSet(
            format=fingerprint.FORMAT,
            target=self.target.name,
            flavour=self.release.flavour,
            version=self.version,
            capability=self.target.capability,
            dialect=self.dialect,
            precision=self.bundle.manifest.precision,
            workspace=self.workspace,
            engines=engines,
        )


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One engine and the cost of its build; `built` is None if the engine was kept."""

    job: EngineJob
    record: EngineRecord
    built: BuiltEngine | None


def plan_engines(
    bundle: Bundle,
    target: Target,
    release: Release,
    version: str,
    dialect: str,
    *,
    batch: int | None = None,
) -> EnginePlan:
    """The engines to build, checked as far as possible before a builder runs.

    `batch`: conversations that one run decodes; 1: a stage has one profile for all its runs.
    """
    m = bundle.manifest
    if overflow := float16_overflow(bundle):
        raise BundleError(overflow)
    graphs = [load_graph(bundle.path(name)) for name in dialect_graphs(bundle, dialect)]
    findings = [finding for graph in graphs for finding in lint(graph, release)]
    if findings:
        remark = f" (and {len(findings) - 1} more: vtx-build --check lists them)" if len(findings) > 1 else ""
        raise BundleError(f"{findings[0]}{remark}")
    decoding = _decoding(graphs, target, batch)
    jobs = list[EngineJob]()
    for graph in graphs:
        named = {dim for name in graph.inputs for dim in graph.shapes.get(name, ())}
        ranges = list[dict[str, Range]]()
        for profile in graph_profiles(m, dialect, graph.name, decoding):
            bounds = {name: bounds for name, bounds in profile.items() if name in named}
            if bounds not in ranges:
                ranges.append(bounds)
        jobs.append(EngineJob(graph, tuple(ranges), _sources(graph, m), TENSORRT_COSTS[release.flavour].int8))
    return EnginePlan(
        bundle=bundle,
        target=target,
        release=release,
        version=version,
        dialect=dialect,
        jobs=tuple(jobs),
    )


def _decoding(graphs: Sequence[SeenGraph], target: Target, batch: int | None) -> int | None:
    """The conversations of a stage's profile for single tokens; None: there is one profile for all runs.

    TensorRT-RTX stores fp16 weights a second time for a profile of one token alone, and dequantises int8 ones in
    kernels of their own there; not for a profile of one token of each of several conversations. Raises BundleError.
    """
    if batch is None:
        batch = JETSON_LANES if target.is_jetson else LANES
    if batch == 1:
        return None
    if any(isinstance(graph.shapes.get(names.STATE, ("", ""))[1], int) for graph in graphs):
        raise BundleError("the graphs keep the state of one conversation; export the bundle again, or use --batch 1")
    return batch


def _sources(graph: SeenGraph, manifest: Manifest) -> dict[str, str]:
    """The checksum of each file that a graph is made of. Raises BundleError if one is not the bundle's."""
    sources = dict[str, str]()
    for name in (graph.name, *sorted(graph.files)):
        if name not in manifest.files:
            raise BundleError(
                f"{graph.name} takes weights from {name!r}, which is not a file of the bundle; do not use it"
            )
        sources[name] = manifest.files[name].sha256
    return sources


def check_memory(plan: EnginePlan) -> None:
    """Raise ExportError if the largest engine is predicted to need more memory than is free."""
    free = available_memory()
    largest = max(plan.jobs, key=lambda job: job.memory)
    if free is not None and largest.memory > free:
        raise ExportError(
            f"building {largest.file} needs about {size(largest.memory)} of memory, {size(free)} is free; "
            "use a machine with more, or export with fewer --stage-layers or a smaller precision, so that the largest "
            "graph shrinks "
            "(--force tries it anyway)"
        )


def build_engines(plan: EnginePlan, report: Progress) -> Iterator[EngineOutcome]:
    """Build missing and stale engines one at a time; each is recorded as soon as it is complete."""
    with _locked(plan.folder):
        records = dict[str, EngineRecord]()
        with suppress(BundleError):
            recorded = fingerprint.read_engines(plan.bundle, plan.target.name)
            if replace(recorded, engines={}) == plan.record({}):  # else of another TensorRT or other options
                records = dict(recorded.engines)
        for job in plan.jobs:
            record = records.get(job.graph.name)
            built = None
            if record is None or not _is_current(plan, job, record):
                record, built = _build_job(plan, job, report)
                records[job.graph.name] = record
                write_sealed(plan.folder / fingerprint.RECORD, plan.record(records).to_json().encode(), plan.key)
            report(job.file, 100, 100)
            yield EngineOutcome(job, record, built)
        files = {record.file for record in records.values()}
        for path in [*plan.folder.glob("*.engine"), *plan.folder.glob(".*.partial-*")]:
            if path.name not in files:  # of another cut or a killed build
                path.unlink()


def _is_current(plan: EnginePlan, job: EngineJob, record: EngineRecord) -> bool:
    with suppress(BundleError):
        fingerprint.open_engine(plan.bundle, plan.record({}), record).close()
        return record.sources == job.sources and record.profiles == job.profiles
    return False


def _build_job(plan: EnginePlan, job: EngineJob, report: Progress) -> tuple[EngineRecord, BuiltEngine]:
    partial = plan.folder / f".{job.file}.partial-{secrets.token_hex(4)}"
    request = BuildRequest(
        flavour=plan.release.flavour,
        graph=plan.bundle.path(job.graph.name),
        engine=partial,
        capability=plan.target.capability,
        profiles=tuple(input_shapes(job.graph, profile) for profile in job.profiles),
        workspace=plan.workspace,
        timing_cache=plan.timing_cache,
    )
    report(job.file, 0, 100)
    try:
        built = build(request, lambda phase, share: report(job.file, int(100 * share), 100))
        partial.replace(plan.folder / job.file)
    finally:
        partial.unlink(missing_ok=True)
    return EngineRecord(job.file, built.bytes, built.sha256, job.sources, job.profiles), built


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_directory(folder)
    except OSError as e:
        raise ExportError(
            f"cannot write engines to {folder} ({e.strerror}); copy the bundle to a directory that you may write to"
        ) from e
    try:
        if not locked(descriptor):
            raise ExportError(f"another vtx-build works on {folder}; wait until it ends")
        yield
    except OSError as e:
        raise ExportError(
            f"cannot write engines to {folder} ({e.strerror}); engines that were already there are kept"
        ) from e
    finally:
        os.close(descriptor)
