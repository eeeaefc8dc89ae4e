"""vtx-calibrate and vtx-train-gate. They parse, call and print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vtx.commands.shared.options import given, need_exporter, option, options
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json, table

if TYPE_CHECKING:
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.calibration.calibrate import CalibrationOptions
    from vtx.exporter.calibration.source import OpenedModel
    from vtx.tools.calibration.choosing import Choosing
    from vtx.tools.calibration.gates import Judgement, Outcome
    from vtx.tools.calibration.report import CalibrationReport
    from vtx.tools.common.loading import Loading
    from vtx.tools.data.choice import RecordedChoice
    from vtx.tools.data.items import Data

SAMPLES = 100  # questions measured by default: 96 unchanged answers show 90%


@dataclass(frozen=True, slots=True)
class CalibrateSettings:
    """The options of vtx-calibrate."""

    data: str
    model: str
    tower: str | None
    allow_pickle: bool
    bundle: Path | None
    images: Path | None
    samples: int
    seed: int
    min_kept: float
    max_accuracy_drop: float | None
    eta: float
    k_from: int | None
    rest: str | None
    max_new_tokens: int
    batch: int
    attention: bool
    chat_template: Path | None
    loading: Loading
    out: Path | None
    as_json: bool


@command(
    epilog="vtx-calibrate --samples 200\n"
    "vtx-calibrate questions.jsonl --images photos --model llava-hf/llava-1.5-7b-hf --max-accuracy-drop 1\n"
    "vtx-calibrate --bundle vtx-demo-k16-fp16 --attention --json\n"
    "vtx-calibrate questions.jsonl --images photos --model ./my-llava --rest 10%\n"
    "vtx-calibrate questions.jsonl --images photos --bundle llava-int4 --device auto"
)
@options(
    "data",
    "model",
    "tower",
    "allow_pickle",
    option(
        "--bundle",
        Path,
        "Bundle to measure instead: its weights in float32 or, with --device, its own engine at each prebuilt K.",
    ),
    "images",
    option("--samples", SAMPLES, "Items to measure, sampled from DATA."),
    "seed",
    option(
        "--min-kept",
        90,
        "Choose the smallest K at which at least this share of answers stays the same (lower end "
        "of the confidence interval).",
        type=float,
        metavar="PERCENT",
    ),
    option(
        "--max-accuracy-drop",
        float,
        "Choose the smallest K that loses at most this much accuracy instead.",
        metavar="POINTS",
    ),
    option(
        "--eta", 0.003, "Also report the first K with a mean KL below this. It decides only with --max-new-tokens 0."
    ),
    option("--k-from", int, "First K to measure [default: 5]."),
    option("--rest", str, "Image tokens that stay at each K, a share or a number [default: none].", metavar="N%|N"),
    option(
        "--max-new-tokens",
        16,
        "Maximum tokens of the model's own answers; 0: no answers, which needs the memory "
        "of one layer instead of the model.",
    ),
    option("--batch", 8, "Items per pass over the weights."),
    option("--attention", bool, "Also measure attention per layer."),
    "device",
    "compute",
    "threads",
    "chat_template",
    option("--out", Path, "Output directory [default: vtx-calibration-MODEL, or -BUNDLE]."),
    "report",
    record=CalibrateSettings,
)
def calibrate(settings: CalibrateSettings) -> None:
    """Measure the effect of withdrawal at every K and choose a K.

    DATA is a JSONL file of {"image", "question", "answer"}, a directory with one, a file in LLaVA's conversation
    format, or scenes (drawn pictures with questions). An interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    need_exporter()
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import load_template
    from vtx.exporter.calibration.calibrate import CalibrationOptions
    from vtx.exporter.calibration.source import open_source
    from vtx.tools.calibration.choosing import Choosing
    from vtx.tools.calibration.plots import draw_report
    from vtx.tools.data.items import read_data

    choosing = Choosing(settings.eta, settings.max_accuracy_drop, settings.min_kept)
    options = CalibrationOptions(
        settings.k_from, settings.max_new_tokens, settings.batch, settings.attention, settings.rest
    )
    engine = _engine(settings.bundle, settings.loading, "model", "tower", "allow_pickle", "chat_template")
    if engine is not None and settings.attention:
        raise RequestError("an engine does not give its attention; leave out --attention, or --device and its options")
    template = load_template(settings.chat_template) if settings.chat_template else None
    reading = ExportOptions(template=template, tower=settings.tower, allow_pickle=settings.allow_pickle)
    source = open_source(settings.model, settings.bundle, engine=engine, reading=reading)
    measured = source.name if settings.bundle is None else settings.bundle.expanduser().absolute().name
    folder = settings.out or Path(f"vtx-calibration-{measured}")
    questions = read_data(settings.data, settings.images, settings.samples, settings.seed)
    report = _measure(source, questions, options, choosing, folder)
    try:
        draw_report(report, folder)
    except DeviceError as e:
        note(f"plots skipped: {e}; rerun to draw them, results are cached")
    if settings.as_json:
        say_json(report.to_dict())
    else:
        _show_calibration(report)
        click.echo(f"report and plots are in {folder}")
    if report.warning:
        note(f"warning: {report.warning}; vtx-export accepts this K only with --allow-changed-answers")


