"""Traces of a bundle, recorded by both runtimes and compared."""

from __future__ import annotations

from pathlib import Path

from tests.support.bundles import export_with
from tests.support.cpp import output
from tests.support.exported import THREADS
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.report.golden import logits_limit
from vtx.runtime.report.traces.compare import compare_traces
from vtx.runtime.report.traces.files import read_index
from vtx.runtime.report.traces.record import write_traces

REDUCTIONS = (
    "lsm+fastv:k=2,ratio=0.5",
    "mustdrop:gamma=0.05,alpha=1,tau=off,key=0.1,layers=2/4/6",
    "mustdrop:gamma=0.05,alpha=1,tau=0.5,key=0.1,layers=2/4/6,positions=renumber,order=merged-first,keys=last-block",
    "cls:keep=0.5+dart:keep=0.5,k=3,pivots=2,text_pivots=1",
    "dart:keep=0.6,k=4,pivots=2,text_pivots=2,order=code",
    "cdpruner:keep=0.4,text=none+fastv:k=4,ratio=0.3",
    "cdpruner:keep=9",
    "random:keep=0.3+fastv:k=4",
    "divprune:keep=0.3",
    "dart:keep=10,k=0,pivots=3,text_pivots=2",
    "visionzip:dominant=5,contextual=3+fastv:k=4",
    "hiprune:layer=1,alpha=0.5",
)


def meets(
    checkpoint: Path, folder: Path, precision: str, *, kv: str | None = None, ks: tuple[int, ...] = (3, 5),
    device: str = "cpu", reductions: tuple[str, ...] = REDUCTIONS, gates: Path | None = None, compute: str = "f32",
    limit: float | None = None,
) -> int:  # fmt: skip
    """The number of questions compared; fails with what differs. `limit`: of logits, by default `logits_limit`'s."""
    dialect = "plain" if device == "openvino" else "ort"
    options = ExportOptions(
        str(checkpoint), ks, precision, dialects=tuple({"ort", dialect}), reductions=reductions, kv_precision=kv,
        gates=gates, allow_changed_answers=True,
    )  # fmt: skip
    bundle = export_with(options, folder / "bundle")
    return compared(bundle.folder, folder, device, compute, limit)


def compared(bundle: Path, folder: Path, device: str = "cpu", compute: str = "f32", limit: float | None = None) -> int:
    """The same for a bundle."""
    model = load(bundle, device=device, compute=compute, threads=THREADS)
    write_traces(model, folder / "python")
    output("traces", bundle, folder / "python", folder / "cpp", device)
    assert read_index(folder / "cpp").compute == compute
    checks = list(compare_traces(folder / "python", folder / "cpp", limit or logits_limit(model.manifest, compute)))
    assert [f"{check.name}: {check.note}" for check in checks if not check.passed] == []
    return len(checks) - 1
