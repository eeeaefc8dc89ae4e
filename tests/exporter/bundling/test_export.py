"""A bundle is complete or absent: whatever stops an export, and whoever else is at work on the same place."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vtx
from tests.support import bundles
from tests.support.gated import WAIT
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling import export as export_module
from vtx.exporter.bundling import predict
from vtx.exporter.bundling import staging as place_module
from vtx.exporter.bundling.export import Plan, check_memory, plan_export, run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.weights import writing
from vtx.runtime.bundle import seal
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError, CheckpointError, ExportError, RequestError
from vtx.runtime.report.golden import check_golden

Make = Callable[..., Path]


@functools.cache
def plan(folder: Path, ks: tuple[int, ...] = (3,), precision: str = "fp32", **options: Any) -> Plan:
    return plan_export(ExportOptions(str(folder), ks, precision, **options))


def run(plan_: Plan, out: Path, *, force: bool = False, report: Any = bundles.IGNORE) -> Bundle:
    return run_export(plan_, out, force=force, report=report)


def is_whole(folder: Path) -> bool:
    """Whether the bundle is as exported and computes what its checkpoint says."""
    fine = all(problem is None for _, problem in Bundle.open(folder).verify())
    return fine and all(check.passed for check in check_golden(vtx.load(folder, threads=1)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(1,), (0,), (-3,), (9,), (3, 99)])
def test_a_k_out_of_range_is_refused_with_the_range(tiny_checkpoint: Make, ks: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"outside 2\.\.8"):
        plan(tiny_checkpoint(), ks)


def test_a_k_named_twice_is_refused(tiny_checkpoint: Make) -> None:
    with pytest.raises(RequestError, match="twice"):
        plan(tiny_checkpoint(), (5, 3, 5))


def test_the_first_k_is_the_default_and_the_depths_are_sorted(tiny_checkpoint: Make, tmp_path: Path) -> None:
    manifest = run(plan(tiny_checkpoint(), (5, 3)), tmp_path / "b").manifest
    assert (manifest.variants, manifest.default_k) == ((3, 5), 5)
    assert [(s.first, s.last) for s in manifest.stages] == [(1, 2), (3, 4), (5, 8)]


@pytest.mark.parametrize("ks", [(2,), (8,), tuple(range(2, 9))])
def test_the_outermost_depths_can_be_cut(tiny_checkpoint: Make, tmp_path: Path, ks: tuple[int, ...]) -> None:
    assert is_whole(run(plan(tiny_checkpoint(), ks), tmp_path / "b").folder)


@pytest.mark.parametrize(("context", "named"), [(257, "256"), (0, "at least 2"), (-1, "at least 2"), (17, "16 tokens")])
def test_a_context_that_does_not_fit_is_refused(tiny_checkpoint: Make, context: int, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        plan(tiny_checkpoint(), max_context=context)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(RequestError, match="int7"):
        ExportOptions(precision="int7")


def test_the_record_says_how_the_bundle_was_made(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = tiny_checkpoint()
    record = run(plan(folder, (5, 3), "fp16", max_context=100), tmp_path / "b").manifest.record
    assert record["source"]["model"] == folder.name
    assert len(record["source"]["fingerprint"]) == 64
    assert record["options"]["k"] == [5, 3]
    assert record["options"]["max_context"] == 100
    assert {"python", "torch", "transformers", "onnx-ir"} <= set(record["versions"])


def test_an_export_that_needs_more_memory_than_allowed_is_refused_with_both_figures(tiny_checkpoint: Make) -> None:
    forecast = plan(tiny_checkpoint()).prediction
    check_memory(forecast, forecast.export_memory)
    check_memory(forecast, None)
    with pytest.raises(ExportError, match=r"needs about \d+ MB of memory, --max-memory allows 100 MB"):
        check_memory(forecast, 100_000_000)


def test_planning_writes_nothing(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = names(tiny_checkpoint())
    plan(tiny_checkpoint())
    assert names(tmp_path) == []
    assert names(tiny_checkpoint()) == before


def test_two_exports_of_one_checkpoint_hold_the_same_files(tiny_checkpoint: Make, tmp_path: Path) -> None:
    first, second = (run(plan(tiny_checkpoint()), tmp_path / name).manifest for name in "ab")
    assert first.files == second.files


def test_a_model_whose_directory_has_no_unicode_name_is_exported(tiny_checkpoint: Make, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    bundles.copy(tiny_checkpoint(), folder)
    assert Bundle.open(run(plan(folder), tmp_path / "b").folder).manifest.model.name == "m?"


def test_progress_never_runs_back_and_ends_at_its_total(tiny_checkpoint: Make, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    run(plan(tiny_checkpoint()), tmp_path / "b", report=lambda p, d, t: seen.setdefault(p, []).append((d, t)))
    assert list(seen) == ["graphs", "weights", "reference", "checksums"]
    for steps in seen.values():
        done = [d for d, _ in steps]
        assert done == sorted(done)
        assert steps[-1][0] == steps[-1][1]


# ---- what stands at --out --------------------------------------------------------------------------------------------


def test_what_exists_is_not_replaced_without_force(tiny_checkpoint: Make, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(plan(tiny_checkpoint()), out)
    before = (out / "vtx.json").read_bytes()
    with pytest.raises(ExportError, match=r"exists already; --force"):
        run(plan(tiny_checkpoint(), (5,)), out)
    assert (out / "vtx.json").read_bytes() == before
    assert names(tmp_path) == ["b"]


def test_force_replaces_a_bundle(tiny_checkpoint: Make, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(plan(tiny_checkpoint(), (3,)), out)
    run(plan(tiny_checkpoint(), (5,)), out, force=True)
    assert Bundle.open(out).manifest.variants == (5,)
    assert names(tmp_path) == ["b"]


def test_force_fills_an_empty_directory(tiny_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert is_whole(run(plan(tiny_checkpoint()), tmp_path / "b", force=True).folder)


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling"])
def test_force_does_not_replace_what_is_no_bundle(tiny_checkpoint: Make, tmp_path: Path, kind: str) -> None:
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


def test_missing_parents_are_made(tiny_checkpoint: Make, tmp_path: Path) -> None:
    assert is_whole(run(plan(tiny_checkpoint()), tmp_path / "a/b/c").folder)


@pytest.mark.parametrize("out", ["file/b", "file/a/b", "/proc/vtx/b", "a" * 300, "~nobody-of-this-name/b"])
def test_a_place_that_cannot_be_written_is_refused_in_one_line(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(ExportError) as caught:
        run(plan(tiny_checkpoint()), Path(out))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["file"]


def test_a_name_with_wildcards_is_only_a_name(tiny_checkpoint: Make, tmp_path: Path) -> None:
    other = tmp_path / ".ab.partial-12345678"
    other.mkdir()
    run(plan(tiny_checkpoint()), tmp_path / "a[b]*")
    run(plan(tiny_checkpoint()), tmp_path / "a[b]*", force=True)
    assert names(tmp_path) == [other.name, "a[b]*"]


# ---- interrupted in the process --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("phase", ["weights", "reference", "checksums"])
def test_what_stops_an_export_leaves_what_was_there_and_at_most_a_hidden_folder(
    tiny_checkpoint: Make, tmp_path: Path, force: bool, error: type[BaseException], phase: str
) -> None:
    """An error leaves nothing; an interruption leaves what the same export can go on with, and no bundle."""
    out = tmp_path / "b"
    if force:
        run(plan(tiny_checkpoint(), (5,)), out)

    def stop(name: str, done: int, total: int) -> None:
        if name == phase and done > total // 2:
            raise error

    with pytest.raises(error):
        run(plan(tiny_checkpoint()), out, force=force, report=stop)
    hidden = [path for path in tmp_path.iterdir() if path != out]
    assert len(hidden) == (error is not MemoryError)
    assert not any(opens(path) for path in hidden)
    assert out.exists() == force
    assert not force or Bundle.open(out).manifest.variants == (5,)


# ---- resuming --------------------------------------------------------------------------------------------------------


def interrupted(plan_: Plan, out: Path, phase: str, share: float) -> None:
    """Export until a share of a phase is done."""

    def stop(name: str, done: int, total: int) -> None:
        if name == phase and done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_, out, report=stop)


def quantised_tensors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are quantised from now on."""
    real, seen = writing.quantise, list[str]()

    def count(rows: Any, scheme: Any, name: str) -> Any:
        seen.append(name)
        return real(rows, scheme, name)

    monkeypatch.setattr(writing, "quantise", count)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "share"), [("weights", 0.3), ("weights", 0.8), ("reference", 0.5), ("checksums", 0)])
