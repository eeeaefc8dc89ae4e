"""From a checkpoint to a bundle: check, plan, write to a staging directory, rename.

`out` does not exist until the bundle is complete; the manifest is the last file written into it.
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
from vtx.exporter.weights.journal import ExportJournal, begin
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
    sign: SigningKey | None = None,
) -> Bundle:
    """Write the bundle `out`. `report` gets (phase, done, total) as the work proceeds, `say` a line for the user.

    `sign` is the key that signs the manifest once it is complete.

    An interrupted export leaves its hidden staging directory beside `out`; the same export resumes there.

    Raises:
        ExportError: `out` exists, the disk is too small or full; nothing is left behind.
        RequestError: no thresholds retain that number of tokens; nothing is left behind.
        CheckpointError: a weight is NaN, or a file changed underway.

    """
    out, key = _ready(plan, out, force), key_of(plan)
    with building(out, lambda folder: can_resume(folder, key), say) as folder:
        journal = ExportJournal(folder)
        if journal.has_work:
            say("resuming an interrupted export; its finished parts are kept")
        else:
            begin(folder, key)
        fill(folder, plan, journal, report)
        if plan.options.retain is not None:
            settle(folder, plan.options.retain, report)
        if sign is not None:
            seal_manifest(folder, Bundle.open(folder, check=False).manifest, sign)
        sync(folder)
        with alone_in(out.parent):
            put_in_place(folder, out, force)
            made = Bundle.open(out, check=False)  # before another export may replace it
    return made


def _ready(plan: Plan, out: Path, force: bool) -> Path:
    """`out`, absolute, where the bundle may be written and fits. Raises ExportError."""
    try:
        out = out.expanduser().absolute()
        make_folder(out.parent)
        with alone_in(out.parent):
            set_back_after_killed(out)
            check_target(out, force)
            there = left_bytes(out, [file.name for file in plan.weights.files if not file.whole])
        needed = plan.prediction.disk - _linkable(plan, out.parent) - there
        check_disk(out.parent, needed, purpose="the bundle", fix="or choose another --out")
    except (OSError, RuntimeError, ValueError) as e:
        raise ExportError(f"cannot write to {out} ({getattr(e, 'strerror', e)}); name another --out") from e
    return out


def _linkable(plan: Plan, folder: Path) -> int:
    """Bytes that take no disk space because they are linked: whole files on the same disk."""
    device = folder.stat().st_dev
    return sum(file.size for file in plan.weights.files if file.whole and file.source.stat().st_dev == device)


__all__ = [
    "DEMO",
    "ExportOptions",
    "Plan",
    "check_memory",
    "check_target",
    "demo_checkpoint",
    "load_template",
    "plan_export",
    "run_export",
]
