"""The bundle of a command: the one named, the last one, or one that is exported now."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vtx.commands.shared.options import Depth, given, need_exporter
from vtx.runtime.terminal.console import bar, note
from vtx.runtime.terminal.last import remember, remembered
from vtx.tools.common import cache
from vtx.tools.common.hub import check_hub_id

DEMO_K = 16  # of the bundle that a first question makes
DEMO = f"demo-k{DEMO_K}-fp16"
READING = "loading PyTorch and the checkpoint"  # seconds in which nothing else is said

if TYPE_CHECKING:
    from vtx.exporter.bundling.prepare import Plan
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.seal import SigningKey


def export_with_bar(plan: Plan, out: Path, sign: SigningKey | None = None, *, force: bool) -> Path:
    """Export with predicted disk and memory before, bars during, and the measured figures after."""
    from vtx.exporter.bundling.export import run_export
    from vtx.tools.common.memory import peak

    _say_prediction(plan)
    exported_with: int | None = None
    with bar(in_bytes=("weights", "checksums")) as progress:

        def report(phase: str, done: int, total: int) -> None:
            nonlocal exported_with
            if phase == "arithmetic" and exported_with is None:  # the engine's memory comes after the export's own
                exported_with = peak()
            progress(phase, done, total)

        bundle = run_export(plan, out, force=force, report=report, say=note, sign=sign)
    _say_measured(plan, bundle, exported_with or peak() or 0)
    remember(bundle.folder)
    depth = ", ".join(map(str, plan.ks)) or "none"
    name = shlex.quote(str(out))
    k = bundle.manifest.default_k
    note(f'made {bundle.folder} (K = {depth}); ask it with: vtx-run --bundle {name} image.jpg "question"')
    if k is not None and plan.options.calibration is None:
        withdrawn = "where a gate says so" if k == "auto" else f"at K = {k}"
        note(
            f"without a card the image leaves {withdrawn}; for quoted text measure first: vtx-fit {name} --questions "
            "questions.jsonl"
        )
    return Path(bundle.folder)


def _say_prediction(plan: Plan) -> None:
    """Print remarks on the checkpoint, and the predicted disk and memory of export and bundle."""
    from vtx.runtime.backends.engines import ENGINES, EXPANDED
    from vtx.runtime.backends.ort.library import int8_kv_obstacle, onnxruntime_release
    from vtx.runtime.precision import KV_TYPES, PRECISIONS
    from vtx.runtime.report.inspect import INT8_KV
    from vtx.runtime.units import size

    for line in plan.checkpoint.notes:
        note(line)
    for warning in plan.warnings:
        note(f"warning: {warning}")
    predicted = plan.prediction
    p = plan.precisions
    linked = f", {size(predicted.linked)} of it linked or copied unchanged" if predicted.linked else ""
    note(f"predicted: {size(predicted.disk)} of disk{linked}; {size(predicted.export_memory)} of memory to export,")
    engine = ENGINES[predicted.engine]
    expanded = sorted({part for part in (p.decoder, p.vision, p.head) if PRECISIONS[part].expands})
    if engine.compute["f32"] != EXPANDED:
        expanded = []
    wider = f", where {' and '.join(expanded)} weights are expanded to fp32" if expanded else ""
    note(f"           {size(predicted.run_memory)} to run with {engine.title} on a CPU{wider}")
    if plan.options.arithmetic and plan.config.action is None:
        note("           about as much to measure its answers, where that is free; --arithmetic f32 leaves that out")
    if KV_TYPES[p.kv].scaled:
        note(INT8_KV)
        if (release := onnxruntime_release()) and (obstacle := int8_kv_obstacle(release)):
            note(f"warning: to answer with onnxruntime here, {obstacle}")
    for spec in plan.reductions.specs:
        note(f"reduces:   {spec}")


def _say_measured(plan: Plan, bundle: Bundle, memory: int) -> None:
    """Print the measured disk, memory and time beside their prediction, and the fidelity of the bundle."""
    import time

    from vtx.runtime.bundle.spec.names import UNTYPED
    from vtx.runtime.bundle.tensors import float16_overflow
    from vtx.runtime.process import STARTED
    from vtx.runtime.report.inspect import fidelity_lines
    from vtx.runtime.units import duration, size

    def compared(measured: int, predicted: int) -> str:
        error = f", {predicted / measured - 1:+.0%}" if measured else ""
        return f"{size(measured)} (predicted {size(predicted)}{error})"

    disk = sum(record.bytes for record in bundle.manifest.files.values())
    note(
        f"measured:  {compared(disk, plan.prediction.disk)} of disk, "
        f"{compared(memory, plan.prediction.export_memory)} of memory, {duration(time.monotonic() - STARTED)}"
    )
    for line in fidelity_lines(bundle.manifest):
        note(line)
    if not {*bundle.manifest.dialects} <= {*UNTYPED} and (overflow := float16_overflow(bundle)):
        note(f"warning: {overflow}")
    if plan.options.retain is not None:
        retained = bundle.manifest.record["retain"]
        note(
            f"retains:   {retained['found']:.1f} vision tokens for {retained['asked']:g} asked, mean of "
            f"{retained['questions']} questions of {retained['data']}, thresholds times {retained['factor']:.3g}"
        )
        note(f"           {bundle.manifest.reductions[0]}")
    if scaled := bundle.manifest.record.get("activation_aware"):
        note(f"scaled by the activations of {scaled['items']} items of {scaled['data']}")


def find_bundle(
    named: str | None, ks: Iterable[Depth] = (), model: str | None = None, precision: str | None = None
) -> Path:
    """The bundle to use: the one named, else the one exported last, else the demo, exported now if it has all `ks`.

    Of a hub's `model`, ORG/NAME or ORG/NAME@REVISION, the one in the cache, fetched and exported now if it is absent.
    """
    depths = [k for k in ks if k not in (None, "default", "card")]
    if model:
        return _of_hub(model, depths, precision)
    if precision:
        raise click.UsageError("--precision goes with --model; a bundle has its precision from vtx-export")
    if named:
        return Path(named)
    if last := remembered():
        if os.path.isfile(last / "vtx.json"):  # Path.is_file may raise
            return last
        note(f"the bundle exported last, {last}, is gone")
    if (absent := [k for k in depths if k != DEMO_K]) and not os.path.isfile(cache.folder() / DEMO / "vtx.json"):
        gates = " --gates FILE (from vtx-train-gate)" if absent[0] == "auto" else ""
        raise click.UsageError(
            f"no bundle yet, and the demo model's, which would be exported now, has only K = none and {DEMO_K}, "
            f"not {absent[0]}; leave out --k, or make a bundle that has it: vtx-export --k {absent[0]}{gates}"
        )
    why = "no bundle yet: exporting the built-in demo model; vtx-run --model fetches another"
    return _from_cache(DEMO, why, "demo", (DEMO_K,), "fp16")


def _of_hub(model: str, depths: Sequence[Depth], precision: str | None) -> Path:
    """The bundle of a hub's model in the cache."""
    if given("bundle") or given("bundles"):
        raise click.UsageError("--model and --bundle both name what to ask; leave one out")
    if os.path.exists(model):
        raise click.UsageError(f"--model {model} is on this disk, not on the hub; vtx-export --model exports it")
    check_hub_id(model)
    depth = "-".join(map(str, depths)) or "none"
    ks: tuple[int, ...] | Literal["auto"] = tuple(k for k in depths if isinstance(k, int))
    if "auto" in depths:
        ks = "auto"
    why = f"the first use of {model} like this: fetching and exporting it; vtx-cache lists what is kept"
    name = "-".join([model.replace("/", "--"), f"k{depth}", *([precision] if precision else [])])
    return _from_cache(name, why, model, ks, precision)


def _from_cache(name: str, why: str, model: str, ks: tuple[int, ...] | Literal["auto"], precision: str | None) -> Path:
    """The bundle `name` of the cache, kept from removal until the command ends; exported now if it is not there."""
    out = cache.folder() / name
    if (lock := cache.hold(out)) is None:
        need_exporter()
        from vtx.exporter.bundling.options import ExportOptions, MeasuredArithmetic
        from vtx.exporter.bundling.prepare import plan_export

        note(f"{why}\n{READING}")
        measured = None if name == DEMO else MeasuredArithmetic()
        options = ExportOptions(model, ks, precision, arithmetic=measured)
        with cache.adding(out, note):
            if (lock := cache.hold(out)) is None:  # no other process made it meanwhile
                plan = plan_export(options)
                for removed in cache.trim(cache.limit(), plan.prediction.disk, out):
                    note(f"removed {removed} from the cache, which is limited by {cache.LIMIT}")
                export_with_bar(plan, out, force=True)
                lock = cache.hold(out)
    if lock is not None:
        click.get_current_context().call_on_close(partial(os.close, lock))
    return out
