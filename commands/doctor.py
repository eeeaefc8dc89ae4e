"""vtx-doctor. It parses, calls and prints; no library of the exporter is needed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import compute_option, device_option
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.terminal.console import bar, command, note, require_signature_option, say_json, table

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.report.compare import TensorDifference
    from vtx.runtime.report.doctor import BundleReport, MachineReport
    from vtx.tools.estimate.fits import Fits


@command(
    epilog="vtx-doctor\nvtx-doctor vtx-demo-k16-fp16\nvtx-doctor vtx-demo-k16-fp16 --compare ort,tensorrt\n"
    "vtx-doctor vtx-demo-k16-fp16 --compare ort,plain --json"
)
@click.argument("bundle", type=click.Path(), required=False)
@device_option
@compute_option
@click.option(
    "--compare", metavar="A,B",
    help="Instead: compare each graph of two dialects on onnxruntime (ort, plain, trt) or of devices (openvino, cuda, "
    "tensorrt), and say where the first difference beyond tolerance arises.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
@require_signature_option
@click.option(
    "--write-traces", type=click.Path(path_type=Path), metavar="DIR",
    help="Run every kind of case and write what it does: ids, masks, slots, positions, logits.",
)  # fmt: skip
@click.option(
    "--check-traces", type=click.Path(path_type=Path), metavar="DIR",
    help="Judge the traces that another runtime or device wrote by those of this one.",
)  # fmt: skip
def doctor(
    bundle: str | None, device: str, compute: str | None, compare: str | None, as_json: bool,
    require_signature: Path | None, write_traces: Path | None, check_traces: Path | None,
) -> None:  # fmt: skip
    """Check this machine and list what fits, or check a bundle: its files, then its golden vectors computed again."""
    if bundle is None and (write_traces or check_traces):
        raise click.UsageError("traces are those of a bundle; name one")
    if bundle is None and compare is None and (device, compute, require_signature) != ("auto", None, None):
        raise click.UsageError("--device, --compute and --require-signature are about a BUNDLE; name one")
    if sum(map(bool, (write_traces, check_traces, compare))) > 1:
        raise click.UsageError("--write-traces, --check-traces and --compare exclude each other")
    if compare is not None and (bundle is None or (device, compute) != ("auto", None)):
        raise click.UsageError("--compare takes a BUNDLE, and names its devices itself: no --device, no --compute")
    if bundle is None:
        _machine(as_json=as_json)
    elif compare is not None:
        _compare(bundle, compare, require_signature, as_json=as_json)
    elif write_traces:
        _write_traces(bundle, write_traces, device, compute, require_signature)
    elif check_traces:
        _check_traces(bundle, check_traces, device, compute, require_signature, as_json=as_json)
    else:
        _bundle(bundle, device, compute, require_signature, as_json=as_json)


def _machine(*, as_json: bool) -> None:
    from vtx.runtime.report.doctor import look_at_machine
    from vtx.tools.estimate.fits import fits_here

    report = look_at_machine()
    fits = [] if report.problems else fits_here(report.device, report.cpu_device)
    if as_json:
        say_json({**report.to_dict(), "fits": [entry.to_dict() for entry in fits]})
    else:
        _show_machine(report, fits)
    if report.problems:
        raise DeviceError("vtx cannot run here yet: " + "; ".join(report.problems))


def _show_machine(report: MachineReport, fits: list[Fits]) -> None:
    from vtx.runtime.units import size
    from vtx.tools.estimate.fits import PRECISIONS

    facts = [[fact.name, fact.value if fact.ok else f"PROBLEM: {fact.value}"] for fact in report.facts]
    table("this machine", ["", ""], facts)
    devices = [[state.device, "yes" if state.usable else "no", state.detail] for state in report.devices]
    table("devices", ["--device", "answers here", ""], devices)
    for entry in fits:
        rows = [[model, *map(str, fits)] for model, fits in entry.models.items()]
        title = f"models that fit into {size(entry.usable)} on {entry.device}, by calculation (vtx-plan)"
        table(title, ["model", *PRECISIONS], rows)


def _bundle(
    folder: str, device: str, compute: str | None, require_signature: Path | None, *, as_json: bool
) -> None:  # fmt: skip
    from vtx.runtime.report.doctor import check_bundle

    _check_files(folder, require_signature, as_json=as_json)
    report = check_bundle(folder, device, compute, require_signature)
    if as_json:
        say_json({**report.to_dict(), "altered": []})
    else:
        _show_bundle(report)
    if report.failed:
        raise BundleError(
            f"{', '.join(report.failed)} differ beyond the limit; export again, or report this with the table"
        )
    if not as_json:
        click.echo(f"the bundle computes what its checkpoint says, on {report.device} in {report.compute}")


def _write_traces(folder: str, out: Path, device: str, compute: str | None, signature: Path | None) -> None:
    from vtx.runtime.api.load import load
    from vtx.runtime.report.traces.record import write_traces

    model = load(folder, device=device, compute=compute, require_signature=signature)
    with bar() as progress:
        traces = write_traces(model, out, partial(progress, "cases"))
    asked = sum(len(case.questions) for case in traces.cases)
    click.echo(f"wrote {len(traces.cases)} cases of {asked} questions to {out}, on {traces.device} in {traces.compute}")


def _check_traces(
    folder: str, given: Path, device: str, compute: str | None, signature: Path | None, *, as_json: bool
) -> None:
    from vtx.runtime.report.doctor import check_traces

    with bar() as progress:
        report = check_traces(folder, given, device, compute, signature, partial(progress, "cases"))
    if as_json:
        say_json(report.to_dict())
    else:
        table(f"{given} against {report.device}", ["case", "difference", "limit", "", ""], _rows(report))
    if report.failed:
        raise BundleError(f"{len(report.failed)} of {len(report.checks)} checks failed, first: {report.failed[0]}")
    if not as_json:
        click.echo(f"all {len(report.checks)} checks passed, on {report.device} in {report.compute}")


def _check_files(folder: str, require_signature: Path | None, *, as_json: bool) -> Bundle:
    """The opened bundle; BundleError where a file is not as it was exported."""
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import PublicKey
    from vtx.runtime.report.doctor import altered_files

    key = PublicKey.load(require_signature) if require_signature else None
    opened = Bundle.open(folder, check=False, key=key)
    with bar() as progress:
        altered = altered_files(opened, progress)
    for problem in altered:
        note(problem)
    if altered:
        if as_json:
            say_json({"bundle": str(opened.folder), "altered": altered})
        raise BundleError(f"{len(altered)} of {len(opened.manifest.files)} files are not as exported; export again")
    return opened


def _compare(folder: str, compare: str, require_signature: Path | None, *, as_json: bool) -> None:
    from vtx.runtime.report import compare as comparison

    sources = comparison.parse_sources(compare)
    bundle = _check_files(folder, require_signature, as_json=as_json)
    graphs = list(comparison.compare(bundle, *sources))
    first = comparison.first_difference(graphs)
    if as_json:
        say_json({"bundle": str(bundle.folder), **comparison.to_dict(sources, graphs)})
    else:
        rows = [[graph.graph, *_difference(graph.worst)] for graph in graphs]
        title = (
            f"{sources[1]} against {sources[0]}: of each graph the first output beyond its limit, or the nearest to it"
        )
        table(title, ["graph", "output", "difference", "limit", ""], rows)
    if first:
        size = f"{first.difference:.1e} of its largest value" if math.isfinite(first.difference) else "no number"
        raise BundleError(
            f"{sources[1]} differs from {sources[0]} first in {first.graph}, output {first.tensor}: by {size}, "
            f"the limit is {first.limit:.1e}; build or export that graph again, or report this with the table"
        )
    if not as_json:
        click.echo(f"every graph of {sources[1]} computes what {sources[0]} computes, within the limits")


def _difference(worst: TensorDifference) -> list[str]:
    return [worst.tensor, f"{worst.difference:.1e}", f"{worst.limit:.1e}", "ok" if worst.passed else "BEYOND"]


def _rows(report: BundleReport) -> list[list[str]]:
    return [
        [c.name, f"{c.difference:.2e}", f"{c.limit:.1e}", "ok" if c.passed else "FAILED", c.note] for c in report.checks
    ]


def _show_bundle(report: BundleReport) -> None:
    click.echo(f"checksums: all {report.files} files are as exported")
    table("against the plain PyTorch reference", ["quantity", "difference", "limit", "", ""], _rows(report))
