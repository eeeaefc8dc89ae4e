"""The commands. They parse, call and print; heavy imports stand inside them."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from vtx.runtime.errors import DeviceError, VtxError

if TYPE_CHECKING:
    from vtx.exporter.choose.calibrate import CalibrationOptions
    from vtx.exporter.choose.report import Choosing
    from vtx.exporter.choose.source import Source
    from vtx.exporter.export import Plan
    from vtx.runtime.model import AnswerStream, Conversation, Options

INTERRUPTED = 130


class Command(click.Command):
    """A click command whose VtxErrors are one line on stderr and exit code 1, and Ctrl-C is 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VtxError as e:
            _fail(ctx, " ".join(str(e).split()), 1)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", INTERRUPTED)
        except MemoryError:
            _fail(ctx, "out of memory; use a smaller precision, a smaller --max-context, or another machine", 1)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write_text(line)


def _fail(ctx: click.Context, message: str, code: int) -> None:
    click.echo(f"{ctx.info_name}: {message}", err=True)
    ctx.exit(code)


def _note(message: str) -> None:
    click.echo(message, err=True)


def _k_at_export(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...] | str:
    if value == "none":
        return ()
    if value == "auto":
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a number, a list like 8,16, auto, or none") from e


def _k_at_run(_: click.Context, __: click.Parameter, value: str | None) -> int | str:
    if value is None:
        return "default"
    if value in ("none", "auto"):
        return value
    try:
        return int(value)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a number, auto, or none") from e


_command = functools.partial(click.command, cls=Command, context_settings={"help_option_names": ["-h", "--help"]})


# --- vtx-export -----------------------------------------------------------------------------------


@_command(
    epilog="vtx-export --k 16 --precision fp16\n"
    "vtx-export --model llava-hf/llava-1.5-7b-hf --k 16,24 --precision fp16 --out llava-7b\n"
    "vtx-export --model ./my-llava --k none --precision fp32 --max-context 2048"
)
@click.option("--model", default="demo", show_default=True, help="Directory or Hugging Face id; demo: built in.")
@click.option(
    "--k", "ks", default="none", show_default=True, callback=_k_at_export, metavar="N|N,M,...|auto|none",
    help="First layer without vision tokens, from 2. Several share one set of weights; the first is the default.",
)  # fmt: skip
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16"]), default="fp16", show_default=True, help="Of the weights."
)
@click.option(
    "--max-context", type=int, help="KV slots for prompt and answer [default: 4096, at most the model's own]."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="The bundle's directory [default: vtx-MODEL-kN-PRECISION]."
)
@click.option("--chat-template", type=click.Path(path_type=Path), help="A Jinja file, for a checkpoint without one.")
@click.option("--gates", type=click.Path(path_type=Path), help="Gates from vtx-train-gate; --k auto takes all of them.")
@click.option(
    "--calibration", metavar="DATA",
    help="For --k auto: questions as vtx-calibrate takes them, scenes, or the folder of an earlier calibration.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a bundle that stands at --out.")
