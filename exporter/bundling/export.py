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
from vtx.exporter.bundling.predict import check_disk
from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.bundling.staging import check_target
from vtx.exporter.weights.journal import ExportJournal, begin
from vtx.runtime.bundle.bundle import Bundle, seal_manifest
from vtx.runtime.bundle.files import sync_file
from vtx.runtime.bundle.seal import SigningKey
from vtx.runtime.errors import ExportError
from vtx.runtime.units import Progress
from vtx.tools.fit.retain import fit_thresholds


def run_export(
    plan: Plan,
    out: Path,
    *,
    force: bool,
    report: Progress,
    say: Callable[[str], None] = lambda _: None,
    sign: SigningKey | None = None,
) -> Bundle:
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
        needed = plan.prediction.disk + plan.prediction.scratch - linked - left
        check_disk(out.parent, needed, purpose="the bundle", fix="or choose another --out")
    except (OSError, RuntimeError, ValueError) as e:
        raise ExportError(f"cannot write to {out} ({getattr(e, 'strerror', e)}); name another --out") from e
    # these load torch, once the plan has nothing wrong
    from vtx.exporter.bundling.build import end, fill
    from vtx.exporter.bundling.fidelity import check_fidelity

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
            check_fidelity(folder, plan, plan.options.arithmetic, report, say)
        end(folder, journal)
        if sign is not None:
            manifest = replace(Bundle.open(folder, check=False).manifest, release=plan.options.release)
            seal_manifest(folder, manifest, sign)
        for path in [*folder.rglob("*"), folder]:
            sync_file(path)
        with staging.alone_in(out.parent):
            staging.put_in_place(folder, out, force)
            made = Bundle.open(out, check=False)  # before another export may replace it
    return made


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
    options = replace(
        plan.options,
        retain=None,
        aware=None,
        arithmetic=None,
        release=None,
        calibration=None,
        allow_changed_answers=False,
    )
    aware = [item.digest() for item in plan.options.aware.items] if plan.options.aware else None
    tower = plan.text_tower.checkpoint.fingerprint() if plan.text_tower else None
    identity = [plan.checkpoint.fingerprint(), tower, str(options), list(plan.ks), plan.template, sources, aware]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
