"""vtx-bench. It parses, calls and prints; heavy imports stand inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.exporter.commands import find_bundle
from vtx.runtime.console import bar, command, end_on_sigterm, note
from vtx.runtime.errors import DeviceError

CPUS = ("cpu", "openvino")  # devices whose ceilings can be measured here

if TYPE_CHECKING:
    from vtx.exporter.bench.ceilings import Ceilings
    from vtx.exporter.bench.measure import Bench, K
    from vtx.runtime.manifest import Manifest


def _ks(_: click.Context, __: click.Parameter, value: str | None) -> tuple[K, ...]:
    words: dict[str, K] = {"none": None, "auto": "auto"}
    try:
        parts = value.split(",") if value else []
        return tuple(dict.fromkeys(words[part] if part in words else int(part) for part in parts))
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a number, none, auto, or a list like none,17,9") from e


@command(
    epilog="vtx-bench\n"
    "vtx-bench --bundle llava-7b --k none,17,9 --image photo.jpg --question 'What is on the table?' --json out.json\n"
    "vtx-bench --prompt-tokens 640 --new-tokens 128 --repeats 15 --threads 4 --plot out.png"
)
@click.option(
    "--bundle", type=click.Path(), envvar="VTX_BUNDLE", help="[default: $VTX_BUNDLE, else the last one exported]"
)
@click.option("--k", "ks", callback=_ks, metavar="K,K,...", help="Prebuilt K, none, auto [default: all there are].")
@click.option("--image", type=click.Path(), help="[default: a drawn one]")
@click.option("--question", help="[default: What is in the picture?]")
@click.option("--prompt-tokens", type=int, help="Instead: a question so long that prompt and image have so many.")
@click.option("--new-tokens", type=int, default=64, show_default=True, help="Of each answer, end tokens ignored.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Rounds over all K that count.")
@click.option("--warmup", type=int, default=1, show_default=True, help="Rounds before them that do not.")
@click.option("--device", default="auto", show_default=True, help="Where to compute, as vtx-run takes it.")
@click.option("--threads", type=int, help="[default: all cores]")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here, too.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it as well.")
def bench(
    bundle: str | None, ks: tuple[K, ...], image: str | None, question: str | None, prompt_tokens: int | None,
    new_tokens: int, repeats: int, warmup: int, device: str, threads: int | None,
    target: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Measure a bundle at each K: latency, memory, and the share of what this machine can do.

    The K take turns within one run, so that whatever else the machine does falls on all of them. Ctrl-C ends it early
    and keeps what was measured.
    """
    end_on_sigterm()
    if question is not None and prompt_tokens is not None:
        raise click.UsageError("--question and --prompt-tokens both settle the question; give one")
    from vtx.exporter.bench.measure import Bench, Workload
    from vtx.exporter.bench.report import in_tables, make_report
    from vtx.exporter.drawing import figures
    from vtx.runtime.golden import QUESTION, golden_image
    from vtx.runtime.machine import cores
    from vtx.runtime.model import load

    if plot:
        figures()
    threads = threads or cores()
    asked = QUESTION if question is None else question
    work = Workload(image or golden_image(), asked, prompt_tokens, new_tokens, repeats, warmup, threads)
    model = load(find_bundle(bundle), device=device, threads=threads)
    bench = Bench(model, work, ks or _all(model.manifest))
    note(f"{model.manifest.model.name} on {model.backend.device}; predicted: about {bench.probe():.0f} s")
    ceilings = _ceilings(bench)
    with bar() as show:
        found = bench.run(ceilings, show)
    report = make_report(bench, found)
    click.echo(in_tables(report))
    _write(report, target, plot)
    if found.interrupted:
        raise KeyboardInterrupt


def _all(manifest: Manifest) -> tuple[K, ...]:
    """None, every prebuilt K, and the gates where there are any."""
    gated = any(graphs.gates for graphs in manifest.dialects.values())
    return (None, *manifest.variants, *(["auto"] if gated else []))


def _ceilings(bench: Bench) -> Ceilings | None:
    """What the machine can do at the most, where it is a CPU that computes."""
    from vtx.exporter.bench.ceilings import Ceilings

    if bench.model.backend.device not in CPUS:
        return None
    spec, rows = bench.model.manifest.model, bench.tokens(bench.found.question)
    try:
        return Ceilings(rows, spec.hidden, bench.worker.width, bench.work.threads)
    except DeviceError as e:
        note(f"no ceilings: {e}")
        return None


def _write(report: dict[str, Any], target: Path | None, plot: Path | None) -> None:
    from vtx.exporter.bench.picture import draw_report
    from vtx.exporter.files import write_json

    if target:
        write_json(target, report)
    if plot:
        draw_report(report, plot)
