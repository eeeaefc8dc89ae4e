"""vtx-export. It parses, calls and prints; heavy imports stand inside it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.libraries import exporter
from vtx.commands.shared.options import allow_pickle_option, precision_type, tower_option
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, say_json
from vtx.runtime.terminal.depth import Depth, DepthType, joined
from vtx.runtime.terminal.last import home, remember, remembered

DEMO_K = 16  # of the bundle that a first question makes

if TYPE_CHECKING:
    from vtx.exporter.bundling.export import Plan
    from vtx.exporter.bundling.options import ActivationAware
    from vtx.exporter.bundling.retain import Retain
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey
    from vtx.tools.data.items import Data


def _chosen_ks(
    context: click.Context, option: click.Parameter, given: tuple[tuple[Depth, ...], ...]
) -> tuple[int, ...] | str:
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


def _bytes(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB)", value.strip(), re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{value!r} is not a size such as 900MB or 2GB")
    return int(float(match[1]) * {"MB": 10**6, "GB": 10**9}[match[2].upper()])


def _dialects(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    return DIALECTS if value is None else tuple(dict.fromkeys(value.split(",")))


@command(
    epilog="vtx-export --k 16 --precision fp16\n"
    "vtx-export --model llava-hf/llava-1.5-7b-hf --k 16,24 --precision fp16 --out llava-7b\n"
    "vtx-export --model ./my-llava --k none --precision fp32 --max-context 2048"
)
@click.option("--model", default="demo", show_default=True, help="Directory or Hugging Face id; demo: built in.")
@click.option(
    "--k", "ks", default=("none",), show_default=True, type=DepthType(several=True), multiple=True,
    callback=_chosen_ks, metavar="N|N,M,...|auto|none",
    help="First layer without vision tokens, from 2. Several share one set of weights; the first is the default.",
)  # fmt: skip
@click.option("--precision", type=precision_type(), default="fp16", show_default=True, help="Of the decoder's weights.")
@click.option(
    "--vision-precision", type=precision_type(),
    help="Of the tower and projector [default: as --precision; int8 beside int8 and int4].",
)  # fmt: skip
@click.option(
    "--head-precision", type=precision_type(),
    help="Of the output matrix [default: as --precision; int8 beside int8 and int4].",
)  # fmt: skip
@click.option(
    "--int4-block", type=click.Choice(["64", "128"]), default="64", show_default=True,
    help="Weights that share a scale in int4; 128: smaller and faster, a little coarser.",
)  # fmt: skip
@click.option("--kv-precision", help="Of K and V: fp32, fp16 or int8 [default: fp16; fp32 beside fp32].")
@click.option(
    "--max-context", type=int, help="KV slots for prompt and answer [default: 4096, at most the model's own]."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="The bundle's directory [default: vtx-MODEL-kN-PRECISION]."
)
@click.option(
    "--chat-template", type=click.Path(path_type=Path),
    help="A Jinja file, for a checkpoint without one; or one of original LLaVA's by name, as llava_v1.",
)  # fmt: skip
@tower_option
@allow_pickle_option
@click.option("--gates", type=click.Path(path_type=Path), help="Gates from vtx-train-gate; --k auto takes all of them.")
@click.option(
    "--calibration", metavar="DATA",
    help="For --k auto, --retain and --activation-aware: questions as vtx-calibrate takes them, or scenes; for "
    "--k auto also the folder of an earlier calibration.",
)  # fmt: skip
@click.option("--images", type=click.Path(path_type=Path), help="The images' folder [default: --calibration's].")
@click.option(
    "--allow-changed-answers", is_flag=True,
    help="Take the K of --k auto even if fewer than 90% of the answers stay the same, or nobody compared them.",
)  # fmt: skip
@click.option(
    "--activation-aware", is_flag=True,
    help="With int4 or int8: scale the decoder's channels, leaving what it computes, so that rounding loses least on "
    "the questions of --calibration [for the demo: scenes].",
)  # fmt: skip
@click.option(
    "--dialect", "dialects", callback=_dialects, metavar="ort,...",
    help="Operator sets of the graphs: ort always, trt for TensorRT, plain for OpenVINO and others [default: all].",
)  # fmt: skip
@click.option(
    "--reduce", "reductions", multiple=True, metavar="SPEC",
    help="Method that leaves out vision tokens, as mustdrop:192 or lsm+fastv:k=2,ratio=0.5; given again, one more "
    "variant over the same weights. The first is the default.",
)  # fmt: skip
@click.option(
    "--text-tower", metavar="CLIP",
    help="Directory or Hugging Face id of the CLIPModel whose vision tower the LLaVA has: with its text tower, "
    "cdpruner:text=tower is CDPruner as its authors run it.",
)  # fmt: skip
@click.option(
    "--retain", type=float, metavar="TOKENS",
    help="Scale the first --reduce's thresholds so that this many vision tokens stay, mean over layers and over the "
    "questions of --calibration [for the demo: scenes].",
)  # fmt: skip
@click.option(
    "--max-memory", callback=_bytes, metavar="SIZE", help="Refuse an export that is expected to need more, as 2GB."
)
@click.option("--force", is_flag=True, help="Replace a bundle that stands at --out.")
@click.option("--json", "as_json", is_flag=True, help="What vtx-inspect --json says of the bundle, on stdout.")
@click.option(
    "--sign", type=click.Path(path_type=Path), metavar="KEY",
    help="Sign the bundle with this Ed25519 key (PEM), for vtx-run --require-signature.",
)  # fmt: skip
def export(
    model: str, ks: tuple[int, ...] | str, precision: str, vision_precision: str | None, head_precision: str | None,
    kv_precision: str | None, max_context: int | None, out: Path | None, chat_template: Path | None,
    gates: Path | None, calibration: str | None, images: Path | None, dialects: tuple[str, ...],
    reductions: tuple[str, ...], retain: float | None, max_memory: int | None, force: bool, as_json: bool,
    activation_aware: bool, allow_changed_answers: bool,
    sign: Path | None, text_tower: str | None, tower: str | None, allow_pickle: bool, int4_block: str,
) -> None:  # fmt: skip
    """Make a bundle from a LLaVA checkpoint: the decoder cut at K, ready for vtx-run.

    An interrupted run resumes where it stopped.
    """
    end_on_sigterm()
    from vtx.runtime.bundle.seal import SigningKey

    library = exporter()
    if out is not None:
        library.check_target(out.expanduser().absolute(), force)
    key = SigningKey.load(sign) if sign else None
    template = library.load_template(chat_template) if chat_template else None
    one_k = ks == "auto" and gates is None
    if calibration is not None and not one_k and retain is None and not activation_aware:
        raise click.UsageError(
            "--calibration chooses one K, thresholds or factors; it goes with --k auto without --gates, --retain or "
            "--activation-aware"
        )
    if images is not None and calibration is None:
        raise click.UsageError("--images has no effect without --calibration; leave it out")
    if allow_changed_answers and (calibration is None or not one_k):
        raise click.UsageError("--allow-changed-answers is about the K of --k auto --calibration DATA; leave it out")
    demo = model == library.DEMO
    retained = None if retain is None else _retain(retain, calibration, images, demo=demo)
    aware = _aware(calibration, images, demo=demo) if activation_aware else None
    chosen = None
    if calibration is not None and one_k:
        from vtx.commands.calibrate import calibrated

        chosen = calibrated(calibration, images, model, template, tower, allow_pickle=allow_pickle)
    ks = (chosen.k,) if chosen else ks
    options = library.ExportOptions(
        model, ks, precision, max_context, template, gates, chosen, dialects, reductions, vision_precision,
        head_precision, kv_precision, retained, aware, text_tower, tower, allow_pickle, int(int4_block),
        allow_changed_answers,
    )  # fmt: skip
    if demo:
        note("exporting the built-in demo model; --model takes a Hugging Face id or a directory with another")
    plan = library.plan_export(options)
    for line in plan.checkpoint.notes:
        note(line)
    for warning in plan.warnings:
        note(f"warning: {warning}")
    library.check_memory(plan.prediction, max_memory)
    depth = ks if isinstance(ks, str) else "-".join(map(str, ks)) or "none"
    made = export_with_bar(plan, out or Path(f"vtx-{plan.name}-k{depth}-{precision}"), key, force=force)
    if chosen and chosen.warning:
        note(f"warning: {chosen.warning}")
    if as_json:
        from vtx.runtime.bundle.bundle import Bundle
        from vtx.runtime.report.inspect import describe

        say_json(describe(Bundle.open(made)))


def _retain(tokens: float, calibration: str | None, images: Path | None, *, demo: bool) -> Retain:
    from vtx.exporter.bundling.retain import SAMPLES, Retain

    return Retain(tokens, _questions("--retain counts on", calibration, images, SAMPLES, demo=demo))


def _aware(calibration: str | None, images: Path | None, *, demo: bool) -> ActivationAware:
    from vtx.exporter.bundling.activation_aware import SAMPLES
    from vtx.exporter.bundling.options import ActivationAware

    return ActivationAware(_questions("--activation-aware measures", calibration, images, SAMPLES, demo=demo))


def _questions(purpose: str, calibration: str | None, images: Path | None, samples: int, *, demo: bool) -> Data:
    from vtx.tools.data.items import SCENES, read_data

    if calibration is None and not demo:
        raise click.UsageError(f"{purpose} questions about images; name some with --calibration DATA, or scenes")
    return read_data(calibration or SCENES, images, samples)


def _note_predicted(plan: Plan) -> None:
    from vtx.runtime.backends.ort.library import int8_kv_obstacle, onnxruntime_release
    from vtx.runtime.precision import PRECISIONS
    from vtx.runtime.report.inspect import INT8_KV
    from vtx.runtime.units import size

    predicted, p = plan.prediction, plan.precisions
    linked = f", {size(predicted.linked)} of it linked or copied unchanged" if predicted.linked else ""
    note(f"predicted: {size(predicted.disk)} of disk{linked}; {size(predicted.export_memory)} of memory to export,")
    expanded = sorted({part for part in (p.decoder, p.vision, p.head) if PRECISIONS[part].expands})
    wider = f", where {' and '.join(expanded)} weights are expanded to fp32" if expanded else ""
    note(f"           {size(predicted.run_memory)} to run with onnxruntime on a CPU{wider}")
    if p.kv == "int8":
        note(INT8_KV)
        if (release := onnxruntime_release()) and (obstacle := int8_kv_obstacle(release)):
            note(f"warning: to answer with onnxruntime here, {obstacle}")
    for spec in plan.reductions.specs:
        note(f"reduces:   {spec}")


def export_with_bar(plan: Plan, out: Path, sign: SigningKey | None = None, *, force: bool) -> Path:
    """Export with predicted disk and memory before, bars during, and the measured figures after."""
    import time

    from vtx.runtime.units import duration
    from vtx.tools.common.memory import peak

    predicted, started = plan.prediction, time.monotonic()
    _note_predicted(plan)
    with bar(in_bytes=("weights", "checksums")) as progress:
        bundle = exporter().run_export(plan, out, force=force, report=progress, say=note, sign=sign)
    disk = sum(record.bytes for record in bundle.manifest.files.values())
    note(
        f"measured:  {_compared(disk, predicted.disk)} of disk, {_compared(peak() or 0, predicted.export_memory)} of "
        f"memory, {duration(time.monotonic() - started)}"
    )
    if plan.options.retain is not None:
        _show_retained(bundle)
    if scaled := bundle.manifest.record.get("activation_aware"):
        note(f"scaled by the activations of {scaled['items']} items of {scaled['data']}")
    remember(bundle.folder)
    depth = ", ".join(map(str, plan.ks)) or "none"
    asked = f'vtx-run --bundle {shlex.quote(str(out))} image.jpg "question"'
    note(f"made {bundle.folder} (K = {depth}); ask it with: {asked}")
    return Path(bundle.folder)


def _compared(measured: int, predicted: int) -> str:
    """Measured bytes with the prediction, and by how much that was too high or too low."""
    from vtx.runtime.units import size

    error = f", {predicted / measured - 1:+.0%}" if measured else ""
    return f"{size(measured)} (predicted {size(predicted)}{error})"


def _show_retained(bundle: Bundle) -> None:
    retained = bundle.manifest.record["retain"]
    note(
        f"retains:   {retained['found']:.1f} vision tokens for {retained['asked']:g} asked, mean of "
        f"{retained['questions']} questions of {retained['data']}, thresholds times {retained['factor']:.3g}"
    )
    note(f"           {bundle.manifest.reductions[0]}")


def find_bundle(named: str | None, ks: Iterable[Depth] = ()) -> Path:
    """The bundle to use: the one named, else the one exported last, else the demo, exported now.

    `ks` are those that the command was asked for: no demo is exported for a K that it will not have.
    """
    if named:
        return Path(named)
    if last := remembered():
        if os.path.isfile(last / "vtx.json"):  # unlike Path.is_file it raises nothing
            return last
        note(f"the bundle exported last, {last}, is gone")
    out = home("XDG_CACHE_HOME", ".cache") / "vtx" / "demo-k16-fp16"
    if not (out / "vtx.json").is_file():
        if absent := [k for k in ks if k not in (None, "default", DEMO_K)]:
            gates = " --gates FILE (from vtx-train-gate)" if absent[0] == "auto" else ""
            raise click.UsageError(
                f"no bundle yet, and the demo model's, which would be exported now, has only K = none and {DEMO_K}, "
                f"not {absent[0]}; leave out --k, or make a bundle that has it: vtx-export --k {absent[0]}{gates}"
            )
        library = exporter()
        note("no bundle yet: exporting the built-in demo model; vtx-export --model makes one of your own")
        export_with_bar(library.plan_export(library.ExportOptions(ks=(DEMO_K,))), out, force=True)
    return out
