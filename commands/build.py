"""vtx-build: TensorRT engines from a bundle's graphs. It parses, calls and prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import bundle_option
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, table
from vtx.runtime.terminal.last import last_bundle

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.tensorrt.build import EngineOutcome
    from vtx.tools.tensorrt.targets import Target


@command(
    epilog="vtx-build --bundle my-bundle\n"
    "vtx-build --bundle my-bundle --target sm89,sm120\n"
    "vtx-build --bundle my-bundle --target jetson-orin --check"
)
@bundle_option
@click.option(
    "--target", "targets", default="this", show_default=True, metavar="this|sm89,sm120|jetson-orin|...",
    callback=lambda _, __, value: value.split(","),
    help="Machines to build for. Engines for RTX cards are built anywhere, others on the machine that runs them.",
)  # fmt: skip
@click.option("--dialect", help="Dialect of the graphs [default: by the target's TensorRT].")
@click.option("--workspace", type=click.IntRange(min=1), metavar="MiB", help="Device memory for the builder's kernels.")
@click.option(
    "--timing-cache", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="File of kernel timings, read and written, for faster builds. Not for RTX, which measures no kernels.",
)  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Check the graphs against the rules of the target's TensorRT; build nothing."
)
@click.option("--json", "as_json", is_flag=True, help="The engines, or with --check the findings, as one JSON object.")
@click.option("--force", is_flag=True, help="Build even if the free memory looks too small.")
@click.option(
    "--sign", type=click.Path(path_type=Path), metavar="KEY",
    help="Sign the engines with this Ed25519 key (PEM), which must have signed the bundle.",
)  # fmt: skip
def build(
    bundle: str | None, targets: list[str], dialect: str | None, workspace: int | None, timing_cache: Path | None,
    check: bool, as_json: bool, force: bool, sign: Path | None,
) -> None:  # fmt: skip
    """Build TensorRT engines from a bundle's graphs, into its engines/ directory."""
    end_on_sigterm()
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.runtime.units import size
    from vtx.tools.tensorrt.targets import check_libraries, find_target

    key = SigningKey.load(sign) if sign else None
    known = [find_target(name) for name in targets]
    opened = Bundle.open(last_bundle(bundle), key=key.public if key else None)
    for target in known:
        check_libraries(target, building=not check)
    if check:
        _check(opened, known, dialect, as_json=as_json)
        return
    built = {
        target.name: _build(
            opened, target, dialect=dialect, workspace=workspace, timing_cache=timing_cache, key=key, force=force
        )
        for target in known
    }
    if as_json:
        engines = {
            name: [
                {
                    "file": o.record.file, "weights_bytes": o.job.weights, "bytes": o.record.bytes,
                    "seconds": o.built and o.built.seconds, "memory_bytes": o.built and o.built.memory,
                }
                for o in outcomes
            ]
            for name, outcomes in built.items()
        }  # fmt: skip
        say_json({"bundle": str(opened.folder), "engines": engines})
        return
    for name, outcomes in built.items():
        rows = [
            [o.record.file, size(o.job.weights), size(o.record.bytes), *(
                ["kept", ""] if o.built is None else [f"{o.built.seconds:.1f} s", size(o.built.memory)]
            )]
            for o in outcomes
        ]  # fmt: skip
        table(f"engines for {name}", ["engine", "weights", "size", "time", "peak memory"], rows)


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


def _build(
    bundle: Bundle,
    target: Target,
    *,
    dialect: str | None,
    workspace: int | None,
    timing_cache: Path | None,
    key: SigningKey | None,
    force: bool,
) -> list[EngineOutcome]:
    """Build the engines of one target, with a bar."""
    from vtx.runtime.errors import RequestError
    from vtx.runtime.units import size
    from vtx.tools.tensorrt import build as engines
    from vtx.tools.tensorrt.targets import load_tensorrt

    if timing_cache is not None and target.portable:
        raise RequestError(f"{target.release.name} measures no kernels when it builds; leave --timing-cache out")
    module, release = load_tensorrt(target)
    plan = engines.plan_engines(
        bundle, target, release, module.__version__, dialect or release.dialect,
        workspace=None if workspace is None else workspace << 20, timing_cache=timing_cache, key=key,
    )  # fmt: skip
    if not force:
        engines.check_memory(plan)
    note(f"predicted: {size(plan.memory)} of memory at the peak, {len(plan.jobs)} engines for {target.machine}")
    with bar() as report:
        return list(engines.build_engines(plan, report))
