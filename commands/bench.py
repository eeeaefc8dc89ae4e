"""vtx-bench. It parses, calls and prints; heavy imports stand inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.commands.export import find_bundle
from vtx.commands.shared.libraries import exporter
from vtx.commands.shared.options import (
    bundle_option,
    compute_option,
    device_option,
    given,
    max_pixels_option,
    max_tiles_option,
    threads_option,
)
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.terminal.console import WideTable, bar, command, end_on_sigterm, note, say_json, say_report
from vtx.runtime.terminal.depth import DepthType, joined

DEMO_KS = (8, 3, 4, 5, 6, 12, 16)  # the first is the one behind reductions
DEMO_REDUCTIONS = (
    "none", "lsm", "cls:keep=0.25", "cls:keep=0.5", "fastv", "fastv:k=2,ratio=0.75", "mustdrop:192", "mustdrop:128",
    "mustdrop:64", "mustdrop:64,tau=off", "mustdrop:gamma=0.05,alpha=0.1,tau=off", "cdpruner:keep=0.25",
    "cdpruner:keep=0.5", "dart:keep=0.25", "dart:keep=0.5",
)  # fmt: skip

if TYPE_CHECKING:
    from PIL.Image import Image

    from vtx.runtime.api.model import Model
    from vtx.runtime.bundle.spec.manifest import Manifest
    from vtx.tools.bench.ceilings.ceilings import Ceilings
    from vtx.tools.bench.measure import Bench, BenchOptions, K
    from vtx.tools.data.items import Data


@dataclass(frozen=True, slots=True)
class Output:
    """Where a report goes: tables or JSON on stdout, JSON in a file, a plot."""

    as_json: bool
    target: Path | None
    plot: Path | None

    def write(self, report: dict[str, Any], parts: Sequence[str | WideTable], draw: Callable[[Path], None]) -> None:
        from vtx.tools.common.files import write_json

        if self.as_json:
            say_json(report)
        else:
            say_report(parts)
        if self.target:
            write_json(self.target, report)
        if self.plot:
            draw(self.plot)


@command(
    epilog="vtx-bench\n"
    "vtx-bench --bundle llava-7b --k none,17,9 --image photo.jpg --question 'What is on the table?' --out out.json\n"
    "vtx-bench --prompt-tokens 640 --new-tokens 128 --repeats 15 --threads 4 --plot out.png\n"
    "vtx-bench --methods --samples 500\n"
    "vtx-bench --methods --budgets 75,50,35,25 --plot methods.png\n"
    "vtx-bench --methods --bundle llava-7b --data questions.jsonl --images photos --out out.json"
)
@bundle_option
@click.option(
    "--k",
    "ks",
    type=DepthType(several=True),
    multiple=True,
    callback=joined,
    metavar="K,K,...",
    help="Prebuilt K, none, auto [default: all there are].",
)
@click.option("--image", type=click.Path(), help="[default: a drawn one]")
@click.option("--video", type=click.Path(), help="Instead of an image.")
@click.option("--frames", type=int, metavar="N", help="Frames sampled from the video [default: the bundle's].")
@click.option("--question", help="[default: What is in the picture?]")
@click.option("--prompt-tokens", type=int, help="Instead: a question that makes the prompt this long, image included.")
@click.option("--new-tokens", type=int, default=64, show_default=True, help="Of each answer, end tokens ignored.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Rounds over all K that count.")
@click.option("--warmup", type=int, default=1, show_default=True, help="Rounds before them that do not.")
@click.option(
    "--methods", is_flag=True,
    help="Compare instead all methods of the bundle, by accuracy and cost [default bundle: the demo's].",
)  # fmt: skip
@click.option(
    "--budgets", metavar="PERCENT,...",
    help="With --methods: try a ladder of settings of every method that the bundle can run, and name the best of each "
    "within these shares of what no method costs.",
)  # fmt: skip
@click.option("--data", metavar="DATA", help="With --methods: questions as vtx-calibrate takes them [default: scenes].")
@click.option("--images", type=click.Path(path_type=Path), help="The images' folder [default: the data file's].")
@click.option("--samples", type=int, default=200, show_default=True, help="Questions to ask, drawn from DATA.")
@device_option
@compute_option
@threads_option
@max_tiles_option
@max_pixels_option
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object on stdout, and no tables.")
@click.option(
    "--out", "target", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.json",
    help="Write all figures here, too.",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it as well.")
def bench(
    bundle: str | None, ks: tuple[K, ...], image: str | None, question: str | None, prompt_tokens: int | None,
    new_tokens: int, repeats: int, warmup: int, methods: bool, data: str | None, images: Path | None, samples: int,
    device: str, compute: str | None, threads: int | None, as_json: bool, target: Path | None,
    plot: Path | None, budgets: str | None, max_tiles: int | None, max_pixels: int | None, video: str | None,
    frames: int | None,
) -> None:  # fmt: skip
    """Measure a bundle at each K: latency, memory, and the share of what this machine can do.

    The K take turns within one run, so that whatever else the machine does falls on all of them. Ctrl-C ends it early
    and keeps what was measured. With --methods, all that the bundle can do to an image's tokens answers the same
    questions, and each pruning stands beside the withdrawal that costs as much.
    """
    end_on_sigterm()
    if methods:
        _check_methods(image, video, question, prompt_tokens)
    else:
        _check_latency(image, video, question, prompt_tokens, data, images, budgets)
    if frames is not None and not video:
        raise click.UsageError("--frames goes with --video")
    from vtx.runtime.api.load import load
    from vtx.runtime.host.machine import cores
    from vtx.runtime.report.golden import QUESTION, golden_image
    from vtx.runtime.vision.video import Video
    from vtx.tools.bench.ladder import parse_budgets
    from vtx.tools.bench.measure import BenchOptions
    from vtx.tools.common.files import check_folder
    from vtx.tools.common.plots import figures

    if plot:
        figures()
    for file in filter(None, (target, plot)):
        check_folder(file)
    threads = cores() if threads is None else threads
    output, shares = Output(as_json, target, plot), parse_budgets(budgets) if budgets else ()
    if methods:
        questions = _data(data, images, samples)
        model = load(
            methods_bundle(bundle),
            device=device,
            compute=compute,
            threads=threads,
            max_tiles=max_tiles,
            max_pixels=max_pixels,
        )
        interrupted = _compare(model, questions, _chosen(ks, model.manifest), new_tokens, threads, output, shares)
    else:
        text = QUESTION if question is None else question
        shown = Video(video, frames) if video else image or _square(golden_image())
        options = BenchOptions(shown, text, prompt_tokens, new_tokens, repeats, warmup, threads)
        model = load(
            find_bundle(bundle, ks),
            device=device,
            compute=compute,
            threads=threads,
            max_tiles=max_tiles,
            max_pixels=max_pixels,
        )
        interrupted = _measure(model, options, _chosen(ks, model.manifest), output)
    if interrupted:
        raise KeyboardInterrupt


def _check_methods(image: str | None, video: str | None, question: str | None, prompt_tokens: int | None) -> None:
    """Refuse what --methods would not heed."""
    if any(value is not None for value in (image, video, question, prompt_tokens)):
        raise click.UsageError(
            "--methods asks the questions of --data; leave out --image, --video, --question, --prompt-tokens"
        )
    if given("repeats") or given("warmup"):
        raise click.UsageError("--methods asks each of its --samples once; leave out --repeats and --warmup")


def _check_latency(
    image: str | None, video: str | None, question: str | None, prompt_tokens: int | None, data: str | None,
    images: Path | None, budgets: str | None,
) -> None:  # fmt: skip
    """Refuse what contradicts, and what only --methods would heed."""
    if question is not None and prompt_tokens is not None:
        raise click.UsageError("--question and --prompt-tokens both settle the question; give one")
    if image and video:
        raise click.UsageError("--image and --video both settle what is seen; give one")
    if (data, images, budgets) != (None, None, None) or given("samples"):
        raise click.UsageError(
            "--data, --images, --samples and --budgets go with --methods; time one question with --image and --question"
        )


def _square(image: Image) -> Image:
    """A picture of ours loses nothing to a crop, so that no note about one comes."""
    return image.resize((max(image.size),) * 2)


def _measure(model: Model, options: BenchOptions, ks: tuple[K, ...], output: Output) -> bool:
    """Latency and memory at each K, with a forecast before and a bar during; whether it was interrupted."""
    from vtx.tools.bench.measure import Bench
    from vtx.tools.bench.plots import draw_report
    from vtx.tools.bench.report import make_report
    from vtx.tools.bench.tables import report_tables

    bench = Bench(model, options, ks)
    note(f"{model.manifest.model.name} on {_device_line(model)}; predicted: about {bench.probe():.0f} s")
    ceilings = _ceilings(bench)
    with bar() as show:
        result = bench.run(ceilings, show)
    report = make_report(bench, result)
    output.write(report.to_dict(), report_tables(report), partial(draw_report, report))
    return result.interrupted


def _compare(
    model: Model, data: Data, ks: tuple[K, ...], new_tokens: int, threads: int, output: Output,
    budgets: tuple[float, ...],
) -> bool:  # fmt: skip
    """Every method on the same questions, with a forecast before and a bar during; whether it was interrupted."""
    from vtx.runtime.units import counted
    from vtx.tools.bench.compare import make_comparison
    from vtx.tools.bench.ladder import make_ladder
    from vtx.tools.bench.methods import Method, Trial, find_methods
    from vtx.tools.bench.plots import draw_comparison
    from vtx.tools.bench.tables import comparison_tables

    ladder, lacking = make_ladder(model.manifest, model.backend.dialect, ks) if budgets else ({}, ())
    settings = (method for family in ladder.values() for method in family)
    methods = tuple(dict.fromkeys((Method(None), *settings))) if budgets else find_methods(model.manifest, ks)
    if lacking:
        note(f"left out, since the bundle was not exported for them: {', '.join(lacking)}")
    if not any(method.kind == "pruning" for method in methods):
        note("this bundle only withdraws image tokens; export it with --reduce to compare other methods")
    trial = Trial(model, data, methods, new_tokens, threads)
    note(
        f"{model.manifest.model.name} on {_device_line(model)}: {counted(len(methods), 'method')} on "
        f"{counted(len(data.items), 'question')} of {data.source}; predicted: about {trial.probe():.0f} s"
    )
    with bar() as show:
        trial.run(show)
    report = make_comparison(trial, ladder, budgets)
    output.write(report.to_dict(), comparison_tables(report), partial(draw_comparison, report))
    return trial.interrupted


def _device_line(model: Model) -> str:
    return f"{model.backend.device} ({model.why}) in {model.backend.compute}"


def _data(source: str | None, images: Path | None, samples: int) -> Data:
    from vtx.tools.data.items import SCENES, read_data

    data = read_data(source or SCENES, images, samples)
    for line in data.skipped:
        note(f"skipped {line}")
    return data


def methods_bundle(named: str | None) -> Path:
    """The bundle whose methods are compared: the one named, else the demo, exported now with all of them."""
    if named:
        return Path(named)
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.policies import parse, to_spec
    from vtx.runtime.terminal.last import home

    out = home("XDG_CACHE_HOME", ".cache") / "vtx" / "demo-methods"
    held = tuple[str, ...]()
    with contextlib.suppress(BundleError):  # not there yet, or another version's
        held = Bundle.open(out).manifest.reductions
    if held != tuple(to_spec(parse(spec)) for spec in DEMO_REDUCTIONS):
        note("exporting the built-in demo model with every method; --bundle takes one of your own")
        library = exporter()
        plan = library.plan_export(library.ExportOptions(ks=DEMO_KS, reductions=DEMO_REDUCTIONS, dialects=("ort",)))
        with bar() as report:
            library.run_export(plan, out, force=True, report=report)
    return out


def _chosen(ks: tuple[K, ...], manifest: Manifest) -> tuple[K, ...]:
    """Each K that was asked for once; else none, every prebuilt K, and the gates where there are any."""
    return tuple(dict.fromkeys(ks)) or (None, *manifest.variants, *(["auto"] if manifest.gates else []))


def _ceilings(bench: Bench) -> Ceilings | None:
    """What the machine can do at the most, where it is a CPU that computes."""
    from vtx.tools.bench.ceilings.ceilings import GEMM, VISION_GEMM, Ceilings
    from vtx.tools.bench.ceilings.products import GRAPHS, Kind

    backend, manifest = bench.model.backend, bench.model.manifest
    if (backend.device, "float") not in GRAPHS:
        note(f"no ceilings: they are measured for CPUs, and this is {backend.device}")
        return None
    decoder, tower = (
        Kind.of(backend.device, backend.compute, stored) for stored in (manifest.precision, manifest.vision_precision)
    )
    kinds = {GEMM: decoder} if tower == decoder else {GEMM: decoder, VISION_GEMM: tower}
    tokens = bench.tokens(bench.result.question)
    try:
        return Ceilings(kinds, tokens, manifest.model.hidden, bench.counter.width, bench.options.threads)
    except DeviceError as e:
        note(f"no ceilings: {e}")
        return None