def export(
    model: str, ks: tuple[int, ...] | str, precision: str, max_context: int | None, out: Path | None,
    chat_template: Path | None, gates: Path | None, calibration: str | None, force: bool,
) -> None:  # fmt: skip
    """Make a bundle from a LLaVA checkpoint: the decoder cut at K, ready for vtx-run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    exporter = _exporter()
    template = exporter.load_template(chat_template) if chat_template else None
    if calibration is not None and (ks != "auto" or gates is not None):
        raise click.UsageError("--calibration chooses one K; it goes with --k auto and without --gates")
    chosen = _calibrated(model, calibration, template) if calibration is not None else None
    ks = (chosen["k"],) if chosen else ks
    options = exporter.ExportOptions(model, ks, precision, max_context, template, gates, chosen)
    if model == exporter.DEMO:
        _note("exporting the built-in demo model; --model takes a Hugging Face id or a directory with another")
    plan = exporter.plan_export(options)
    for warning in plan.gates.warnings if plan.gates else ():
        _note(f"warning: {warning}")
    depth = ks if isinstance(ks, str) else "-".join(map(str, ks)) or "none"
    _export(exporter, plan, out or Path(f"vtx-{plan.name}-k{depth}-{precision}"), force=force)


def _exporter() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what is wrong with a model we say ourselves
    try:
        import vtx.exporter.export as exporter
    except ImportError as e:
        raise DeviceError(f'exporting needs {e.name}; pip install "vtx-edge[export]"') from e
    return exporter


def _export(exporter: Any, plan: Plan, out: Path, *, force: bool) -> Path:
    """Export with a forecast before, a bar during, and the measured figures after."""
    import time

    from vtx.exporter.predict import peak_memory
    from vtx.runtime.units import size

    started, forecast = time.monotonic(), plan.prediction
    linked = f", {size(forecast.linked)} of it linked or copied unchanged" if forecast.linked else ""
    _note(f"predicted: {size(forecast.disk)} of disk{linked}; {size(forecast.export_memory)} of memory to export,")
    _note(
        f"           {size(forecast.run_memory)} to run on a CPU, which computes in fp32 and expands the weights to it"
    )
    with _bar() as report:
        bundle = exporter.run_export(plan, out, force=force, report=report)
    weighed = sum(record.bytes for record in bundle.manifest.files.values())
    seconds = time.monotonic() - started
    _note(f"measured:  {size(weighed)} of disk, {size(peak_memory())} of memory, {seconds:.1f} s")
    _remember(bundle.folder)
    depth = ", ".join(map(str, plan.ks)) or "none"
    _note(f'made {bundle.folder} (K = {depth}); ask it with: vtx-run --bundle {out} image.jpg "question"')
    return Path(bundle.folder)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr with the time that is left, one task a phase."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done)

        yield report


# --- vtx-run --------------------------------------------------------------------------------------


@_command(
    epilog='vtx-run image.jpg "What color is the circle?"\n'
    'vtx-run image.jpg "How many shapes are there?" "Where is the star?" --k 16 --json\n'
    'cat image.jpg | vtx-run - "Is there a red star?"\n'
    'vtx-run a.jpg --image b.jpg "Which picture shows a star?"\n'
    'vtx-run --text-only "Who are you?"'
)
@click.argument("words", nargs=-1, required=True, metavar="IMAGE QUESTION [QUESTION ...]")
@click.option(
    "--bundle", type=click.Path(), envvar="VTX_BUNDLE", help="[default: $VTX_BUNDLE, else the last one exported]"
)
@click.option("--k", callback=_k_at_run, metavar="N|auto|none", help="A prebuilt K [default: the bundle's].")
@click.option("--gate-threshold", type=float, default=0.5, show_default=True, help="With --k auto: exit above this.")
@click.option("--image", "more", multiple=True, type=click.Path(), help="One more image in the same prompt.")
@click.option("--text-only", is_flag=True, help="There is no IMAGE; all words are questions.")
@click.option("--chat", is_flag=True, help="The questions are turns of one conversation, not independent.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per question on stdout, and nothing else.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on past end tokens, to --max-new-tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", type=int, help="For the same answer again when the temperature is above 0.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu", help="Where to compute.")
@click.option("--threads", type=int, help="[default: all cores]")
@click.option("--force", is_flag=True, help="Load also where the free memory looks too small.")
def run(
    words: tuple[str, ...], bundle: str | None, k: int | str, gate_threshold: float,
    more: tuple[str, ...], text_only: bool, chat: bool,
    as_json: bool, max_new_tokens: int, ignore_eos: bool, temperature: float, top_p: float, top_k: int,
    seed: int | None, device: str, threads: int | None,
    force: bool,
) -> None:  # fmt: skip
    """Answer questions about an image. Several questions reuse the image."""
    images, questions = ([], list(words)) if text_only else (list(words[:1]), list(words[1:]))
    if not questions:
        raise click.UsageError('no question given: vtx-run image.jpg "question"')
    from vtx.runtime.model import Options, load
    from vtx.runtime.sampling import Sampling

    options = Options(max_new_tokens, ignore_eos, Sampling(temperature, top_p, top_k, seed), gate_threshold)
    model = load(_find_bundle(bundle), device=device, threads=threads, force=force)
    if device == "auto" and not as_json:
        _note(f"{model.manifest.model.name} on {model.backend.device}, {model.manifest.precision} weights")
    with model.open([_image(name) for name in [*images, *more]]) as conversation:
        for stream in _streams(conversation, questions, k, options, chat=chat):
            _show(stream, as_json=as_json)


def _image(name: str) -> str | BinaryIO:
    return sys.stdin.buffer if name == "-" else name


def _streams(
    conversation: Conversation, questions: Sequence[str], k: int | str, options: Options, *, chat: bool
) -> Iterator[AnswerStream]:
    turns = conversation.chat(k) if chat else None
    for question in questions:
        yield turns.stream(question, options) if turns else conversation.stream(question, k, options)


def _show(stream: AnswerStream, *, as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(stream.read().to_dict(), ensure_ascii=False))
        return
    for piece in stream:
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
    if stream.answer.stopped == "context":
        _note("the answer ends here because the context is full; export with a larger --max-context for longer ones")


def _find_bundle(named: str | None) -> Path:
    """The bundle to use: the one named, else the one exported last, else the demo, exported now."""
    if named:
        return Path(named)
    if last := _remembered():
        if os.path.isfile(last / "vtx.json"):  # unlike Path.is_file it raises nothing
            return last
        _note(f"the bundle exported last, {last}, is gone")
    exporter = _exporter()
    out = _home("XDG_CACHE_HOME", ".cache") / "vtx" / "demo-k16-fp16"
    if not (out / "vtx.json").is_file():
        _note("no bundle yet: exporting the built-in demo model; vtx-export --model makes one of your own")
        _export(exporter, exporter.plan_export(exporter.ExportOptions(ks=(16,))), out, force=True)
    return out


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def _state_file() -> Path:
    return _home("XDG_STATE_HOME", ".local/state") / "vtx" / "last-bundle"


def _remembered() -> Path | None:
    try:
        return Path(os.fsdecode(_state_file().read_bytes().strip()))
    except OSError:
        return None


def _remember(folder: Path) -> None:
    try:
        _state_file().parent.mkdir(parents=True, exist_ok=True)
        _state_file().write_bytes(os.fsencode(folder))
    except OSError:
        _note(f"could not note this bundle as the last one; name it with --bundle {folder}")


# --- vtx-inspect ----------------------------------------------------------------------------------


@_command(epilog="vtx-inspect vtx-demo-k16-fp16\nvtx-inspect vtx-demo-k16-fp16 --json")
@click.argument("bundle", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def inspect(bundle: str, as_json: bool) -> None:
    """Show what is in a bundle: stages, variants, precision, sizes, KV bytes per K."""
    from vtx.runtime.bundle import Bundle
    from vtx.runtime.inspect import TEXT_TOKENS, describe

    facts = describe(Bundle.open(bundle))
    if as_json:
        import json

        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    from vtx.runtime.units import size

    model = facts["model"]
    click.echo(f"{facts['bundle']}: {model['name']}, {facts['precision']} weights, {facts['kv_dtype']} KV cache")
    click.echo(
        f"{model['family']}, {model['layers']} layers of {model['hidden']}, {model['heads']} heads on "
        f"{model['kv_heads']} key/value heads of {model['head_dim']}, {model['vision_tokens']} tokens an image"
    )
    whole, weights = size(facts["bytes"]["all"]), size(facts["bytes"]["weights"])
    click.echo(f"context {facts['max_context']}; {whole}, {weights} of it weights")
    stages = [[f"{s['first']}..{s['last']}", s["graph"], size(s["graph_bytes"])] for s in facts["stages"]]
    _table("stages", ["layers", "graph", "graph size"], stages)
    variants = [
        [str(v["k"] or "none") + (" (default)" if v["k"] == facts["default_k"] else ""), str(v["full_layers"]),
         size(v["kv_bytes_one_image"]), size(v["kv_bytes_full_context"])]
        for v in facts["variants"]
    ]  # fmt: skip
    _table("KV cache", ["K", "full layers", f"one image, {TEXT_TOKENS} text tokens", "full context"], variants)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


# --- vtx-doctor -----------------------------------------------------------------------------------


@_command(epilog="vtx-doctor\nvtx-doctor vtx-demo-k16-fp16")
@click.argument("bundle", type=click.Path(), required=False)
def doctor(bundle: str | None) -> None:
    """Check this machine, or a bundle: its checksums, then its golden vectors computed again."""
    from vtx.runtime.machine import look

    if bundle is None:
        found = look()
        _table("this machine", ["what", "found"], [[f.name, f.value if f.ok else f"PROBLEM: {f.value}"] for f in found])
        problems = [f.name for f in found if not f.ok]
        if problems:
            raise DeviceError(f"vtx cannot run here yet: see {', '.join(problems)} above")
        return
    _check_bundle(bundle)


def _check_bundle(folder: str) -> None:
    from vtx.runtime.bundle import Bundle
    from vtx.runtime.errors import BundleError
    from vtx.runtime.golden import check_golden
    from vtx.runtime.model import load

    opened = Bundle.open(folder, check=False)
    total, done = sum(record.bytes for record in opened.manifest.files.values()), 0
    with _bar() as report:

        def hashed(count: int) -> None:
            nonlocal done
            done += count
            report("checksums", done, total)

        wrong = [problem for _, problem in opened.verify(hashed) if problem]
    for problem in wrong:
        _note(problem)
    if wrong:
        raise BundleError(f"{len(wrong)} of {len(opened.manifest.files)} files are not as exported; export again")
    click.echo(f"checksums: all {len(opened.manifest.files)} files are as exported")
    checks = list(check_golden(load(folder)))
    rows = [[c.name, f"{c.difference:.2e}", f"{c.limit:.0e}", "ok" if c.passed else "FAILED", c.note] for c in checks]
    _table("against the plain PyTorch reference", ["what", "difference", "limit", "", ""], rows)
    failed = [c.name for c in checks if not c.passed]
    if failed:
        raise BundleError(f"{', '.join(failed)} differ beyond the limit; export again, or report this with the table")
    click.echo("the bundle computes what its checkpoint says")


# --- vtx-plan -------------------------------------------------------------------------------------


def _ks_to_plan(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, ...]:
    try:
        return tuple(None if part == "none" else int(part) for part in value.split(",")) if value else ()
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a number, none, or a list like none,8,16") from e


@_command(
    epilog="vtx-plan --model llava-1.5-7b\n"
    "vtx-plan --model llava-1.5-7b --sequence 642 --text 66 --k 17 --json\n"
    "vtx-plan --model llava-next-7b --precision int4 --profile orin-nx-16\n"
    "vtx-plan --model vtx-demo-k16-fp16 --plot plan.png"
)
@click.option(
    "--model", required=True, metavar="NAME|FOLDER", help="A known name, a checkpoint (its config.json), or a bundle."
)
@click.option("--sequence", type=int, help="Tokens of the prompt [default: one image and --text].")
@click.option("--text", type=int, default=64, show_default=True, help="Tokens of it that are not of images.")
@click.option(
    "--k", "ks", callback=_ks_to_plan, metavar="N|none|N,M,...",
    help="First layer without vision tokens, counted from 1 [default: none and a spread].",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, help="Of the weights; may be given again.",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]), show_default="all",
)  # fmt: skip
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Of the answer, for the peak memory.")
@click.option("--profile", metavar="NAME", help="A device: does it fit, and an estimate of the time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it as well.")
def plan(
    model: str, sequence: int | None, text: int, ks: tuple[int | None, ...], precisions: tuple[str, ...],
    max_new_tokens: int, profile: str | None, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Say what a model will cost: arithmetic, weights, KV cache, memory, per K and precision."""
    from vtx.exporter.planning.plan import PRECISIONS, Workload, find_profile, make_plan
    from vtx.exporter.planning.sizes import find_size

    device = None if profile is None else find_profile(profile)
    size = find_size(model)
    image = 0 if size.vision is None else size.vision.image_tokens
    work = Workload(text, image if sequence is None else sequence - text, max_new_tokens)
    found = make_plan(size, work, ks, precisions or PRECISIONS, device)
    if plot is not None:
        from vtx.exporter.planning.plot import plot_plan

        plot_plan(found, plot)
    if as_json:
        import json

        click.echo(json.dumps(found, ensure_ascii=False))
        return
    _show_plan(found)
    if plot is not None:
        _note(f"drew {plot}")


