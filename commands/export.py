"""vtx-export: bundles from checkpoints. It parses, calls and prints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vtx.commands.shared.bundles import READING, export_with_bar
from vtx.commands.shared.options import (
    PRECISION,
    Depth,
    DepthType,
    joined,
    need_exporter,
    option,
    options,
    size_of,
)
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.terminal.console import command, end_on_sigterm, note, say_json
from vtx.tools.common.hub import check_hub_id

if TYPE_CHECKING:
    from vtx.exporter.bundling.options import ExportOptions, MeasuredArithmetic
    from vtx.runtime.bundle.spec.manifest import BundleRelease
    from vtx.tools.data.items import Data


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """The options of vtx-export."""

    model: str
    ks: tuple[int, ...] | Literal["auto"]
    precision: str | None
    vision_precision: str | None
    head_precision: str | None
    int4_block: int | None
    int8_block: int | None
    bits: float | None
    kv_precision: str | None
    max_context: int | None
    out: Path | None
    chat_template: Path | None
    tower: str | None
    allow_pickle: bool
    gates: Path | None
    calibration: str | None
    images: Path | None
    allow_changed_answers: bool
    activation_aware: bool
    arithmetic: str
    dialects: tuple[str, ...]
    reductions: tuple[str, ...]
    text_tower: str | None
    retain: float | None
    max_memory: int | None
    stage_layers: int | None
    downsample: str | None
    cameras: tuple[str, ...]
    force: bool
    as_json: bool
    sign: Path | None
    release: str | None
    until: str | None

    @property
    def demo(self) -> bool:
        return self.model == "demo"

    @property
    def one_k(self) -> bool:
        """True if a calibration chooses K."""
        return self.ks == "auto" and self.gates is None


def _chosen_ks(
    context: click.Context, option: click.Parameter, given: tuple[tuple[Depth, ...], ...]
) -> tuple[int, ...] | Literal["auto"]:
    """None prebuilt, "auto" for every K with a gate, or numbers; these do not mix."""
    depths = joined(context, option, given)
    if depths == (None,):
        return ()
    if depths == ("auto",):
        return "auto"
    numbers = tuple(depth for depth in depths if isinstance(depth, int))
    if len(numbers) < len(depths):
        raise click.BadParameter("none and auto stand alone; name numbers like 8,16, or one of these")
    return numbers


@command(
    epilog="vtx-export --k 16 --precision fp16\n"
    "vtx-export --model llava-hf/llava-1.5-7b-hf --k 16,24 --precision fp16 --out llava-7b\n"
    "vtx-export --model ./my-llava --k none --precision fp32 --max-context 2048"
)
@options(
    "model",
    option(
        "--k ks",
        ("none",),
        "First layer without vision tokens, at least 2. Several K share one set of weights; the first is the default.",
        type=DepthType(several=True),
        multiple=True,
        callback=_chosen_ks,
        metavar="N|N,M,...|auto|none",
    ),
    option("--precision", PRECISION, "Precision of the decoder weights [default: fp16; a quantised checkpoint's own]."),
    "vision_precision",
    "head_precision",
    "int4_block",
    "int8_block",
    "bits",
    option("--kv-precision", str, "Precision of K and V: fp32, fp16 or int8 [default: fp16; fp32 for fp32]."),
    option(
        "--max-context",
        int,
        "KV slots for prompt and answer [default: what the largest image, a question and "
        "an answer need, at least 4096, up to the model's limit].",
    ),
    option("--out", Path, "Output directory [default: vtx-MODEL-kN-PRECISION]."),
    "chat_template",
    "tower",
    "allow_pickle",
    option("--gates", Path, "Gates from vtx-train-gate; --k auto uses all of them."),
    option(
        "--calibration",
        str,
        "Questions for --k auto, --retain and --activation-aware, in the format of "
        "vtx-calibrate; --k auto also accepts the directory of an earlier calibration.",
        metavar="DATA",
    ),
    "images",
    option(
        "--allow-changed-answers",
        bool,
        "Accept the K of --k auto if fewer than 90% of the answers stay the same, "
        "or if that is unknown, weights whose KL from the checkpoint is above 1 nat, and --k or --reduce for a model "
        "that reads documents.",
    ),
    option(
        "--activation-aware",
        bool,
        "With int4 or int8: scale the decoder's channels to minimise the rounding "
        "error on the questions of --calibration [for the demo: scenes].",
    ),
    option(
        "--arithmetic",
        "auto",
        "auto: measure in two minutes how far integer weights, and bf16 and int8 arithmetic "
        "where OpenVINO is the faster engine, are from the checkpoint; narrower arithmetic that is as near as f32 "
        "becomes the default. measured: whatever the engine and the time, on the questions of --calibration (else "
        "texts and scenes); f32: never.",
        type=click.Choice(["auto", "measured", "f32"]),
    ),
    option(
        "--dialect dialects",
        str,
        "Graph dialects: ort (always), ort-cuda for onnxruntime on CUDA, trt for "
        "TensorRT, trt10 for JetPack 6's TensorRT, plain for OpenVINO [default: all].",
        metavar="ort,...",
        callback=lambda _, __, value: DIALECTS if value is None else tuple(dict.fromkeys(value.split(","))),
    ),
    option(
        "--reduce reductions",
        str,
        "Token reduction, e.g. mustdrop:192 or lsm+fastv:k=2,ratio=0.5; repeat for "
        "more variants over the same weights. The first is the default.",
        multiple=True,
        metavar="SPEC",
    ),
    option(
        "--text-tower",
        str,
        "Directory or Hugging Face id of the vision tower's CLIPModel, whose text tower cdpruner:text=tower needs.",
        metavar="CLIP",
    ),
    option(
        "--retain",
        float,
        "Scale the thresholds of the first --reduce to keep this many vision tokens, averaged "
        "over layers and the questions of --calibration [for the demo: scenes].",
        metavar="TOKENS",
    ),
    option(
        "--max-memory",
        str,
        "Refuse the export if its predicted memory exceeds this, e.g. 2GB.",
        callback=size_of,
        metavar="SIZE",
    ),
    option(
        "--stage-layers",
        int,
        "Most decoder layers in a graph: fewer take less memory where engines are built "
        "[default: as K and the reductions cut it].",
    ),
    option(
        "--downsample",
        str,
        "Patches per image token of MiniCPM-V 4.6: 16x, or 4x for four times the tokens [default: the checkpoint's].",
        metavar="16x|4x",
    ),
    option(
        "--cameras",
        str,
        "Camera names of a robot policy, in training order.",
        metavar="NAME,...",
        callback=lambda _, __, value: tuple(filter(None, map(str.strip, (value or "").split(",")))),
    ),
    option("--force", bool, "Replace an existing bundle."),
    option("--json as_json", bool, "Print the bundle's contents as one JSON object, like vtx-inspect."),
    option(
        "--sign", Path, "Sign the bundle with this Ed25519 key (PEM), for vtx-run --require-signature.", metavar="KEY"
    ),
    option(
        "--release",
        str,
        "Release number of the signed bundle; devices refuse numbers below the highest they have run.",
        metavar="NAME=N",
    ),
    option(
        "--until",
        str,
        "Last valid day of the signed release (UTC); devices refuse it afterwards.",
        metavar="YYYY-MM-DD",
    ),
    record=ExportSettings,
)
def export(settings: ExportSettings) -> None:
    """Export a checkpoint to a bundle, with the decoder split at K, ready for vtx-run.

    An interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    need_exporter()
    from vtx.exporter.bundling.predict import check_memory
    from vtx.exporter.bundling.prepare import load_template, plan_export
    from vtx.exporter.bundling.staging import check_target
    from vtx.runtime.bundle.seal import SigningKey

    if settings.out is not None:
        check_target(settings.out.expanduser().absolute(), settings.force)
    key = SigningKey.load(settings.sign) if settings.sign else None
    release = _numbered(settings.release, settings.until, signed=key is not None)
    template = load_template(settings.chat_template) if settings.chat_template else None
    _check_questions(settings)
    options = _options(settings, template, release)
    if settings.demo:
        note("exporting the built-in demo model; --model exports a Hugging Face id or a directory")
    elif not os.path.exists(settings.model):
        check_hub_id(settings.model)
    note(READING)
    plan = plan_export(options)
    check_memory(plan.prediction, settings.max_memory)
    depth = options.ks if isinstance(options.ks, str) else "-".join(map(str, options.ks)) or "none"
    out = settings.out or Path(f"vtx-{plan.name}-k{depth}-{plan.precisions.decoder}")
    folder = export_with_bar(plan, out, key, force=settings.force)
    if options.calibration and options.calibration.warning:
        note(f"warning: {options.calibration.warning}")
    if settings.as_json:
        from vtx.runtime.bundle.bundle import Bundle
        from vtx.runtime.report.inspect import describe

        say_json(describe(Bundle.open(folder)))


