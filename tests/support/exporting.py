"""Shared by the tests of whole exports: plans, runs, and checks that a bundle is whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import vtx
from tests.support import bundles
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError
from vtx.runtime.report.golden import check_golden


@functools.cache
def plan(
    folder: Path,
    ks: tuple[int, ...] = (3,),
    precision: str = "fp32",
    dialects: tuple[str, ...] = bundles.ORT,
    **options: Any,
) -> Plan:
    """A plan of onnxruntime's graphs, unless told: others take more than half of an export's time."""
    return plan_export(ExportOptions(str(folder), ks, precision, dialects=dialects, **options))


def run(plan_: Plan, out: Path, *, force: bool = False, report: Any = bundles.IGNORE) -> Bundle:
    return run_export(plan_, out, force=force, report=report)


def is_whole(folder: Path) -> bool:
    """Return True if the bundle is as exported and matches its checkpoint."""
    fine = all(problem is None for _, problem in Bundle.open(folder).verify())
    return fine and all(check.passed for check in check_golden(vtx.load(folder, threads=1)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted(plan_: Plan, out: Path, phase: str, share: float) -> None:
    """Export until a share of a phase is done."""

    def stop(name: str, done: int, total: int) -> None:
        if name == phase and done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_, out, report=stop)


def opens(folder: Path) -> bool:
    try:
        Bundle.open(folder)
    except BundleError:
        return False
    return True
