"""vtx-doctor. It parses, calls and prints; no library of the exporter is needed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.options import named_once, option, options
from vtx.runtime.errors import BundleError, DeviceError, RequestError
from vtx.runtime.terminal.console import bar, command, note, say_json, say_report, table
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.card import Card
    from vtx.runtime.report.doctor import BundleReport


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """The options of vtx-doctor."""

    bundle: str | None
    named: str | None
    loading: Loading
    compare: str | None
    gpu: Path | None
    as_json: bool
    write_traces: Path | None
    check_traces: Path | None


@command(
    epilog="vtx-doctor\nvtx-doctor vtx-demo-k16-fp16\nvtx-doctor vtx-demo-k16-fp16 --compare ort,tensorrt\n"
    "vtx-doctor vtx-demo-k16-fp16 --compare ort,plain --json"
)
@click.argument("bundle", type=click.Path(), required=False)
@options(
    "positional",
    "device",
    "compute",
    "require_signature",
    option(
        "--compare",
        str,
        "Compare each graph between two dialects on onnxruntime (ort, ort-cuda, plain, trt, "
        "trt10) or two devices (openvino, cuda, tensorrt), and report the first difference beyond "
        "tolerance.",
        metavar="A,B",
    ),
    option(
        "--gpu gpu",
        Path,
        "Use the NVIDIA GPU step by step, with a BUNDLE also its engines, and write what each "
        "step gave to a file to send with a report.",
        metavar="FILE",
    ),
    option("--json as_json", bool, "Print one JSON object."),
    option(
        "--write-traces",
        Path,
        "Run every kind of case and write ids, masks, slots, positions and logits.",
        metavar="DIR",
    ),
    option("--check-traces", Path, "Check traces from another runtime or device against this one.", metavar="DIR"),
    record=DoctorSettings,
)
def doctor(settings: DoctorSettings) -> None:
    """Check this machine and list the models that fit, or check a bundle: its files, then its golden vectors."""
    bundle = named_once(settings.bundle, settings.named)
    _check_together(settings, bundle)
    if settings.gpu is not None:
        _use_gpu(settings.gpu, bundle)
    elif bundle is None:
        _machine(as_json=settings.as_json)
    elif settings.compare is not None:
        _compare(bundle, settings.compare, settings.loading, as_json=settings.as_json)
    elif settings.write_traces:
        _write_traces(bundle, settings.write_traces, settings.loading)
    elif settings.check_traces:
        _check_traces(bundle, settings.check_traces, settings.loading, as_json=settings.as_json)
    else:
        _check_bundle(bundle, settings.loading, as_json=settings.as_json)


def _check_together(settings: DoctorSettings, bundle: str | None) -> None:
    """Raise click's UsageError for options that do not go together."""
    traces = settings.write_traces or settings.check_traces
    loading = settings.loading
    if bundle is None and traces:
        raise click.UsageError("--write-traces and --check-traces need a BUNDLE")
    if bundle is None and settings.compare is None and loading != Loading():
        raise click.UsageError("--device, --compute and --require-signature need a BUNDLE")
    if sum(map(bool, (settings.write_traces, settings.check_traces, settings.compare, settings.gpu))) > 1:
        raise click.UsageError("--write-traces, --check-traces, --compare and --gpu are mutually exclusive")
    if settings.compare is not None and (bundle is None or (loading.device, loading.compute) != ("auto", None)):
        raise click.UsageError(
            "--compare needs a BUNDLE, and names its devices itself: leave out --device and --compute"
        )


def _write_traces(folder: str, traces: Path, loading: Loading) -> None:
    from vtx.runtime.report.traces.record import write_traces

    with bar(in_bytes=("checksums",)) as progress:
        index = write_traces(loading.load(Path(folder)), traces, progress)
    questions = sum(len(case.questions) for case in index.cases)
    click.echo(
        f"wrote {len(index.cases)} cases of {questions} questions to {traces}, on {index.device} in {index.compute}"
    )


def _check_bundle(folder: str, loading: Loading, *, as_json: bool) -> None:
    """Check the files, then the golden vectors. Raises BundleError if one differs."""
    from vtx.runtime.bundle.card import read_card
    from vtx.runtime.report.doctor import check_bundle
    from vtx.runtime.report.inspect import fidelity_lines
    from vtx.runtime.strict import json_value
    from vtx.tools.bench.machine import describe

    bundle = _check_files(folder, loading, as_json=as_json)
    card = read_card(bundle)
    report = check_bundle(folder, loading.device, loading.compute, loading.require_signature)
    if as_json:
        say_json({**report.to_dict(), "altered": [], **({} if card is None else {"card": json_value(card)})})
    else:
        click.echo(f"checksums: all {report.files} files are as exported")
        if card is not None:
            _show_card(card)
        table("against the plain PyTorch reference", ["quantity", "difference", "limit", "", ""], _rows(report))
    if report.failed:
        fix = "export again, or report this with the table"
        if any(check.tied for check in report.checks):
            fix = "its router may have chosen other experts: install the [openvino] extra and run this again"
        raise BundleError(f"{', '.join(report.failed)} differ beyond the limit; {fix}")
    if not as_json:
        for line in fidelity_lines(bundle.manifest):
            click.echo(line)
        click.echo(f"{report.device} in {report.compute}: {report.why}; processor: {describe().cpu}")
        if report.expected is not None:
            click.echo(report.expected.in_words())
        if report.unasked is not None:
            note(f"a question about a picture cannot be asked: {report.unasked}")
        click.echo(f"OK: the bundle computes what its weights say, on {report.device} in {report.compute}")