def _check_questions(settings: ExportSettings) -> None:
    """Raise click's UsageError for questions without a use, or a permission for what cannot happen."""
    from vtx.runtime.precision import PRECISIONS

    uses = (settings.one_k, settings.retain is not None, settings.activation_aware, settings.arithmetic == "measured")
    if settings.calibration is not None and not any(uses):
        raise click.UsageError(
            "--calibration chooses one K, thresholds, factors or arithmetic; it goes with --k auto without --gates, "
            "--retain, --activation-aware or --arithmetic measured"
        )
    if settings.images is not None and settings.calibration is None:
        raise click.UsageError("--images has no effect without --calibration; leave it out")
    parts = filter(None, (settings.precision, settings.vision_precision, settings.head_precision))
    integers = settings.kv_precision == "int8" or any(PRECISIONS[part].bits for part in parts)
    calibrated = settings.calibration is not None and settings.one_k
    dropping = not settings.demo and not settings.one_k and (settings.ks or settings.reductions)
    if settings.allow_changed_answers and not (integers or calibrated or dropping):
        raise click.UsageError(
            "--allow-changed-answers is about the K of --k auto --calibration DATA, about integer weights, K and V, "
            "and about --k and --reduce for a model that reads documents; leave it out"
        )


def _options(settings: ExportSettings, template: str | None, release: BundleRelease | None) -> ExportOptions:
    """The options of the exporter, with the questions that they need; a calibration that they ask for is made."""
    from vtx.exporter.bundling.activation_aware import SAMPLES as AWARE_SAMPLES
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.tools.fit.retain import SAMPLES as RETAIN_SAMPLES
    from vtx.tools.fit.retain import Retain

    s = settings
    retain = None if s.retain is None else Retain(s.retain, _questions(s, "--retain counts on", RETAIN_SAMPLES))
    aware = _questions(s, "--activation-aware measures", AWARE_SAMPLES) if s.activation_aware else None
    arithmetic = _arithmetic(s)
    choice = None
    if s.calibration is not None and s.one_k:
        from vtx.commands.calibrate import calibrated

        reading = ExportOptions(template=template, tower=s.tower, allow_pickle=s.allow_pickle, downsample=s.downsample)
        choice = calibrated(s.calibration, s.images, s.model, reading)
    return ExportOptions(
        s.model,
        (choice.k,) if choice else s.ks,
        s.precision,
        s.max_context,
        template,
        s.gates,
        choice,
        s.dialects,
        s.reductions,
        s.vision_precision,
        s.head_precision,
        s.kv_precision,
        retain,
        aware,
        s.text_tower,
        s.tower,
        s.allow_pickle,
        s.int4_block,
        s.int8_block,
        s.allow_changed_answers,
        arithmetic,
        release,
        s.cameras,
        s.downsample,
        s.stage_layers,
        s.bits,
    )


