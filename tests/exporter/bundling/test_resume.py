"""An export that is interrupted leaves what was there, and resumes where it stopped."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import bundles
from tests.support.exporting import interrupted, is_whole, names, opens, plan, run
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.exporter.bundling import export as export_module
from vtx.exporter.bundling import staging as place_module
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.weights import writing
from vtx.runtime.bundle import seal
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_header
from vtx.runtime.errors import BundleError, ExportError

# ---- interrupted in the process --------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.sampled
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("phase", ["weights", "reference", "checksums"])
def test_what_stops_an_export_leaves_what_was_there_and_at_most_a_hidden_folder(
    tiny_checkpoint: Checkpoints, tmp_path: Path, force: bool, error: type[BaseException], phase: str
) -> None:
    """An error leaves nothing; an interruption leaves what the same export can go on with, and no bundle."""
    out = tmp_path / "b"
    if force:
        run(plan(tiny_checkpoint(), (5,)), out)

    def stop(name: str, done: int, total: int) -> None:
        if name == phase and done > total // 2:
            raise error

    said: list[str] = []
    with pytest.raises(error):
        run_export(plan(tiny_checkpoint()), out, force=force, report=stop, say=said.append)
    assert any("the same command resumes there" in line for line in said) == (error is not MemoryError)
    hidden = [path for path in tmp_path.iterdir() if path != out]
    assert len(hidden) == (error is not MemoryError)
    assert not any(opens(path) for path in hidden)
    assert out.exists() == force
    assert not force or Bundle.open(out).manifest.variants == (5,)


# ---- resuming --------------------------------------------------------------------------------------------------------


def quantised_tensors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are quantised from now on."""
    real, seen = writing.quantise, list[str]()

    def count(rows: Any, scheme: Any, name: str, *rest: Any) -> Any:
        seen.append(name)
        return real(rows, scheme, name, *rest)

    monkeypatch.setattr(writing, "quantise", count)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "share"), [("weights", 0.3), ("weights", 0.8), ("reference", 0.5), ("checksums", 0)])
def test_the_same_export_goes_on_without_doing_a_finished_tensor_again(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, share: float
) -> None:
    plan_ = plan(tiny_checkpoint(Tiny(dtype="bfloat16", shards=3)), (3,), "int4")
    whole = run(plan_, tmp_path / "whole").manifest
    seen, said = quantised_tensors(monkeypatch), list[str]()
    interrupted(plan_, tmp_path / "b", phase, share)
    first = set(seen)
    seen.clear()
    made = run_export(plan_, tmp_path / "b", force=False, report=bundles.IGNORE, say=said.append)
    assert any("resuming" in line for line in said)
    assert made.manifest.files == whole.files
    assert len(first & set(seen)) <= 1, "only the tensor that was not finished is done again"
    assert first | set(seen) == {name for name, tensor in plan_.weights.stored.items() if tensor.scales}
    assert names(tmp_path) == ["b", "whole"]
    assert is_whole(made.folder)


