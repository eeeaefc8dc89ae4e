"""vtx-build: TensorRT engines from a bundle's graphs. It parses, calls and prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import FILE, option, options
from vtx.runtime.backends.slots import LANES
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, table
from vtx.runtime.terminal.last import last_bundle

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.tensorrt.build import EngineOutcome
    from vtx.tools.tensorrt.targets import Target


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """The options of vtx-build."""

    bundle: str | None
    targets: list[str]
    dialect: str | None
    workspace: int | None
    timing_cache: Path | None
    batch: int | None
    check: bool
    as_json: bool
    force: bool
    sign: Path | None


@command(
    epilog="vtx-build --bundle my-bundle\n"
    "vtx-build --bundle my-bundle --target sm89,sm120\n"
    "vtx-build --bundle my-bundle --target jetson-orin --check"
)
@options(
    "bundle",
    option(
        "--target targets",
        "this",
        "Machines to build for. Engines for RTX cards can be built anywhere, others "
        "only on the machine that runs them.",
        metavar="this|sm89,sm120|jetson-orin|...",
        callback=lambda _, __, value: value.split(","),
    ),
    option("--dialect", str, "Graph dialect [default: that of the target's TensorRT]."),
    option("--workspace", click.IntRange(min=1), "Device memory for the builder's workspace.", metavar="MiB"),
    option(
        "--timing-cache",
        FILE,
        "Timing cache, read and written, for faster builds. Not for RTX, which does not time kernels.",
        metavar="FILE",
    ),
    option(
        "--batch",
        click.IntRange(1, LANES),
        "Conversations that one run decodes, each with memory in every engine; 1: a stage has no kernels "
        "of its own for single tokens [default: 8, on a Jetson 2].",
        metavar="N",
    ),
    option("--check", bool, "Check the graphs against the rules of the target's TensorRT; build nothing."),
    option("--json as_json", bool, "Print the engines, or with --check the findings, as one JSON object."),
    option("--force", bool, "Build even if free memory looks too small."),
    option(
        "--sign", Path, "Sign the engines with this Ed25519 key (PEM), the one that signed the bundle.", metavar="KEY"
    ),
    record=BuildSettings,
)
def build(settings: BuildSettings) -> None:
    """Build TensorRT engines from a bundle's graphs, into its engines/ directory."""
    end_on_sigterm()
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.tensorrt.targets import check_libraries, find_target

    key = SigningKey.load(settings.sign) if settings.sign else None
    targets = [find_target(name) for name in settings.targets]
    bundle = Bundle.open(last_bundle(settings.bundle), key=key.public if key else None)
    for target in targets:
        check_libraries(target, building=not settings.check)
    if settings.check:
        _check(bundle, targets, settings.dialect, as_json=settings.as_json)
        return
    outcomes = {target.name: _build(settings, bundle, target, key) for target in targets}
    if settings.as_json:
        engines = {name: [_record(outcome) for outcome in of_target] for name, of_target in outcomes.items()}
        say_json({"bundle": str(bundle.folder), "engines": engines})
    for name, of_target in outcomes.items():
        rows = [_row(outcome) for outcome in of_target]
        if not settings.as_json:
            table(f"engines for {name}", ["engine", "weights", "size", "time", "peak memory"], rows)


def _build(settings: BuildSettings, bundle: Bundle, target: Target, key: SigningKey | None) -> list[EngineOutcome]:
    """Build the engines of a target, with predicted memory before and a bar during."""
    from vtx.runtime.errors import RequestError
    from vtx.runtime.units import size
    from vtx.tools.tensorrt.build import build_engines, check_memory, plan_engines
    from vtx.tools.tensorrt.targets import load_tensorrt

    if settings.timing_cache is not None and target.portable:
        raise RequestError(f"{target.release.name} measures no kernels when it builds; leave --timing-cache out")
    module, release = load_tensorrt(target)
    dialect = settings.dialect or release.dialect
    plan = replace(
        plan_engines(bundle, target, release, module.__version__, dialect, batch=settings.batch),
        workspace=None if settings.workspace is None else settings.workspace << 20,
        timing_cache=settings.timing_cache,
        key=key,
    )
    if not settings.force:
        check_memory(plan)
    note(f"predicted: {size(plan.memory)} of memory at the peak, {len(plan.jobs)} engines for {target.machine}")
    with bar() as report:
        return list(build_engines(plan, report))


def _record(outcome: EngineOutcome) -> dict[str, object]:
    """An engine for --json."""
    built = outcome.built
    return {
        "file": outcome.record.file,
        "weights_bytes": outcome.job.graph.weights,
        "bytes": outcome.record.bytes,
        "seconds": None if built is None else built.seconds,
        "memory_bytes": None if built is None else built.memory,
    }


def _row(outcome: EngineOutcome) -> list[str]:
    """An engine's row of the table; one that is larger than its weights allow is noted."""
    from vtx.runtime.units import size

    record = outcome.record
    if excess := outcome.job.excess(record):
        note(
            f"warning: {record.file} has {excess:.1f} times the bytes of its weights: TensorRT stores them "
            "twice or wider; try --batch 1, or export with another --precision"
        )
    built = outcome.built
    cost = ["kept", ""] if built is None else [f"{built.seconds:.1f} s", size(built.memory)]
    return [record.file, size(outcome.job.graph.weights), size(record.bytes), *cost]


def _check(bundle: Bundle, targets: list[Target], dialect: str | None, *, as_json: bool) -> None:
    from vtx.runtime.errors import BundleError
    from vtx.tools.tensorrt.lint import lint_bundle

    report = {}
    for target in targets:
        written = dialect or target.release.dialect
        findings = lint_bundle(bundle, written, target.release)
        report[target.name] = [asdict(finding) for finding in findings]
        if as_json:
            continue
        title = f"{written} on {target.machine}, {target.release.name}"
        click.echo(title if findings else f"{title}: TensorRT reads every graph")
        places: dict[tuple[str, str, str], list[str]] = {}  # nodes with the same problem share a line
        for f in findings:
            places.setdefault((f.graph, f.rule, f.problem), []).append(f.node)
        for (graph, rule, problem), nodes in places.items():
            rest = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            click.echo(f"  {graph}{f', {nodes[0]}{rest}' if nodes[0] else ''}: {problem} [{rule}]")
        if findings:
            click.echo(f"  the {findings[0].dialect!r} dialect is written for {findings[0].release}")
    if as_json:
        say_json({"bundle": str(bundle.folder), "findings": report})
    if count := sum(map(len, report.values())):
        raise BundleError(f"{count} findings, see above; build from the dialect named there")
