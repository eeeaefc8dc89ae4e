"""A disk that fills or fails while a bundle, its signature or a report is written leaves nothing that looks whole."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support import bundles
from tests.support.faults import Disk, failing
from tests.support.fixtures import Checkpoints
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.seal import SigningKey
from vtx.runtime.errors import ExportError, VtxError
from vtx.tools.common.files import write_json
from vtx.tools.data.journal import ResultJournal

KEY = SigningKey("key.pem", Ed25519PrivateKey.generate())
POINTS = [("write", 0.0), ("write", 0.3), ("write", 0.6), ("write", 0.9), ("write", 1.0)]
POINTS += [("fsync", 0.0), ("fsync", 0.5), ("fsync", 1.0), ("rename", 0.0), ("rename", 0.5), ("rename", 1.0)]


@pytest.fixture(scope="module")
def plan(tiny_checkpoint: Checkpoints) -> Plan:
    return plan_export(ExportOptions(str(tiny_checkpoint()), (3,), "fp16", dialects=("ort",)))


@pytest.fixture(scope="module")
def counts(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The number of operations of each kind in a whole export."""
    folder = tmp_path_factory.mktemp("counted")
    with failing(Disk(str(folder))) as disk:
        run_export(plan, folder / "out", force=False, report=bundles.IGNORE, sign=KEY)
    assert all(disk.counts.values())
    return disk.counts


@pytest.mark.sampled
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize(("operation", "share"), POINTS)
def test_an_export_that_the_disk_ends_leaves_nothing_but_what_was_there(
    plan: Plan, counts: dict[str, int], tmp_path: Path, operation: str, share: float, code: int
) -> None:
    first = 1 + round(share * (counts[operation] - 1))
    with failing(Disk(str(tmp_path), operation, first, code)), pytest.raises(VtxError) as caught:
        run_export(plan, tmp_path / "out", force=False, report=bundles.IGNORE, sign=KEY)
    assert isinstance(caught.value, ExportError)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_was_to_be_replaced_stays(plan: Plan, counts: dict[str, int], tmp_path: Path) -> None:
    made = run_export(plan, tmp_path / "out", force=False, report=bundles.IGNORE)
    before = (made.folder / "vtx.json").read_bytes()
    renames = counts["rename"]
    for operation, first in (("write", counts["write"]), ("fsync", counts["fsync"]), ("rename", renames + 1)):
        disk = Disk(str(tmp_path), operation, first, once=True)
        with failing(disk), pytest.raises(ExportError):
            run_export(plan, tmp_path / "out", force=True, report=bundles.IGNORE, sign=KEY)
        assert (made.folder / "vtx.json").read_bytes() == before
        assert not any(problem for _, problem in Bundle.open(tmp_path / "out").verify())


def test_a_bundle_that_cannot_be_set_back_is_named_and_set_back_by_the_next_export(
    plan: Plan, counts: dict[str, int], tmp_path: Path
) -> None:
    run_export(plan, tmp_path / "out", force=False, report=bundles.IGNORE)
    with failing(Disk(str(tmp_path), "rename", counts["rename"] + 1)), pytest.raises(ExportError, match="is now ") as e:
        run_export(plan, tmp_path / "out", force=True, report=bundles.IGNORE, sign=KEY)
    [kept] = tmp_path.iterdir()
    assert str(kept) in str(e.value)
    with pytest.raises(ExportError, match="exists already"):
        run_export(plan, tmp_path / "out", force=False, report=bundles.IGNORE)
    assert not any(problem for _, problem in Bundle.open(tmp_path / "out").verify())


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_report_stays_as_it_was(tmp_path: Path, operation: str) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"old": 1})
    with (
        failing(Disk(str(tmp_path), operation, 1)),
        pytest.raises(ExportError, match=r"report\.json .*free some space"),
    ):
        write_json(path, {"new": [0] * 10_000})
    assert path.read_text() == '{\n "old": 1\n}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])  # weights that are taken whole, or written anew
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_a_checkpoint_that_cannot_be_read_is_named_and_nothing_is_left(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, share: float
) -> None:
    checkpoint = tiny_checkpoint()

    def export(disk: Disk) -> None:
        with failing(disk):
            made = plan_export(ExportOptions(str(checkpoint), (3,), precision, dialects=("ort",)))
            run_export(made, tmp_path / "out", force=True, report=bundles.IGNORE)

    whole = Disk(str(checkpoint))
    export(whole)
    shutil.rmtree(tmp_path / "out")
    first = 1 + round(share * (whole.counts["read"] - 1))
    with pytest.raises(VtxError, match="Input/output error") as caught:
        export(Disk(str(checkpoint), "read", first, errno.EIO))
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_results_that_were_saved_stay_where_the_disk_refuses_more(tmp_path: Path) -> None:
    path, identity = tmp_path / "results.jsonl", {"model": "m"}
    with ResultJournal(path, identity) as journal:
        journal.add({"a": {"value": 1}})
    for operation in ("write", "fsync"):
        with failing(Disk(str(tmp_path), operation, 1, errno.EIO)), ResultJournal(path, identity) as journal:
            with pytest.raises(ExportError, match=r"cannot write .*results\.jsonl \(Input/output error\); "):
                journal.add({"b": {"value": 2}})
            assert journal.results == {"a": {"value": 1}}
        with ResultJournal(path, identity) as journal:
            assert journal.results["a"] == {"value": 1}
    unreadable = Disk(str(tmp_path), "read", 1, errno.EIO)
    with failing(unreadable), pytest.raises(ExportError, match=r"cannot resume .* check the disk"):
        ResultJournal(path, identity).__enter__()
