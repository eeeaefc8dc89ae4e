"""From a checkpoint to a bundle: check, plan, say what it will take, write beside the target, rename.

Nothing stands at `out` until the bundle is complete; the manifest is the last file written into it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vtx.exporter.bundling.build import Report, fill
from vtx.exporter.bundling.options import DEMO, ExportOptions
from vtx.exporter.bundling.predict import check_disk, check_memory
from vtx.exporter.bundling.prepare import Plan, demo_checkpoint, load_template, plan_export
from vtx.exporter.bundling.resume import can_resume, key_of
from vtx.exporter.bundling.retain import settle
from vtx.exporter.bundling.staging import (
    alone_in,
    building,
    check_target,
    left_bytes,
    make_folder,
    put_in_place,
    set_back_after_killed,
    sync,
)
from vtx.exporter.weights.journal import Journal, begin
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.seal import SigningKey
from vtx.runtime.errors import ExportError


def run_export(
    plan: Plan,
    out: Path,
    *,
    force: bool,
    report: Report,
    say: Callable[[str], None] = lambda _: None,
    begun: Callable[[Path, Journal], None] | None = None,
    sign: SigningKey | None = None,
) -> Bundle:
    """Write the bundle `out`. `report` gets (phase, done, total) as the work goes on, `say` a line for the user.

    `begun` is called with the staging directory and the journal once the work can begin, as to forecast its time.
    `sign` is the key that signs the manifest once it is complete.

    An export that is interrupted leaves a hidden folder beside `out`; the same export goes on from there.

    Raises:
        ExportError: `out` exists, the disk is too small or full; nothing is left behind.
        RequestError: no thresholds retain what was asked for; nothing is left behind.
        CheckpointError: a weight is NaN, or a file changed underway.

    """
    try:
        out = out.expanduser().absolute()
        make_folder(out.parent)
        with alone_in(out.parent):
            set_back_after_killed(out)
            check_target(out, force)
            there = left_bytes(out, [file.name for file in plan.weights.files if not file.whole])
        needed = plan.prediction.disk - _linkable(plan, out.parent) - there
        check_disk(out.parent, needed, what="the bundle", cure="or choose another --out")
    except (OSError, RuntimeError, ValueError) as e:
        raise ExportError(f"cannot write to {out} ({getattr(e, 'strerror', e)}); name another --out") from e
    key = key_of(plan)
    with building(out, lambda folder: can_resume(folder, key), say) as folder:
        journal = Journal(folder)
        if journal.found_work:
            say("going on with an export that was interrupted: what it finished is kept")
        else:
            begin(folder, key)
        if begun is not None:
            begun(folder, journal)
        fill(folder, plan, journal, report)
        if plan.options.retain is not None:
            settle(folder, plan.options.retain, report)
        if sign is not None:
            seal_manifest(folder, Bundle.open(folder, check=False).manifest, sign)
        sync(folder)
        with alone_in(out.parent):
            put_in_place(folder, out, force)
    return Bundle.open(out, check=False)


def _linkable(plan: Plan, folder: Path) -> int:
    """Bytes that need no room, because they are linked: whole files on the same disk."""
    device = folder.stat().st_dev
    return sum(file.size for file in plan.weights.files if file.whole and file.source.stat().st_dev == device)


__all__ = [
    "DEMO",
    "ExportOptions",
    "Plan",
    "check_memory",
    "demo_checkpoint",
    "load_template",
    "plan_export",
    "run_export",
]
