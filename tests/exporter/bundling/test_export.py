"""An export writes the bundle that its options describe, and changes nothing else at --out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import vtx
from tests.support import bundles
from tests.support.exporting import interrupted, is_whole, names, plan, run
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx.exporter.bundling import build, predict
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.predict import check_memory
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.manifest import GOLDEN
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import CheckpointError, ExportError, RequestError

# ---- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(1,), (0,), (-3,), (9,), (3, 99)])
def test_a_k_out_of_range_is_refused_with_the_range(tiny_checkpoint: Checkpoints, ks: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"outside 2\.\.8"):
        plan(tiny_checkpoint(), ks)


def test_a_k_named_twice_is_refused(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(RequestError, match="twice"):
        plan(tiny_checkpoint(), (5, 3, 5))


def test_the_first_k_is_the_default_and_the_depths_are_sorted(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    manifest = run(plan(tiny_checkpoint(), (5, 3)), tmp_path / "b").manifest
    assert (manifest.variants, manifest.default_k) == ((3, 5), 5)
    assert [(s.first, s.last) for s in manifest.stages] == [(1, 2), (3, 4), (5, 8)]


@pytest.mark.parametrize("ks", [(2,), (8,), tuple(range(2, 9))])
def test_the_outermost_depths_can_be_cut(tiny_checkpoint: Checkpoints, tmp_path: Path, ks: tuple[int, ...]) -> None:
    assert is_whole(run(plan(tiny_checkpoint(), ks), tmp_path / "b").folder)


@pytest.mark.parametrize(("context", "named"), [(257, "256"), (0, "at least 2"), (-1, "at least 2"), (17, "16 tokens")])
def test_a_context_that_does_not_fit_is_refused(tiny_checkpoint: Checkpoints, context: int, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        plan(tiny_checkpoint(), max_context=context)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(RequestError, match="int7"):
        ExportOptions(precision="int7")


def test_a_large_models_reference_gives_its_memory_back_and_computes_the_same(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(name: str) -> bytes:
        return (run(plan(tiny_checkpoint(), (3,)), tmp_path / name).folder / GOLDEN).read_bytes()

    asked: list[str] = []
    monkeypatch.setattr(build, "returning_memory", lambda: asked.append("held") or returning_memory())
    small = export("small")
    assert not asked
    monkeypatch.setattr(build, "LARGE", 0)
    assert export("large") == small
    assert asked == ["held"]


def test_the_record_says_how_the_bundle_was_made(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = tiny_checkpoint()
    record = run(plan(folder, (5, 3), "fp16", max_context=100), tmp_path / "b").manifest.record
    assert record["source"]["model"] == folder.name
    assert len(record["source"]["fingerprint"]) == 64
    assert record["options"]["k"] == [5, 3]
    assert record["options"]["max_context"] == 100
    assert {"python", "torch", "transformers", "onnx-ir"} <= set(record["versions"])


def test_an_export_that_needs_more_memory_than_allowed_is_refused_with_both_figures(
    tiny_checkpoint: Checkpoints,
) -> None:
    prediction = plan(tiny_checkpoint()).prediction
    check_memory(prediction, prediction.export_memory)
    check_memory(prediction, None)
    with pytest.raises(ExportError, match=r"needs about \d+ MB of memory, --max-memory allows 100 MB"):
        check_memory(prediction, 100_000_000)


def test_a_pytorch_that_is_built_for_gpus_counts_with_its_libraries(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without one, too: they are loaded all the same."""
    memory = []
    for cuda in (None, "13.0"):
        monkeypatch.setattr("torch.version.cuda", cuda)
        memory.append(plan_export(ExportOptions(str(tiny_checkpoint()), (3,), "fp32")).prediction.export_memory)
    assert memory[1] - memory[0] == predict.GPU_LIBRARIES