def test_the_same_export_goes_on_without_doing_a_finished_tensor_again(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, share: float
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


def test_a_tensor_that_was_damaged_meanwhile_is_written_again(tiny_checkpoint: Make, tmp_path: Path) -> None:
    plan_ = plan(tiny_checkpoint(), (3,), "int4")
    whole = run(plan_, tmp_path / "whole").manifest
    interrupted(plan_, tmp_path / "b", "weights", 0.9)
    (left,) = tmp_path.glob(".b.partial-*")
    (file,) = (left / "weights").iterdir()
    bundles.flip(file, file.stat().st_size // 2)
    assert run(plan_, tmp_path / "b").manifest.files == whole.files


@pytest.mark.parametrize("change", ["precision", "k", "source", "journal"])
def test_another_export_or_another_checkpoint_starts_afresh_and_says_so(
    tiny_checkpoint: Make, tmp_path: Path, change: str
) -> None:
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    interrupted(plan_export(ExportOptions(str(folder), (3,), "int4")), tmp_path / "b", "weights", 0.9)
    if change == "source":
        bundles.flip(folder / "model.safetensors", -200)
    if change == "journal":
        next(tmp_path.glob(".b.partial-*/.journal")).write_text("[1]")
    other = ExportOptions(str(folder), (5,) if change == "k" else (3,), "int8" if change == "precision" else "int4")
    said: list[str] = []
    made = run_export(plan_export(other), tmp_path / "b", force=False, report=bundles.IGNORE, say=said.append)
    assert any("starting afresh" in line for line in said)
    assert names(tmp_path) == ["b", "ck"]
    assert is_whole(made.folder)


def test_a_bundle_holds_no_journal(tiny_checkpoint: Make, tmp_path: Path) -> None:
    made = run(plan(tiny_checkpoint(), (3,), "int4"), tmp_path / "b")
    assert {path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()} == {
        *made.manifest.files, "vtx.json", "vtx.json.sha256",
    }  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
def test_a_failure_between_the_two_renames_puts_the_old_bundle_back(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
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


def test_a_bundle_set_aside_by_a_killed_export_comes_back(tiny_checkpoint: Make, tmp_path: Path) -> None:
    aside = run(plan(tiny_checkpoint(), (5,)), tmp_path / ".b.replaced-12345678").folder
    with pytest.raises(ExportError, match="exists already"):
        run(plan(tiny_checkpoint()), tmp_path / "b")
    assert names(tmp_path) == ["b"]
    assert not aside.exists()
    assert Bundle.open(tmp_path / "b").manifest.variants == (5,)


def test_every_file_is_on_the_disk_before_the_bundle_is_in_its_place(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        patch.setattr(export_module, "set_back_after_killed", lambda _: None)
        patch.setattr(place_module, "set_back", lambda *_: None)
        run(plan(tiny_checkpoint()), tmp_path / "b")
    assert len(synced) > 10


def test_the_manifest_is_written_last(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- two exports at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_of_two_exports_to_one_place_the_result_is_one_whole_bundle(
    tiny_checkpoint: Make, tmp_path: Path, force: bool
) -> None:
    plans, meet = [plan(tiny_checkpoint(), (k,)) for k in (3, 5)], threading.Barrier(2, timeout=WAIT)
    won: list[int] = []
    lost: list[BaseException] = []

    def export(number: int) -> None:
        def together(phase: str, done: int, total: int) -> None:
            if phase == "reference" and done == 0:
                meet.wait()

        try:
            run(plans[number], tmp_path / "b", force=force, report=together)
            won.append(number)
        except BaseException as e:
            lost.append(e)

    threads = [threading.Thread(target=export, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won
    assert all(type(e) is ExportError for e in lost), lost
    if not force:
        assert len(lost) == 1
        assert "another export" in str(lost[0])
        assert Bundle.open(tmp_path / "b").manifest.variants == plans[won[0]].ks
    assert names(tmp_path) == ["b"]
    assert is_whole(tmp_path / "b")


# ---- killed ----------------------------------------------------------------------------------------------------------

# One process imports everything once; for each line on its stdin it forks a child that runs the command. The child
# counts its own function calls and sends itself a signal at the one that it was told: moments that no load can shift.
FORKER = """
import os, sys
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
import torch, transformers
torch.set_num_threads(1)
from transformers import LlavaConfig, AutoTokenizer, PreTrainedTokenizerFast
import vtx.exporter.bundling.export, vtx.exporter.reference.golden, vtx.exporter.reference.model
from vtx.cli import export

def child(signal, moment, *words):
    calls, null, answer = 0, os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.setsid(), os.dup2(null, 1), os.dup2(null, 2)

    def step(*_):
        nonlocal calls
        calls += 1
        if calls == int(moment):
            os.kill(os.getpid(), int(signal))

    sys.setprofile(step)
    try:
        export.main(words)
    except SystemExit as e:
        sys.setprofile(None)
        os.write(answer, b"%d " % calls)
        os._exit(e.code or 0)

try:
    export.main(sys.argv[1:])  # so that a child need not import what is imported late
except SystemExit as e:
    assert not e.code
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        child(*line.split("\\t")[:-1])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Exporter:
    """Runs `vtx-export` in processes that stop themselves, without their three seconds of imports."""

    def __init__(self, checkpoint: Path, home: Path) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORKER, "--model", checkpoint, "--out", home / "first"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def __call__(self, *words: object, stop: int = signal.SIGKILL, at: int = 0) -> tuple[int, int]:
        """The exit status, negative for a signal, and the calls made; at call `at` it sends itself `stop`."""
        assert self._process.stdin
        assert self._process.stdout
        print(int(stop), at, *words, "", sep="\t", file=self._process.stdin, flush=True)
        *calls, status = self._process.stdout.readline().split()
        return int(status), int(calls[0]) if calls else 0

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def exporter(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runner = Exporter(tiny_checkpoint(), tmp_path_factory.mktemp("home"))
    yield runner
    runner.close()


@pytest.mark.slow
def test_killed_at_twenty_random_moments_an_export_leaves_nothing_that_loads(
    tiny_checkpoint: Make, tmp_path: Path, exporter: Exporter
) -> None:
    out = tmp_path / "b"
    checkpoint = tiny_checkpoint(Tiny(dtype="bfloat16", shards=3))
    words = ["--model", checkpoint, "--k", "3,5", "--precision", "fp16", "--out", out]
    status, calls = exporter(*words)
    assert status == 0
    shutil.rmtree(out)
    moments, left = random.Random(0), 0
    for number in range(20):
        status, _ = exporter(*words, at=int(calls * (number + moments.random()) / 20))
        assert status in (0, -signal.SIGKILL)
        hidden = [path for path in tmp_path.iterdir() if path != out]
        assert len(hidden) <= 1, "this export did not remove what the one before had left"
        left += len(hidden)
        assert not any(opens(path) for path in hidden if not (path / "vtx.json").exists())
        if out.exists():
            assert is_whole(out)
            shutil.rmtree(out)
    assert left >= 5
    assert exporter(*words)[0] == 0
    assert names(tmp_path) == ["b"]
    assert is_whole(out)


def opens(folder: Path) -> bool:
    try:
        Bundle.open(folder)
    except BundleError:
        return False
    return True


@pytest.mark.slow
def test_killed_in_its_last_moments_an_export_leaves_a_whole_bundle_old_or_new(
    tiny_checkpoint: Make, tmp_path: Path, exporter: Exporter
) -> None:
    """From the first checksum on there are some hundred calls; what is hidden then is whole once it has a manifest."""
    out = tmp_path / "b"
    words = ["--model", tiny_checkpoint(), "--precision", "fp32", "--force", "--out", out, "--k"]
    _, calls = exporter(*words, "3")
    seen: set[tuple[int, ...]] = set()
    for number in range(8):
        exporter(*words, "5", at=int(calls * (0.86 + 0.14 * number / 8)))
        found = [path for path in tmp_path.iterdir() if (path / "vtx.json").exists()]
        assert found
        assert all(map(is_whole, found))
        if out.exists():
            seen.add(Bundle.open(out).manifest.variants)
    assert seen <= {(3,), (5,)}
    exporter(*words, "3")
    assert names(tmp_path) == ["b"]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_an_export_and_leaves_at_most_a_hidden_folder_to_go_on_from(
    tiny_checkpoint: Make, tmp_path: Path, exporter: Exporter, sent: int, status: int
) -> None:
    out = tmp_path / "b"
    words = ["--model", tiny_checkpoint(Tiny(dtype="bfloat16")), "--out", out]
    _, calls = exporter(*words)
    shutil.rmtree(out)
    for number in range(6):
        assert exporter(*words, stop=sent, at=int(calls * (0.05 + 0.15 * number)))[0] == status, number
        assert not out.exists()
        assert len(names(tmp_path)) <= 1
        assert not any(opens(path) for path in tmp_path.iterdir())
    assert exporter(*words)[0] == 0
    assert names(tmp_path) == ["b"]
    assert is_whole(out)


def test_the_directory_of_a_running_export_is_not_taken_for_a_killed_one_s(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def second(phase: str, done: int, total: int) -> None:
        if phase == "reference" and done == 0:
            run(plan(tiny_checkpoint(), (5,)), tmp_path / "b")
            seen.append(names(tmp_path))

    with pytest.raises(ExportError, match="another export"):
        run(plan(tiny_checkpoint(), (3,)), tmp_path / "b", report=second)
    assert len(seen[0]) == 2
    assert names(tmp_path) == ["b"]
    assert Bundle.open(tmp_path / "b").manifest.variants == (5,)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json", "config.json", "model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_refused_before_anything_is_written(
    tiny_checkpoint: Make, tmp_path: Path, name: str
) -> None:
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    (folder / name).unlink()
    with pytest.raises(CheckpointError):
        bundles.export(folder, tmp_path / "b")
    assert names(tmp_path) == ["ck"]


def test_an_exported_bundle_stands_alone(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """The checkpoint may go, and the bundle may move."""
    folder = bundles.copy(tiny_checkpoint(), tmp_path / "ck")
    made = run(plan(folder), tmp_path / "b").folder
    shutil.rmtree(folder)
    made.rename(tmp_path / "c")
    with vtx.load(tmp_path / "c", threads=1).open(random_image(0)) as image:
        assert image.ask("what is it?", options=vtx.Options(max_new_tokens=2)).token_ids


def test_what_an_interrupted_export_left_needs_no_more_room(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