def _engine(bundle: Path | None, loading: Loading, *of_checkpoints: str) -> Loading | None:
    """Loading of a bundle to measure as it is deployed; None: it is not. Raises RequestError."""
    engine = [f"--{name}" for name in ("device", "compute", "threads") if given(name)]
    checkpoints = [f"--{name.replace('_', '-')}" for name in of_checkpoints if given(name)]
    if bundle is not None and checkpoints:
        raise RequestError(f"{' and '.join(checkpoints)} cannot be used with --bundle; leave one out")
    if bundle is None and engine:
        raise RequestError(f"{' and '.join(engine)}: only a bundle is measured by its engine; give one with --bundle")
    return loading if engine else None


def _measure(
    source: OpenedModel,
    questions: Data,
    options: CalibrationOptions,
    choosing: Choosing,
    folder: Path,
) -> CalibrationReport:
    """Measure with a prediction of memory before and a bar during, and write the report into `folder`."""
    from vtx.exporter.calibration.calibrate import calibrate as measure
    from vtx.exporter.calibration.calibrate import predict_memory
    from vtx.exporter.reference.prompts import prepare
    from vtx.runtime.units import size
    from vtx.tools.calibration.report import make_report, write_report
    from vtx.tools.common.memory import peak

    prompts, skipped = prepare(source, questions, options.max_new_tokens)
    for line in skipped:
        note(f"skipped {line}")
    memory = predict_memory(source, prompts, options)
    engine = source.calibrated.engine
    by = f" by its engine: {engine}" if engine else ""
    note(f"{source.name}{by}: {len(prompts)} items of {questions.source}; predicted, roughly: {size(memory)} of memory")
    with bar() as report:
        measured = measure(source, questions, options, folder, report)
    note(f"measured: {size(peak() or 0)} of memory")
    result = make_report(source.calibrated, questions.source, measured, choosing, options.rest)
    write_report(result, folder)
    return result


def _short(value: float) -> str:
    return f"{value:.2g}" if value >= 0.01 or value == 0 else f"{value:.1e}".replace("e-0", "e-")