def test_planning_writes_nothing(tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = names(tiny_checkpoint())
    plan(tiny_checkpoint())
    assert names(tmp_path) == []
    assert names(tiny_checkpoint()) == before


def test_two_exports_of_one_checkpoint_hold_the_same_files(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = plan(tiny_checkpoint(), dialects=DIALECTS)
    first, second = (run(whole, tmp_path / name).manifest for name in "ab")
    assert first.files == second.files


def test_a_model_whose_directory_has_no_unicode_name_is_exported(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    bundles.copy(tiny_checkpoint(), folder)
    assert Bundle.open(run(plan(folder), tmp_path / "b").folder).manifest.model.name == "m?"


def test_progress_never_runs_back_and_ends_at_its_total(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    run(plan(tiny_checkpoint()), tmp_path / "b", report=lambda p, d, t: seen.setdefault(p, []).append((d, t)))
    assert list(seen) == ["graphs", "weights", "reference", "checksums"]
    for steps in seen.values():
        done = [d for d, _ in steps]
        assert done == sorted(done)
        assert steps[-1][0] == steps[-1][1]


# ---- existing files at --out ----------------------------------------------------------------------------------------


def test_what_exists_is_not_replaced_without_force(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(plan(tiny_checkpoint()), out)
    before = (out / "vtx.json").read_bytes()
    with pytest.raises(ExportError, match=r"exists already; --force"):
        run(plan(tiny_checkpoint(), (5,)), out)
    assert (out / "vtx.json").read_bytes() == before
    assert names(tmp_path) == ["b"]


def test_force_replaces_a_bundle(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(plan(tiny_checkpoint(), (3,)), out)
    run(plan(tiny_checkpoint(), (5,)), out, force=True)
    assert Bundle.open(out).manifest.variants == (5,)
    assert names(tmp_path) == ["b"]


def test_force_fills_an_empty_directory(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert is_whole(run(plan(tiny_checkpoint()), tmp_path / "b", force=True).folder)


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling"])
def test_force_does_not_replace_what_is_no_bundle(tiny_checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "b"
    run(plan(tiny_checkpoint()), tmp_path / "real")
    if kind == "directory":
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
    elif kind == "file":
        out.write_text("years of work")
    else:
        out.symlink_to(tmp_path / ("real" if kind == "link" else "nothing"))
    with pytest.raises(ExportError, match="is not a bundle"):
        run(plan(tiny_checkpoint()), out, force=True)
    assert names(tmp_path) == ["b", "real"]
    if kind == "directory":
        assert (out / "thesis.txt").read_text() == "years of work"


def test_missing_parents_are_made(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    assert is_whole(run(plan(tiny_checkpoint()), tmp_path / "a/b/c").folder)


@pytest.mark.parametrize("out", ["file/b", "file/a/b", "/proc/vtx/b", "a" * 300, "~nobody-of-this-name/b"])
def test_a_place_that_cannot_be_written_is_refused_in_one_line(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(ExportError) as caught:
        run(plan(tiny_checkpoint()), Path(out))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["file"]


def test_a_name_with_wildcards_is_only_a_name(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    other = tmp_path / ".ab.partial-12345678"
    other.mkdir()
    run(plan(tiny_checkpoint()), tmp_path / "a[b]*")
    run(plan(tiny_checkpoint()), tmp_path / "a[b]*", force=True)
    assert names(tmp_path) == [other.name, "a[b]*"]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json", "config.json", "model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_refused_before_anything_is_written(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    (folder / name).unlink()
    with pytest.raises(CheckpointError):
        bundles.export(folder, tmp_path / "b")
    assert names(tmp_path) == ["ck"]


def test_an_exported_bundle_stands_alone(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The checkpoint may go, and the bundle may move."""
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    made = run(plan(folder), tmp_path / "b").folder
    shutil.rmtree(folder)
    made.rename(tmp_path / "c")
    with vtx.load(tmp_path / "c", threads=1).open(random_image(0)) as image:
        assert image.ask("what is it?", options=vtx.Options(max_new_tokens=2)).token_ids


def test_what_an_interrupted_export_left_needs_no_more_room(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ = plan_export(ExportOptions(str(tiny_checkpoint()), (3,), "int8", dialects=("ort",)))
    interrupted(plan_, tmp_path / "b", "reference", 0.5)
    written = sum(512 * path.stat().st_blocks for path in tmp_path.glob(".b.partial-*/weights/*"))
    assert written > 0
    usage = type(shutil.disk_usage(tmp_path))
    enough = plan_.prediction.disk - written
    monkeypatch.setattr(predict.shutil, "disk_usage", lambda _: usage(enough, 0, enough - 1))
    with pytest.raises(ExportError, match="free some"):
        run_export(plan_, tmp_path / "b", force=False, report=lambda *_: None)
    monkeypatch.setattr(predict.shutil, "disk_usage", lambda _: usage(enough, 0, enough))
    made = run_export(plan_, tmp_path / "b", force=False, report=lambda *_: None)
    assert made.manifest.precision == "int8"
