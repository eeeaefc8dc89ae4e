"""From a checkpoint to a bundle: check, plan, write to a staging directory, rename.

`out` does not exist until the bundle is complete; the manifest is the last file written into it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vtx.exporter.bundling import staging
from vtx.exporter.bundling.options import MeasuredArithmetic
from vtx.exporter.bundling.predict import check_disk
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.bundling.staging import check_target
from vtx.exporter.weights.journal import ExportJournal, begin
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.files import sync_file
from vtx.runtime.bundle.seal import SigningKey
from vtx.runtime.errors import ExportError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.units import Progress, size
from vtx.tools.data.items import Data, scene_items
from vtx.tools.fit.arithmetic import SAMPLES, candidates, measure_arithmetic, memory_to_measure
from vtx.tools.fit.retain import fit_thresholds

LARGE = 1 << 30  # bytes of memory that are said before they are taken


def run_export(
    plan: Plan, out: Path, *, force: bool, report: Progress, say: Callable[[str], None] = lambda _: None,
    sign: SigningKey | None = None,
) -> Bundle:  # fmt: skip
    """Write the bundle `out`. `report` gets (phase, done, total) as the work proceeds, `say` a line for the user.

    `sign` is the key that signs the manifest once it is complete.

    An interrupted export leaves its hidden staging directory next to `out`; the same export resumes there. Raises
    ExportError, RequestError, CheckpointError.
    """
    try:
        out = out.expanduser().absolute()
        staging.make_folder(out.parent)
        with staging.alone_in(out.parent):
            staging.set_back_after_killed(out)
            check_target(out, force)
            left = staging.left_bytes(out, [file.name for file in plan.weights.files if not file.whole])
        device = out.parent.stat().st_dev
        linked = sum(f.size for f in plan.weights.files if f.whole and f.source.stat().st_dev == device)
        needed = plan.prediction.disk - linked - left
        check_disk(out.parent, needed, purpose="the bundle", fix="or choose another --out")
    except (OSError, RuntimeError, ValueError) as e:
        raise ExportError(f"cannot write to {out} ({getattr(e, 'strerror', e)}); name another --out") from e
    from vtx.exporter.bundling.build import fill  # loads torch, once the plan has nothing wrong

    key = key_of(plan)
    with staging.building(out, key, say) as folder:
        journal = ExportJournal(folder)
        if journal.has_work:
            say("resuming an interrupted export; its finished parts are kept")
        else:
            begin(folder, key)
        fill(folder, plan, journal, report)
        if plan.options.retain is not None:
            fit_thresholds(folder, plan.options.retain, report)
        if plan.options.arithmetic and plan.config.action is None:
            check_arithmetic(folder, plan.options.arithmetic, report, say)
        if sign is not None:
            manifest = replace(Bundle.open(folder, check=False).manifest, release=plan.options.release)
            seal_manifest(folder, manifest, sign)
        for path in [*folder.rglob("*"), folder]:
            sync_file(path)
        with staging.alone_in(out.parent):
            staging.put_in_place(folder, out, force)
            made = Bundle.open(out, check=False)  # before another export may replace it
    return made


def check_arithmetic(folder: Path, wanted: MeasuredArithmetic, report: Progress, say: Callable[[str], None]) -> None:
    """Measure which arithmetic keeps the bundle's answers; leave it out for want of memory, unless it is asked for."""
    kinds = candidates(Bundle.open(folder, check=False).manifest, always=wanted.always)
    if not kinds:
        return
    data = wanted.data or Data("the drawn scenes", scene_items(SAMPLES))
    memory, free, named = memory_to_measure(folder, kinds), available_memory(), " and ".join(kinds)
    short = "" if free is None or memory <= free else f" ({size(free)} is free)"
    if short and not wanted.always:
        return say(
            f"not checking {named} arithmetic, which needs about {size(memory)} of memory{short}: the bundle is "
            "answered in f32. Export where more memory is free, or check all the same with --arithmetic measured"
        )
    if memory >= LARGE or short:
        say(
            f"checking {named} arithmetic on {len(data.items)} questions, which needs about {size(memory)} of "
            f"memory{short}; --arithmetic f32 leaves it out"
        )
    measure_arithmetic(folder, kinds, data, report)


def key_of(plan: Plan) -> str:
    """Equal for two exports that write the same weights and golden vectors from unchanged source files.

    A source file is the same by its path, inode, size and time of change, as they were when its header was read, and a
    checkpoint by some bytes of each tensor. The device's number is left out: it may change when a machine starts again.
    """
    sources = []
    for file in plan.weights.files:
        source = file.entries[0].source.identity
        header = hashlib.sha256(file.header or b"").hexdigest()
        sources.append([file.name, str(file.source), source and source[1:], header])
    # Others change only the manifest.
    options = replace(plan.options, retain=None, aware=None, arithmetic=None, release=None)
    aware = [item.digest() for item in plan.options.aware.items] if plan.options.aware else None
    tower = plan.text_tower.checkpoint.fingerprint() if plan.text_tower else None
    identity = [plan.checkpoint.fingerprint(), tower, str(options), list(plan.ks), plan.template, sources, aware]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