def _show_calibration(report: CalibrationReport) -> None:
    from vtx.tools.data.intervals import CONFIDENCE

    rows = [
        [
            str(p.k or "none"),
            str(p.full_layers or report.model.layers),
            *map(_short, (p.kl.mean, p.kl.low, p.kl.high, p.kl_reverse.mean)),
            *(f"{share.share:.1%}" if share else "-" for share in (p.top1, p.agree, p.right)),
        ]
        for p in report.curve
    ]
    heads = ["K", "full", "KL", "from", "to", "reverse", "token", "answer", "right"]
    rested = "" if report.rest is None else f", with a rest of {report.rest} at each K"
    table(f"{report.data.items} items of {report.data.source}{rested}", heads, rows)
    click.echo(
        "K: first layer without vision tokens, after this number of full layers. KL: mean of the next token's,\n"
        f"with its {CONFIDENCE:.0%} interval. token, answer: as without withdrawal. right: as in the data."
    )
    if len(report.kinds) > 1:
        _show_kinds(report)
    for choice in report.choices:
        outcome, *remarks = choice.notes if choice.k is None else (f"K = {choice.k}", *choice.notes)
        click.echo(f"{choice.rule}: {outcome}")
        for line in remarks:
            click.echo(f"  {line}")
    for p in report.curve:
        if p.k == report.k is not None:
            shares = {"next token": p.top1, "answer": p.agree, "right": p.right}
            cells = [f"{name}: {s.share:.1%} ({s.low:.1%}..{s.high:.1%})" for name, s in shares.items() if s]
            click.echo(f"chosen: K = {p.k} ({p.full_layers} full layers); {', '.join(cells)}")


def _show_kinds(report: CalibrationReport) -> None:
    """The answers kept, or without them right, at each K by the kind of answer, and each kind's own choice."""
    heads = ["K", *(f"{of.kind} ({of.items})" for of in report.kinds)]
    rows = [["chosen", *(f"K = {of.k}" if of.k else "-" for of in report.kinds)]]
    for number, point in enumerate(report.curve[1:], 1):
        shares = [of.curve[number].agree or of.curve[number].right for of in report.kinds]
        rows.append([str(point.k), *(f"{s.share:.0%} ({s.low:.0%}..{s.high:.0%})" if s else "-" for s in shares)])
    table("answers kept, by the kind of answer", heads, rows)


def calibrated(data: str, images: Path | None, model: str, reading: ExportOptions) -> RecordedChoice:
    """The K of a calibration on `data`, or of an earlier one in that directory."""
    from vtx.exporter.calibration.calibrate import CalibrationOptions
    from vtx.exporter.calibration.source import open_source
    from vtx.tools.calibration.choosing import Choosing
    from vtx.tools.calibration.report import chosen, find_report, read_choice
    from vtx.tools.data.items import read_data

    source = open_source(model, reading=reading)
    if earlier := find_report(Path(data)):
        choice = read_choice(earlier, source.fingerprint)
    else:
        folder = Path(f"vtx-calibration-{source.name}-export")
        questions = read_data(data, images, SAMPLES, 0)
        choice = chosen(_measure(source, questions, CalibrationOptions(), Choosing(), folder))
    remark = f"; {choice.kept.share:.1%} of {choice.kept.count} answers stay the same" if choice.kept else ""
    note(f"calibration chooses K = {choice.k} ({choice.rule}, {choice.items} items of {choice.data}){remark}")
    return choice


@dataclass(frozen=True, slots=True)
class GateSettings:
    """The options of vtx-train-gate."""

    data: str
    model: str
    tower: str | None
    allow_pickle: bool
    bundle: Path | None
    images: Path | None
    items: int
    held_out: int
    answers: Literal["own", "reference"]
    max_new_tokens: int
    batch: int
    alpha: float
    width: int
    lr: float
    epochs: int | None
    seed: int
    loading: Loading
    work: Path | None
    out: Path | None
    as_json: bool


