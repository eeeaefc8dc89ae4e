"""vtx-bench: latency and memory of a bundle. It parses, calls and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtx.commands.shared.bundles import find_bundle
from vtx.commands.shared.options import FILE, option, options
from vtx.runtime.errors import DeviceError
from vtx.runtime.terminal.console import WideTable, bar, command, end_on_sigterm, note, say_json, say_report
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model
    from vtx.runtime.bundle.spec.manifest import Manifest
    from vtx.tools.bench.ceilings.ceilings import Ceilings
    from vtx.tools.bench.measure import Bench, BenchOptions, K


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of vtx-bench."""

    bundle: str | None
    ks: tuple[K, ...]
    rest: str | None
    image: str | None
    video: str | None
    frames: int | None
    question: str | None
    prompt_tokens: int | None
    new_tokens: int
    repeats: int
    warmup: int
    loading: Loading
    as_json: bool
    target: Path | None


# Writes a report, as the options of output say, from its object and its tables.
Write = Callable[[dict[str, Any], Sequence[str | WideTable]], None]


@command(
    epilog="vtx-bench\n"
    "vtx-bench --bundle llava-7b --k none,17,9 --image photo.jpg --question 'What is on the table?' --out out.json\n"
    "vtx-bench --prompt-tokens 640 --new-tokens 128 --repeats 15 --threads 4"
)
@options(
    "bundle",
    "ks",
    option(
        "--rest",
        str,
        "Image tokens that stay from each numbered K on, a share or a number [default: none].",
        metavar="N%|N",
    ),
    option("--image", click.Path(), "Image to ask about [default: a drawn scene]."),
    option("--video", click.Path(), "Video to ask about instead of an image."),
    option("--frames", int, "Frames sampled from the video [default: the bundle's].", metavar="N"),
    option("--question", str, "Question to ask [default: What is in the picture?]."),
    option("--prompt-tokens", int, "Pad the prompt to this many tokens, image included."),
    option("--new-tokens", 64, "Tokens per answer; EOS is ignored."),
    option("--repeats", 5, "Measured rounds; each covers all K."),
    option("--warmup", 1, "Unmeasured rounds before them."),
    "device",
    "compute",
    "threads",
    "max_tiles",
    "max_pixels",
    option("--json as_json", bool, "Print one JSON object instead of tables."),
    option("--out target", FILE, "Also write all results to this JSON file.", metavar="FILE.json"),
    record=BenchSettings,
)
def bench(settings: BenchSettings) -> None:
    """Measure a bundle at each K: latency, memory, and the share of this machine's peak.

    The K take turns within one run, so that other load on the machine falls on all of them. Ctrl-C ends it early and
    keeps what was measured. vtx-eval compares the methods of a bundle.
    """
    end_on_sigterm()
    _check(settings)
    from vtx.runtime.host.machine import cores
    from vtx.tools.common.files import check_folder, write_json

    if settings.target:
        check_folder(settings.target)
    loading = settings.loading
    if loading.threads is None:
        loading = replace(loading, threads=cores())

    def write(report: dict[str, Any], parts: Sequence[str | WideTable]) -> None:
        if settings.as_json:
            say_json(report)
        else:
            say_report(parts)
        if settings.target:
            write_json(settings.target, report)

    options = _options(settings, loading.threads or 1)
    model = loading.load(find_bundle(settings.bundle, settings.ks))
    interrupted = _measure(model, options, _chosen(settings.ks, model.manifest), write)
    if interrupted:
        raise KeyboardInterrupt


def _check(settings: BenchSettings) -> None:
    """Raise click's UsageError for options that do not go together."""
    if settings.rest is not None and settings.ks and not any(isinstance(k, int) for k in settings.ks):
        raise click.UsageError("--rest is what stays from K on; name one or more with --k")
    if settings.question is not None and settings.prompt_tokens is not None:
        raise click.UsageError("--question and --prompt-tokens are mutually exclusive")
    if settings.image and settings.video:
        raise click.UsageError("--image and --video are mutually exclusive")
    if settings.frames is not None and not settings.video:
        raise click.UsageError("--frames goes with --video")


def _options(settings: BenchSettings, threads: int) -> BenchOptions:
    """The question and its repetitions; by default about a drawn scene."""
    from vtx.runtime.report.golden import QUESTION, golden_image
    from vtx.runtime.vision.video import Video
    from vtx.tools.bench.measure import BenchOptions

    picture: Any = settings.image
    if settings.video:
        picture = Video(settings.video, settings.frames)
    elif not picture:
        scene = golden_image()
        picture = scene.resize((max(scene.size),) * 2)  # of which no crop cuts anything, so that no note says so
    question = QUESTION if settings.question is None else settings.question
    return BenchOptions(
        picture,
        question,
        settings.prompt_tokens,
        settings.new_tokens,
        settings.repeats,
        settings.warmup,
        threads,
        settings.rest,
    )


def _measure(model: Model, options: BenchOptions, ks: tuple[K, ...], write: Write) -> bool:
    """Latency and memory at each K, with a forecast before and a bar during; True if interrupted."""
    from vtx.tools.bench.measure import Bench
    from vtx.tools.bench.report import make_report
    from vtx.tools.bench.tables import report_tables

    bench = Bench(model, options, ks)
    note(f"{model.manifest.model.name} on {_device_line(model)}; predicted: about {bench.probe():.0f} s")
    ceilings = _ceilings(bench)
    with bar() as show:
        result = bench.run(ceilings, show)
    report = make_report(bench, result)
    write(report.to_dict(), report_tables(report))
    return result.interrupted


def _device_line(model: Model) -> str:
    return f"{model.backend.device} ({model.loaded.why}) in {model.backend.compute}"


def _chosen(ks: tuple[K, ...], manifest: Manifest) -> tuple[K, ...]:
    """Each requested K once; else none, every prebuilt K, and the gates if there are any."""
    return tuple(dict.fromkeys(ks)) or (None, *manifest.variants, *(["auto"] if manifest.gates else []))


def _ceilings(bench: Bench) -> Ceilings | None:
    """The limits of the machine, if it computes on a CPU."""
    from vtx.tools.bench.ceilings.ceilings import GEMM, VISION_GEMM, Ceilings
    from vtx.tools.bench.ceilings.products import DEVICES, Kind

    backend = bench.model.backend
    manifest = bench.model.manifest
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