def test_a_tensor_that_was_damaged_meanwhile_is_written_again(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    plan_ = plan(tiny_checkpoint(), (3,), "int4")
    whole = run(plan_, tmp_path / "whole").manifest
    interrupted(plan_, tmp_path / "b", "weights", 0.9)
    (left,) = tmp_path.glob(".b.partial-*")
    (file,) = (left / "weights").iterdir()
    bundles.flip(file, file.stat().st_size // 2)
    assert run(plan_, tmp_path / "b").manifest.files == whole.files


@pytest.mark.parametrize(
    "change",
    [
        "precision",
        "k",
        "gates",
        "source",
        "shard",
        "shard of the old time",
        "config",
        "template",
        "context",
        "reduction",
        "journal",
    ],
)
def test_another_export_or_another_checkpoint_starts_afresh_and_says_so(
    tiny_checkpoint: Checkpoints, tmp_path: Path, change: str
) -> None:
    folder, said = bundles.copy(tiny_checkpoint(), tmp_path / "ck"), list[str]()
    gates = bundles.write_gate(folder, 1) if change == "gates" else None
    options = ExportOptions(str(folder), "auto" if gates else (3,), "int4", gates=gates, dialects=bundles.ORT)
    interrupted(plan_export(options), tmp_path / "b", "weights", 0.9)
    shard, config, template = (folder / n for n in ("model.safetensors", "config.json", "chat_template.jinja"))
    match change:
        case "precision":
            options = replace(options, precision="int8")
        case "k":
            options = replace(options, ks=(5,))
        case "gates":
            bundles.write_gate(folder, 1, k=5)
        case "source":
            bundles.flip(shard, -200)
        case "shard":  # of the same size, and where no fingerprint looks
            largest = max(read_header(shard).tensors.values(), key=lambda info: info.nbytes)
            bundles.flip(shard, largest.offset + 8)
        case "shard of the old time":  # as a copy that keeps times makes it
            status, largest = shard.stat(), max(read_header(shard).tensors.values(), key=lambda info: info.nbytes)
            shutil.copy(shard, shard.with_suffix(".new"))
            bundles.flip(shard.with_suffix(".new"), largest.offset + 8)
            os.utime(shard.with_suffix(".new"), ns=(status.st_atime_ns, status.st_mtime_ns))
            shard.with_suffix(".new").replace(shard)
        case "config":
            config.write_text(re.sub(r'("rms_norm_eps": )[^,]*', r"\g<1>0.5", config.read_text()))
        case "template":
            template.write_text(template.read_text().replace("ASSISTANT:", "MODEL:"))
        case "context":
            options = replace(options, max_context=128)
        case "reduction":
            options = replace(options, reductions=("fastv:k=3",))
        case "journal":
            next(tmp_path.glob(".b.partial-*/.journal")).write_text("[1]")
    made = run_export(plan_export(options), tmp_path / "b", force=False, report=bundles.IGNORE, say=said.append)
    assert any("starting afresh" in line for line in said)
    assert names(tmp_path) == ["b", "ck"]
    assert is_whole(made.folder)


def test_a_bundle_holds_no_journal(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    made = run(plan(tiny_checkpoint(), (3,), "int4"), tmp_path / "b")
    assert {path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()} == {
        *made.manifest.files, "vtx.json", "vtx.json.sha256",
    }  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_a_failure_between_the_two_renames_puts_the_old_bundle_back(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    out, real, left = tmp_path / "b", Path.rename, [error()]
    run(plan(tiny_checkpoint(), (5,)), out)

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name and left:
            raise left.pop()
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((ExportError, KeyboardInterrupt)):
        run(plan(tiny_checkpoint()), out, force=True)
    assert not left
    assert [name for name in names(tmp_path) if not name.startswith(".b.partial-")] == ["b"]
    assert Bundle.open(out).manifest.variants == (5,)
    monkeypatch.undo()
    run(plan(tiny_checkpoint()), out, force=True)
    assert names(tmp_path) == ["b"]


def test_a_bundle_set_aside_by_a_killed_export_comes_back(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    aside = run(plan(tiny_checkpoint(), (5,)), tmp_path / ".b.replaced-12345678").folder
    with pytest.raises(ExportError, match="exists already"):
        run(plan(tiny_checkpoint()), tmp_path / "b")
    assert names(tmp_path) == ["b"]
    assert not aside.exists()
    assert Bundle.open(tmp_path / "b").manifest.variants == (5,)


def test_every_file_is_on_the_disk_before_the_bundle_is_in_its_place(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        wanted = {str(path) for path in [self, *self.rglob("*")]}
        # files that are written whole were synced under the names that they had while they were written
        final = {str(Path(name).with_name(re.sub(r"^\.?(.+)\.partial$", r"\1", Path(name).name))) for name in synced}
        assert final == wanted
        return real(self, target)

    monkeypatch.setattr(os, "fsync", lambda number: synced.add(os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(Path, "rename", rename)
    with monkeypatch.context() as patch:
        patch.setattr(export_module.staging, "set_back_after_killed", lambda _: None)
        patch.setattr(place_module, "set_back", lambda *_: None)
        run(plan(tiny_checkpoint()), tmp_path / "b")
    assert len(synced) > 10


def test_the_manifest_is_written_last(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the hidden directory is no bundle, and with it it is a whole one."""
    real, seen = seal.write_durably, []

    def write(path: Path, content: bytes) -> None:
        if path.name == "vtx.json":
            with pytest.raises(BundleError):
                Bundle.open(path.parent)
            real(path, content)
            seen.append(is_whole(path.parent))
        else:
            real(path, content)

    monkeypatch.setattr(seal, "write_durably", write)
    run(plan(tiny_checkpoint()), tmp_path / "b")
    assert seen == [True]
