"""vtx-bench: latency, memory and accuracy of a bundle. It parses, calls and prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.commands.export import find_bundle
from vtx.commands.shared.options import FILE, given, need_exporter, option, options
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.terminal.console import WideTable, bar, command, end_on_sigterm, note, say_json, say_report
from vtx.tools.common.loading import Loading

DEMO_KS = (8, 3, 4, 5, 6, 12, 16)  # the first is the one behind reductions
DEMO_REDUCTIONS = (
    "none", "lsm", "cls:keep=0.25", "cls:keep=0.5", "fastv", "fastv:k=2,ratio=0.75", "mustdrop:192", "mustdrop:128",
    "mustdrop:64", "mustdrop:64,tau=off", "mustdrop:gamma=0.05,alpha=0.1,tau=off", "cdpruner:keep=0.25",
    "cdpruner:keep=0.5", "dart:keep=0.25", "dart:keep=0.5", "divprune:keep=0.25", "divprune:keep=0.5",
    "random:keep=0.25", "random:keep=0.5", "visionzip", "visionzip:dominant=0.375,contextual=0.0694",
    "hiprune:keep=0.25,layer=2", "hiprune:keep=0.5,layer=2",
)  # fmt: skip

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model
    from vtx.runtime.bundle.spec.manifest import Manifest
    from vtx.tools.bench.ceilings.ceilings import Ceilings
    from vtx.tools.bench.measure import Bench, BenchOptions, K
    from vtx.tools.data.items import Data


# Writes a report, as the options of output say, from its object, its tables and the function that draws it.
Write = Callable[[dict[str, Any], Sequence[str | WideTable], Callable[[Path], None]], None]


@command(
    epilog="vtx-bench\n"
    "vtx-bench --bundle llava-7b --k none,17,9 --image photo.jpg --question 'What is on the table?' --out out.json\n"
    "vtx-bench --prompt-tokens 640 --new-tokens 128 --repeats 15 --threads 4 --plot out.png\n"
    "vtx-bench --methods --samples 500\n"
    "vtx-bench --methods --budgets 75,50,35,25 --plot methods.png\n"
    "vtx-bench --methods --bundle llava-7b --data questions.jsonl --images photos --out out.json"
)
@options(
    "bundle", "ks",
    option("--image", click.Path(), "Image to ask about [default: a drawn scene]."),
    option("--video", click.Path(), "Video to ask about instead of an image."),
    option("--frames", int, "Frames sampled from the video [default: the bundle's].", metavar="N"),
    option("--question", str, "Question to ask [default: What is in the picture?]."),
    option("--prompt-tokens", int, "Pad the prompt to this many tokens, image included."),
    option("--new-tokens", 64, "Tokens per answer; EOS is ignored."),
    option("--repeats", 5, "Measured rounds; each covers all K."),
    option("--warmup", 1, "Unmeasured rounds before them."),
    option("--methods", bool, "Compare the accuracy and cost of all methods in the bundle instead [default bundle: "
           "the demo]."),
    option("--budgets", str, "With --methods: try several settings of every method that the bundle can run, and "
           "report the best of each within these shares of the unreduced cost.", metavar="PERCENT,..."),
    option("--data", str, "With --methods: questions, in the format of vtx-calibrate [default: "
           "scenes].", metavar="DATA"),
    "images",
    option("--samples", 200, "Questions to ask, sampled from DATA."),
    "device", "compute", "threads", "max_tiles", "max_pixels",
    option("--json as_json", bool, "Print one JSON object instead of tables."),
    option("--out target", FILE, "Also write all results to this JSON file.", metavar="FILE.json"),
    "plot",
)  # fmt: skip
def bench(
    bundle: str | None, ks: tuple[K, ...], image: str | None, question: str | None, prompt_tokens: int | None,
    new_tokens: int, repeats: int, warmup: int, methods: bool, data: str | None, images: Path | None, samples: int,
    loading: Loading, as_json: bool, target: Path | None, plot: Path | None, budgets: str | None, video: str | None,
    frames: int | None,
) -> None:  # fmt: skip
    """Measure a bundle at each K: latency, memory, and the share of this machine's peak.

    The K take turns within one run, so that other load on the machine falls on all of them. Ctrl-C ends it early and
    keeps what was measured. With --methods, every method of the bundle answers the same questions, and each pruning
    method is compared with the withdrawal of the same cost.
    """
    end_on_sigterm()
    if methods:
        if any(value is not None for value in (image, video, question, prompt_tokens)):
            raise click.UsageError(
                "--methods asks the questions of --data; leave out --image, --video, --question, --prompt-tokens"
            )
        if given("repeats") or given("warmup"):
            raise click.UsageError("--methods asks each of its --samples once; leave out --repeats and --warmup")
    elif question is not None and prompt_tokens is not None:
        raise click.UsageError("--question and --prompt-tokens are mutually exclusive")
    elif image and video:
        raise click.UsageError("--image and --video are mutually exclusive")
    elif (data, images, budgets) != (None, None, None) or given("samples"):
        raise click.UsageError(
            "--data, --images, --samples and --budgets go with --methods; time one question with --image and --question"
        )
    if frames is not None and not video:
        raise click.UsageError("--frames goes with --video")
    from vtx.runtime.host.machine import cores
    from vtx.runtime.report.golden import QUESTION, golden_image
    from vtx.runtime.vision.video import Video
    from vtx.tools.bench.ladder import parse_budgets
    from vtx.tools.bench.measure import BenchOptions
    from vtx.tools.common.files import check_folder, write_json
    from vtx.tools.common.plots import figures

    if plot:
        figures()
    for file in filter(None, (target, plot)):
        check_folder(file)
    loading = replace(loading, threads=cores() if loading.threads is None else loading.threads)
    shares = parse_budgets(budgets) if budgets else ()

    def write(report: dict[str, Any], parts: Sequence[str | WideTable], draw: Callable[[Path], None]) -> None:
        say_json(report) if as_json else say_report(parts)
        if target:
            write_json(target, report)
        if plot:
            draw(plot)

    if methods:
        from vtx.tools.data.items import SCENES, read_data

        questions = read_data(data or SCENES, images, samples)
        for line in questions.skipped:
            note(f"skipped {line}")
        model = loading.load(methods_bundle(bundle))
        interrupted = _compare(model, questions, _chosen(ks, model.manifest), new_tokens, loading, write, shares)
    else:
        drawn = golden_image()
        square = drawn.resize((max(drawn.size),) * 2)  # of which no crop cuts anything, so that no note says so
        options = BenchOptions(
            Video(video, frames) if video else image or square, QUESTION if question is None else question,
            prompt_tokens, new_tokens, repeats, warmup, loading.threads or 1,
        )  # fmt: skip
        model = loading.load(find_bundle(bundle, ks))
        interrupted = _measure(model, options, _chosen(ks, model.manifest), write)
    if interrupted:
        raise KeyboardInterrupt


def _measure(model: Model, options: BenchOptions, ks: tuple[K, ...], write: Write) -> bool:
    """Latency and memory at each K, with a forecast before and a bar during; True if interrupted."""
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
    write(report.to_dict(), report_tables(report), partial(draw_report, report))
    return result.interrupted


def _compare(
    model: Model, data: Data, ks: tuple[K, ...], new_tokens: int, loading: Loading, write: Write,
    budgets: tuple[float, ...],
) -> bool:  # fmt: skip
    """Every method on the same questions, with a forecast before and a bar during; True if interrupted."""
    from vtx.runtime.units import counted
    from vtx.tools.bench.compare import make_comparison
    from vtx.tools.bench.ladder import make_ladder
    from vtx.tools.bench.methods import NONE, Method, Trial, find_methods
    from vtx.tools.bench.plots import draw_comparison
    from vtx.tools.bench.tables import comparison_tables

    ladder, lacking = make_ladder(model.manifest, model.backend.dialect, ks) if budgets else ({}, ())
    settings = (method for family in ladder.values() for method in family)
    methods = tuple(dict.fromkeys((Method(None), *settings))) if budgets else find_methods(model.manifest, ks)
    if lacking:
        note(f"left out, since the bundle was not exported for them: {', '.join(lacking)}")
    if not any(spec != NONE for spec in model.manifest.reductions):
        note("this bundle only withdraws image tokens; export it with --reduce to compare other methods")
    trial = Trial(model, data, methods, new_tokens, loading.threads or 1)
    note(
        f"{model.manifest.model.name} on {_device_line(model)}: {counted(len(methods), 'method')} on "
        f"{counted(len(data.items), 'question')} of {data.source}; predicted: about {trial.probe():.0f} s"
    )
    with bar() as show:
        trial.run(show)
    report = make_comparison(trial, ladder, budgets)
    write(report.to_dict(), comparison_tables(report), partial(draw_comparison, report))
    return trial.interrupted


def _device_line(model: Model) -> str:
    return f"{model.backend.device} ({model.loaded.why}) in {model.backend.compute}"


def methods_bundle(named: str | None) -> Path:
    """The bundle whose methods are compared: the one named, else the demo, exported now with all methods."""
    if named:
        return Path(named)
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.policies import parse, to_spec
    from vtx.runtime.process import home

    out = home("XDG_CACHE_HOME", ".cache") / "vtx" / "demo-methods"
    held = tuple[str, ...]()
    with contextlib.suppress(BundleError):  # not there yet, or another version's
        held = Bundle.open(out).manifest.reductions
    if held != tuple(to_spec(parse(spec)) for spec in DEMO_REDUCTIONS):
        note("exporting the built-in demo model with every method; --bundle uses one of your own")
        need_exporter()
        from vtx.exporter.bundling.export import run_export
        from vtx.exporter.bundling.options import ExportOptions
        from vtx.exporter.bundling.prepare import plan_export

        plan = plan_export(ExportOptions(ks=DEMO_KS, reductions=DEMO_REDUCTIONS, dialects=("ort",)))
        with bar() as report:
            run_export(plan, out, force=True, report=report)
    return out


def _chosen(ks: tuple[K, ...], manifest: Manifest) -> tuple[K, ...]:
    """Each requested K once; else none, every prebuilt K, and the gates if there are any."""
    return tuple(dict.fromkeys(ks)) or (None, *manifest.variants, *(["auto"] if manifest.gates else []))


def _ceilings(bench: Bench) -> Ceilings | None:
    """The limits of the machine, if it computes on a CPU."""
    from vtx.tools.bench.ceilings.ceilings import GEMM, VISION_GEMM, Ceilings
    from vtx.tools.bench.ceilings.products import DEVICES, Kind

    backend, manifest = bench.model.backend, bench.model.manifest
    if backend.device not in DEVICES:
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