def _show_plan(found: dict[str, Any]) -> None:
    from vtx.runtime.units import size

    device = found["profile"]
    click.echo(
        f"{found['model']['name']}: {found['parameters'] / 1e9:.3g} billion parameters; a prompt of "
        f"{found['text_tokens']} text and {found['vision_tokens']} vision tokens, {found['max_new_tokens']} new ones"
    )
    click.echo("weights: " + ", ".join(f"{name} {size(count)}" for name, count in found["weights_bytes"].items()))
    rows = [
        [str(d["k"] or "none"), str(d["full_layers"]), f"{d['calflops'] / 1e12:.3g} T ({d['calflops_ratio']:.1%})",
         f"{d['total_flops'] / 1e12:.3g} T ({d['total_ratio']:.1%})"]
        for d in found["depths"]
    ]  # fmt: skip
    _table("arithmetic of the prompt", ["K", "full layers", "calflops", "total"], rows)
    heads, rows = ["K", "precision", "KV cache", "peak memory"], []
    if device:
        heads += ["fits", "vision", "prefill", "per token"]
    for depth in found["depths"]:
        for name, memory in depth["precisions"].items():
            row = [str(depth["k"] or "none"), name, size(memory["kv_bytes"]), size(memory["peak_bytes"])]
            if device:
                row += ["yes" if memory["fits"] else "NO"]
                row += [f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms" for ms in memory["latency_ms"].values()]
            rows.append(row)
    _table(f"memory on {device['name']}" if device else "memory", heads, rows)
    if device:
        click.echo(f"{device['power_mode']}, {size(device['usable_bytes'])} usable; times are {found['estimate']}")


# --- vtx-calibrate --------------------------------------------------------------------------------


@_command(
    epilog="vtx-calibrate --samples 200\n"
    "vtx-calibrate questions.jsonl --images photos --model llava-hf/llava-1.5-7b-hf --max-accuracy-drop 1\n"
    "vtx-calibrate --bundle vtx-demo-k16-fp16 --attention --json"
)
@click.argument("data", default="scenes", metavar="[DATA]")
@click.option("--model", default="demo", show_default=True, help="Directory or Hugging Face id; demo: built in.")
@click.option("--bundle", type=click.Path(path_type=Path), help="A bundle to measure instead.")
@click.option("--images", type=click.Path(path_type=Path), help="The images' folder [default: the data file's].")
@click.option("--samples", type=int, default=20, show_default=True, help="Items to measure, drawn from DATA.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of that draw.")
@click.option("--eta", type=float, default=0.003, show_default=True, help="Take the first K with a mean KL below this.")
@click.option(
    "--max-accuracy-drop", type=float, metavar="POINTS",
    help="Take instead the smallest K so near to the accuracy without withdrawal.",
)  # fmt: skip
@click.option("--k-from", type=int, help="The first K to measure [default: 5].")
@click.option(
    "--max-new-tokens", type=int, default=16, show_default=True,
    help="Of the model's own answers. 0: none are made, which takes the memory of a layer, not of the model.",
)  # fmt: skip
@click.option("--batch", type=int, default=8, show_default=True, help="Items that share one reading of the weights.")
@click.option("--attention", is_flag=True, help="Also where the attention goes, layer by layer.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="A Jinja file, for a checkpoint without one.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results [default: vtx-calibration-MODEL].")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object on stdout, and nothing else.")
def calibrate(
    data: str, model: str, bundle: Path | None, images: Path | None, samples: int, seed: int, eta: float,
    max_accuracy_drop: float | None, k_from: int | None, max_new_tokens: int, batch: int, attention: bool,
    chat_template: Path | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure what withdrawal at every K changes, and choose a K by it.

    DATA is a JSONL file of {"image", "question", "answer"}, a folder with one, a file in LLaVA's conversation format,
    or scenes: drawn pictures with questions. An interrupted run goes on where it stopped.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    exporter = _exporter()
    from vtx.exporter.choose.calibrate import CalibrationOptions
    from vtx.exporter.choose.pictures import draw_report
    from vtx.exporter.choose.report import Choosing
    from vtx.exporter.choose.source import open_source

    choosing = Choosing(eta, max_accuracy_drop)
    options = CalibrationOptions(k_from, max_new_tokens, batch, attention)
    source = open_source(model, bundle, exporter.load_template(chat_template) if chat_template else None)
    folder = out or Path(f"vtx-calibration-{source.name}")
    report = _measure(source, data, images, samples, seed, options, choosing, folder)
    try:
        draw_report(report, folder)
    except DeviceError as e:
        _note(f"no plots: {e}; run again then, nothing is measured twice")
    if as_json:
        import json

        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _show_calibration(report)
        click.echo(f"report and plots are in {folder}")


def _measure(
    source: Source, data: str, images: Path | None, samples: int, seed: int, options: CalibrationOptions,
    choosing: Choosing, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Measure with a forecast before and a bar during, and write the report into `folder`."""
    from vtx.exporter.choose.calibrate import calibrate as measure
    from vtx.exporter.choose.calibrate import forecast
    from vtx.exporter.choose.data import read_data
    from vtx.exporter.choose.prompts import prepare
    from vtx.exporter.choose.report import make_report, write_report
    from vtx.exporter.predict import peak_memory
    from vtx.runtime.units import size

    found = read_data(data, images, samples, seed)
    asked, skipped = prepare(source, found, options.max_new_tokens)
    for line in skipped:
        _note(f"skipped {line}")
    need = forecast(source, asked, options)
    _note(
        f"{source.name}: {len(asked)} items of {found.source}; predicted, roughly: {_duration(need.seconds)} and "
        f"{size(need.memory)} of memory"
    )
    with _bar() as report:
        measured = measure(source, found, options, folder, report)
    _note(f"measured: {size(peak_memory())} of memory")
    made = make_report(source, found.source, measured, choosing)
    write_report(made, folder)
    return made


def _duration(seconds: float) -> str:
    for limit, one, unit in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / one:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _show_calibration(report: dict[str, Any]) -> None:
    shares = {"top1": "next token", "agree": "answer", "right": "right"}

    def short(value: float) -> str:
        return f"{value:.2g}" if value >= 0.01 or value == 0 else f"{value:.1e}".replace("e-0", "e-")

    rows = [
        [str(p["k"] or "none"), str(p["full_layers"] or report["model"]["layers"]),
         *(short(p["kl"][name]) for name in ("mean", "low", "high")), short(p["kl_reverse"]["mean"]),
         *(f"{p[name]['share']:.1%}" if p[name] else "-" for name in shares)]
        for p in report["curve"]
    ]  # fmt: skip
    heads = ["K", "full", "KL", "from", "to", "reverse", "token", "answer", "right"]
    _table(f"{report['data']['items']} items of {report['data']['source']}", heads, rows)
    click.echo(
        "K: first layer without vision tokens, behind so many full layers. KL: mean of the next token's,\n"
        f"with its {report['confidence']:.0%} interval. token, answer: as without withdrawal. right: as the data say."
    )
    for choice in report["choices"]:
        click.echo(f"{choice['rule']}: K = {choice['k'] or 'none found'}")
        for note in choice["notes"]:
            click.echo(f"  {note}")
    for point in report["curve"]:
        if point["k"] == report["k"] is not None:
            found = [
                f"{what}: {point[name]['share']:.1%} ({point[name]['low']:.1%}..{point[name]['high']:.1%})"
                for name, what in shares.items()
                if point[name]
            ]
            click.echo(f"chosen: K = {point['k']} ({point['full_layers']} full layers); {', '.join(found)}")


def _calibrated(model: str, data: str, template: str | None) -> dict[str, Any]:
    """The K that a calibration on `data` chooses, or that an earlier one chose, and what to record of it."""
    from vtx.exporter.choose.calibrate import CalibrationOptions
    from vtx.exporter.choose.report import Choosing, chosen, find_report, read_choice
    from vtx.exporter.choose.source import open_source

    source = open_source(model, None, template)
    if earlier := find_report(Path(data)):
        found = read_choice(earlier, source.fingerprint)
    else:
        folder = Path(f"vtx-calibration-{source.name}-next-token")
        found = chosen(_measure(source, data, None, 20, 0, CalibrationOptions(max_new_tokens=0), Choosing(), folder))
    _note(f"calibration chooses K = {found['k']} ({found['rule']}, {found['items']} items of {found['data']})")
    return found


# --- vtx-train-gate -------------------------------------------------------------------------------


@_command(
    epilog="vtx-train-gate --items 1000\n"
    "vtx-train-gate questions.jsonl --images photos --model llava-hf/llava-1.5-7b-hf --items 6650\n"
    "vtx-train-gate llava_mix.json --images images --answers reference --ray-address auto\n"
    "vtx-export --k auto --gates vtx-gates-demo.safetensors"
)
@click.argument("data", default="scenes", metavar="[DATA]")
@click.option("--model", default="demo", show_default=True, help="Directory or Hugging Face id; demo: built in.")
@click.option("--images", type=click.Path(path_type=Path), help="The images' folder [default: the data file's].")
@click.option("--items", type=int, default=1000, show_default=True, help="Items to learn from, drawn from DATA.")
@click.option("--held-out", type=int, default=250, show_default=True, help="Items on other images, to judge by.")
@click.option(
    "--answers", type=click.Choice(["own", "reference"]), default="own", show_default=True,
    help="What must stay the same: the model's own greedy answer, or the one in DATA.",
)  # fmt: skip
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Of the model's own answers.")
@click.option("--batch", type=int, default=8, show_default=True, help="Items that share one reading of the weights.")
@click.option(
    "--alpha", type=float, default=1.03, show_default=True, help="Cross-entropy may rise to this multiple; inf: to any."
)
@click.option("--width", type=int, default=2048, show_default=True, help="Of a gate's hidden layer.")
@click.option("--lr", type=float, default=4e-5, show_default=True, help="Learning rate.")
@click.option("--epochs", type=int, help="[default: as many as show a gate 8,000 items, at least 1]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw and of the gates.")
@click.option("--ray-address", metavar="ADDR", help="Measure on a Ray cluster: host:port, or auto.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for what is measured [default: OUT.work].")
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="The gates; beside them the report [default: vtx-gates-MODEL.safetensors].",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object on stdout, and nothing else.")
def train_gate(
    data: str, model: str, images: Path | None, items: int, held_out: int, answers: str, max_new_tokens: int,
    batch: int, alpha: float, width: int, lr: float, epochs: int | None, seed: int, ray_address: str | None,
    work: Path | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Train gates that decide per question where the image leaves, and judge them against every fixed K.

    DATA is what vtx-calibrate takes. An interrupted run goes on where it stopped; other options of training measure
    nothing again.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _exporter()
    from vtx.exporter.choose.gate_training import FitOptions
    from vtx.exporter.choose.gate_work import MeasureOptions
    from vtx.exporter.choose.train_gate import TrainOptions, default_out, train_gates

    measuring = MeasureOptions(answers, max_new_tokens, batch)  # type: ignore[arg-type]  # click has checked it
    fitting = FitOptions(alpha, width, lr, epochs, seed)
    options = TrainOptions(model, data, images, items, held_out, measuring, fitting, ray_address)
    target = out or default_out(model)
    with _bar() as progress:
        report = train_gates(options, target, work or target.with_suffix(".work"), progress)
    for line in report["skipped"]:
        _note(f"skipped {line}")
    if "plot" in report:
        _note(f"no plot: {report['plot']}")
    if as_json:
        import json

        click.echo(json.dumps(report, ensure_ascii=False))
        return
    _show_gates(report)
    click.echo(f"gates are in {target}, the report beside them; vtx-export --k auto --gates {target}")


def _show_gates(report: dict[str, Any]) -> None:
    def row(name: str, found: dict[str, Any], rival: str = "") -> list[str]:
        accuracy = "-" if found["accuracy"] is None else f"{found['accuracy']:.1%}"
        flops = f"{found['total_flops'] / 1e9:.3g} G"
        return [name, f"{found['full_layers']:.2f}", f"{found['agreement']:.1%}", rival, accuracy, flops]

    exits = report["gates"][0]["exits"]
    rows = [
        row(f"gates above {found['threshold']:g}", found, f"{found['fixed_at_equal_cost']['agreement']:.1%}")
        for found in report["gates"]
    ]
    rows += [row(f"K = {found['k'] or 'none'}", found) for found in report["fixed"]]
    heads = ["", "full layers", "same answer", "best fixed K there", "right answer", "prompt FLOPs"]
    _table(f"{report['items']} items held out", heads, rows)
    _table("K that the gates chose above 0.5", ["K", "items"], [[k, str(n)] for k, n in exits.items() if n])
    click.echo(report["verdict"])


# --- vtx ------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vtx-edge")
def main() -> None:
    """LLaVA-type models as split engine graphs, visual tokens withdrawn in depth.

    Each command stands alone as well: vtx-export, vtx-run, vtx-inspect, vtx-doctor.
    """


for _name, _item in (("export", export), ("run", run), ("inspect", inspect), ("doctor", doctor)):
    main.add_command(_item, _name)
main.add_command(plan, "plan")
main.add_command(calibrate, "calibrate")
main.add_command(train_gate, "train-gate")

__all__ = ["calibrate", "doctor", "export", "inspect", "main", "plan", "run", "train_gate"]
