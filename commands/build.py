"""vtx-build: TensorRT engines from a bundle's graphs. It parses, calls and prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import FILE, option, options
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, table
from vtx.runtime.terminal.last import last_bundle

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.tools.tensorrt.targets import Target


@command(
    epilog="vtx-build --bundle my-bundle\n"
    "vtx-build --bundle my-bundle --target sm89,sm120\n"
    "vtx-build --bundle my-bundle --target jetson-orin --check"
)
@options(
    "bundle",
    option("--target targets", "this", "Machines to build for. Engines for RTX cards can be built anywhere, others "
           "only on the machine that runs them.", metavar="this|sm89,sm120|jetson-orin|...",
           callback=lambda _, __, value: value.split(",")),
    option("--dialect", str, "Graph dialect [default: that of the target's TensorRT]."),
    option("--workspace", click.IntRange(min=1), "Device memory for the builder's workspace.", metavar="MiB"),
    option("--timing-cache", FILE, "Timing cache, read and written, for faster builds. Not for RTX, which does not "
           "time kernels.", metavar="FILE"),
    option("--profiles", click.Choice(["1", "2"]), "Kernels of a stage: one set, or a second one for single tokens, "
           "which may store weights twice [default: 1 for RTX, but 2 for int4; else 2]."),
    option("--check", bool, "Check the graphs against the rules of the target's TensorRT; build nothing."),
    option("--json as_json", bool, "Print the engines, or with --check the findings, as one JSON object."),
    option("--force", bool, "Build even if free memory looks too small."),
    option("--sign", Path, "Sign the engines with this Ed25519 key (PEM), the one that signed the bundle.",
           metavar="KEY"),
)  # fmt: skip
def build(
    bundle: str | None, targets: list[str], dialect: str | None, workspace: int | None, timing_cache: Path | None,
    profiles: str | None, check: bool, as_json: bool, force: bool, sign: Path | None,
) -> None:  # fmt: skip
    """Build TensorRT engines from a bundle's graphs, into its engines/ directory."""
    end_on_sigterm()
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.runtime.errors import RequestError
    from vtx.runtime.units import size
    from vtx.tools.tensorrt.build import EngineOutcome, build_engines, check_memory, plan_engines
    from vtx.tools.tensorrt.targets import check_libraries, find_target, load_tensorrt

    key = SigningKey.load(sign) if sign else None
    known = [find_target(name) for name in targets]
    opened = Bundle.open(last_bundle(bundle), key=key.public if key else None)
    for target in known:
        check_libraries(target, building=not check)
    if check:
        _check(opened, known, dialect, as_json=as_json)
        return
    built = dict[str, list[EngineOutcome]]()
    for target in known:
        if timing_cache is not None and target.portable:
            raise RequestError(f"{target.release.name} measures no kernels when it builds; leave --timing-cache out")
        module, release = load_tensorrt(target)
        plan = plan_engines(
            opened, target, release, module.__version__, dialect or release.dialect,
            workspace=None if workspace is None else workspace << 20, timing_cache=timing_cache,
            profiles=int(profiles) if profiles else None, key=key,
        )  # fmt: skip
        if not force:
            check_memory(plan)
        note(f"predicted: {size(plan.memory)} of memory at the peak, {len(plan.jobs)} engines for {target.machine}")
        with bar() as report:
            built[target.name] = list(build_engines(plan, report))
    engines = dict[str, list[dict[str, object]]]()
    for name, outcomes in built.items():
        rows = list[list[str]]()
        engines[name] = []
        for o in outcomes:
            took, memory = (o.built.seconds, o.built.memory) if o.built else (None, None)
            engines[name].append({"file": o.record.file, "weights_bytes": o.job.graph.weights, "bytes": o.record.bytes,
                                  "seconds": took, "memory_bytes": memory})  # fmt: skip
            cost = [f"{o.built.seconds:.1f} s", size(o.built.memory)] if o.built else ["kept", ""]
            if excess := o.job.excess(o.record):
                note(
                    f"warning: {o.record.file} has {excess:.1f} times the bytes of its weights: TensorRT stores them "
                    "twice or wider; try --profiles 1, or export with another --precision"
                )
            rows.append([o.record.file, size(o.job.graph.weights), size(o.record.bytes), *cost])
        if not as_json:
            table(f"engines for {name}", ["engine", "weights", "size", "time", "peak memory"], rows)
    if as_json:
        say_json({"bundle": str(opened.folder), "engines": engines})


def _check(bundle: Bundle, targets: list[Target], dialect: str | None, *, as_json: bool) -> None:
    from vtx.runtime.errors import BundleError
    from vtx.tools.tensorrt.lint import lint_bundle

    found = {}
    for target in targets:
        written = dialect or target.release.dialect
        findings = lint_bundle(bundle, written, target.release)
        found[target.name] = [asdict(finding) for finding in findings]
        if as_json:
            continue
        title = f"{written} on {target.machine}, {target.release.name}"
        click.echo(title if findings else f"{title}: TensorRT reads every graph")
        alike: dict[tuple[str, str, str], list[str]] = {}  # nodes with the same problem share a line
        for f in findings:
            alike.setdefault((f.graph, f.rule, f.problem), []).append(f.node)
        for (graph, rule, problem), nodes in alike.items():
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            click.echo(f"  {graph}{f', {nodes[0]}{more}' if nodes[0] else ''}: {problem} [{rule}]")
        if findings:
            click.echo(f"  the {findings[0].dialect!r} dialect is written for {findings[0].release}")
    if as_json:
        say_json({"bundle": str(bundle.folder), "findings": found})
    if count := sum(map(len, found.values())):
        raise BundleError(f"{count} findings, see above; build from the dialect named there")