def _questions(settings: ExportSettings, purpose: str, samples: int) -> Data:
    """The questions of --calibration, for the demo model scenes if it is left out."""
    from vtx.tools.data.items import SCENES, read_data

    if settings.calibration is None and not settings.demo:
        raise click.UsageError(f"{purpose} questions about images; name some with --calibration DATA, or scenes")
    return read_data(settings.calibration or SCENES, settings.images, samples)


def _arithmetic(settings: ExportSettings) -> MeasuredArithmetic | None:
    """The measurement of narrower arithmetic; None if it is left out."""
    from vtx.exporter.bundling.fidelity import SAMPLES
    from vtx.exporter.bundling.options import MeasuredArithmetic
    from vtx.tools.data.items import read_data

    if settings.arithmetic == "f32":
        return None
    questions = None
    if settings.calibration is not None and not settings.one_k:
        questions = read_data(settings.calibration, settings.images, SAMPLES)
    return MeasuredArithmetic(questions, settings.arithmetic == "measured", settings.max_memory)


def _numbered(release: str | None, until: str | None, *, signed: bool) -> BundleRelease | None:
    """The release that --release NAME=N and --until describe."""
    from vtx.runtime.bundle.spec.manifest import BundleRelease
    from vtx.runtime.errors import BundleError

    if release is None:
        if until is not None:
            raise click.UsageError("--until is the end of a release; add --release NAME=N")
        return None
    named, _, number = release.rpartition("=")
    if not (named and number.isdecimal() and len(number) < 16 and int(number)):
        raise click.UsageError(f"--release is {release!r:.60}; it must be a name and a number, e.g. kitchen=7")
    if not signed:
        raise click.UsageError("--release has no effect without --sign; add it")
    try:
        return BundleRelease(named, int(number), until)
    except BundleError as e:
        raise click.UsageError(f"--until is {until!r:.60}; it must be a day, e.g. 2027-06-30") from e