def _show_card(card: Card) -> None:
    from vtx.runtime.bundle.bundle import CARD
    from vtx.tools.bench.machine import describe
    from vtx.tools.fit.report import card_tables

    say_report(card_tables(card))
    if card.cpu != describe().cpu:
        note(f"the times of {CARD} were measured on another processor; run vtx-fit here for this one's")


def _machine(*, as_json: bool) -> None:
    from vtx.runtime.report.doctor import look_at_machine
    from vtx.runtime.units import size
    from vtx.tools.estimate.fits import SHOWN, fits_here
    from vtx.tools.tensorrt.support import gpu_cost

    report = look_at_machine()
    fits = [] if report.problems else fits_here(report.device, report.cpu_device, gpu_cost(report.device))
    if as_json:
        say_json({**report.to_dict(), "fits": [entry.to_dict() for entry in fits]})
    else:
        facts = [[fact.name, fact.value if fact.ok else f"PROBLEM: {fact.value}"] for fact in report.facts]
        table("this machine", ["", ""], facts)
        devices = [[state.device, "yes" if state.usable else "no", state.detail] for state in report.devices]
        table("devices", ["--device", "answers here", ""], devices)
        for entry in fits:
            title = f"models that fit into {size(entry.usable)} on {entry.device}, by calculation (vtx-plan)"
            rows = [[model, *map(str, precisions)] for model, precisions in entry.models.items()]
            table(title, ["model", *SHOWN], rows)
    if report.problems:
        raise DeviceError("vtx cannot run here yet: " + "; ".join(report.problems))


def _use_gpu(file: Path, bundle: str | None) -> None:
    from vtx.runtime.report.gpu import failures, gpu_report
    from vtx.runtime.strict import json_value

    report = gpu_report(bundle)
    try:
        file.write_text(json.dumps(json_value(report), indent=1), encoding="utf-8")
    except OSError as e:
        raise RequestError(
            f"cannot write {file} ({e.strerror}); name a file in a directory that you may write to"
        ) from e
    note(f"wrote {file}")
    if failed := failures(report):
        raise DeviceError("; ".join(f"{step}: {reason}" for step, reason in failed.items()))


def _check_traces(folder: str, traces: Path, loading: Loading, *, as_json: bool) -> None:
    from vtx.runtime.report.doctor import check_traces

    with bar(in_bytes=("checksums",)) as progress:
        report = check_traces(folder, traces, loading.device, loading.compute, loading.require_signature, progress)
    if as_json:
        say_json(report.to_dict())
    else:
        table(f"{traces} against {report.device}", ["case", "difference", "limit", "", ""], _rows(report))
    if report.failed:
        raise BundleError(f"{len(report.failed)} of {len(report.checks)} checks failed, first: {report.failed[0]}")
    if not as_json:
        click.echo(f"all {len(report.checks)} checks passed, on {report.device} in {report.compute}")


def _check_files(folder: str, loading: Loading, *, as_json: bool) -> Bundle:
    """Open the bundle. Raises BundleError if a file is not as it was exported."""
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.report.doctor import altered_files

    opened = Bundle.open(folder, check=False, key=loading.key)
    with bar(in_bytes=("checksums",)) as progress:
        altered = altered_files(opened, progress)
    for problem in altered:
        note(problem)
    if altered:
        if as_json:
            say_json({"bundle": str(opened.folder), "altered": altered})
        raise BundleError(f"{len(altered)} of {len(opened.manifest.files)} files are not as exported; export again")
    return opened


def _compare(folder: str, compare: str, loading: Loading, *, as_json: bool) -> None:
    from vtx.runtime.report import compare as comparison

    sources = comparison.parse_sources(compare)
    bundle = _check_files(folder, loading, as_json=as_json)
    graphs = list(comparison.compare(bundle, *sources))
    first = comparison.first_difference(graphs)
    if as_json:
        say_json({"bundle": str(bundle.folder), **comparison.to_dict(sources, graphs)})
    else:
        rows = [
            [graph.graph, w.tensor, f"{w.difference:.1e}", f"{w.limit:.1e}", "ok" if w.passed else "BEYOND"]
            for graph, w in ((graph, graph.worst) for graph in graphs)
        ]
        title = (
            f"{sources[1]} against {sources[0]}: the first output of each graph beyond its limit, or the nearest to it"
        )
        table(title, ["graph", "output", "difference", "limit", ""], rows)
    if first:
        size = f"{first.difference:.1e} of its largest value" if math.isfinite(first.difference) else "NaN or infinite"
        raise BundleError(
            f"{sources[1]} differs from {sources[0]} first in {first.graph}, output {first.tensor}: by {size}, "
            f"the limit is {first.limit:.1e}; build or export that graph again, or report this with the table"
        )
    if not as_json:
        click.echo(f"every graph of {sources[1]} agrees with {sources[0]} within the limits")


def _rows(report: BundleReport) -> list[list[str]]:
    return [
        [c.name, f"{c.difference:.2e}", f"{c.limit:.1e}", "ok" if c.passed else "FAILED", c.note] for c in report.checks
    ]