@command(
    epilog="vtx-train-gate --items 1000\n"
    "vtx-train-gate questions.jsonl --images photos --model llava-hf/llava-1.5-7b-hf --items 6650\n"
    "vtx-train-gate llava_mix.json --images images --answers reference\n"
    "vtx-export --k auto --gates vtx-gates-demo.safetensors"
)
@options(
    "data",
    "model",
    "tower",
    "allow_pickle",
    option(
        "--bundle",
        Path,
        "Bundle exported with every K, to measure instead: its weights in float32 or, with --device, its own engine.",
    ),
    "images",
    "items",
    option("--held-out", 250, "Items to evaluate on, with other images."),
    option(
        "--answers",
        "own",
        "Answers that must stay the same: the model's own greedy ones, or those in DATA.",
        type=click.Choice(["own", "reference"]),
    ),
    option("--max-new-tokens", 64, "Maximum tokens of the model's own answers."),
    option("--batch", 8, "Items per pass over the weights."),
    option("--alpha", 1.03, "Limit on the increase of cross-entropy, as a factor; inf: none."),
    option("--width", 2048, "Width of a gate's hidden layer."),
    option("--lr", 4e-5, "Learning rate."),
    option("--epochs", int, "[default: enough for 8,000 items per gate, at least 1]"),
    option("--seed", 0, "Seed of sampling and of the gates."),
    "device",
    "compute",
    "threads",
    option("--work", Path, "Directory of the measurements [default: OUT.work]."),
    option(
        "--out",
        Path,
        "Output file of the gates; the report is written next to it [default: vtx-gates-MODEL.safetensors].",
    ),
    "report",
    record=GateSettings,
)
def train_gate(settings: GateSettings) -> None:
    """Train gates that choose K for each question, and compare them with every fixed K.

    DATA has the format of vtx-calibrate. An interrupted run resumes where it stopped; changed training options repeat
    no measurement.
    """
    end_on_sigterm()
    need_exporter()
    from vtx.exporter.gates.fit import FitOptions
    from vtx.exporter.gates.train import GateTraining, TrainOptions, default_out, train_gates
    from vtx.exporter.gates.workdir import MeasureOptions

    measuring = MeasureOptions(settings.answers, settings.max_new_tokens, settings.batch)
    fitting = FitOptions(settings.alpha, settings.width, settings.lr, settings.epochs, settings.seed)
    options = TrainOptions(
        settings.model,
        settings.data,
        settings.images,
        settings.items,
        settings.held_out,
        GateTraining(measuring, fitting),
        settings.tower,
        allow_pickle=settings.allow_pickle,
        bundle=settings.bundle,
        engine=_engine(settings.bundle, settings.loading, "model", "tower", "allow_pickle"),
    )
    target = settings.out or default_out(str(settings.bundle or settings.model))
    with bar() as progress:
        report = train_gates(options, target, settings.work or target.with_suffix(".work"), progress)
    for line in report.skipped:
        note(f"skipped {line}")
    if report.plot:
        note(f"plot skipped: {report.plot}")
    if settings.as_json:
        say_json(report.to_dict())
        return
    _show_gates(report.judgement)
    click.echo(f"gates are in {target}, with the report next to it; vtx-export --k auto --gates {target}")


def _show_gates(judgement: Judgement) -> None:
    def row(name: str, point: Outcome, rival: str = "") -> list[str]:
        accuracy = "-" if point.accuracy is None else f"{point.accuracy:.1%}"
        flops = f"{point.total_flops / 1e9:.3g} G"
        return [name, f"{point.full_layers:.2f}", f"{point.agreement:.1%}", rival, accuracy, flops]

    exits = judgement.gates[0].exits
    rows = [
        row(f"gates above {point.threshold:g}", point, f"{point.fixed_at_equal_cost.agreement:.1%}")
        for point in judgement.gates
    ]
    rows += [row(f"K = {point.k or 'none'}", point) for point in judgement.fixed]
    heads = ["", "full layers", "same answer", "best fixed K there", "right answer", "prompt FLOPs"]
    table(f"{judgement.items} items held out", heads, rows)
    table("K chosen by the gates above 0.5", ["K", "items"], [[k, str(n)] for k, n in exits.items() if n])
    click.echo(judgement.verdict)
