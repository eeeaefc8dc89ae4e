"""The forecast of an export's time: every phase, at measured rates, less what an interrupted export has finished."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import IGNORE, copy
from tests.support.tiny import Tiny
from vtx.commands.shared.progress import ALL, Bars
from vtx.exporter.bundling import forecast as forecasting
from vtx.exporter.bundling import rates
from vtx.exporter.bundling.export import Plan, plan_export, run_export
from vtx.exporter.bundling.forecast import Forecast, forecast
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.rates import Disk, Pace, cached_share, form_of, measure_disk, measure_paces, product_speed
from vtx.exporter.weights.journal import PROBE, ExportJournal
from vtx.runtime.bundle.safetensors import read_header, read_tensor, write_safetensors
from vtx.runtime.units import duration

Make = Callable[..., Path]
WRITE, READ = 2.0, 0.5  # seconds a byte and an element
DISK = Disk(read=1e12, write=1e12, sync=0.0)


def plan(folder: Path, precision: str = "int8", ks: tuple[int, ...] = (), **options: Any) -> Plan:
    return plan_export(ExportOptions(str(folder), ks, precision, dialects=("ort",), **options))


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written takes 2 s a byte, whatever is read 0.5 s an element, and all else nothing."""

    def paces(files: Any, _: Path) -> dict[rates.Form, Pace]:
        return {form_of(file, entry): Pace(WRITE, READ) for file in files for entry in file.entries}

    monkeypatch.setattr(forecasting, "measure_paces", paces)
    monkeypatch.setattr(forecasting, "measure_disk", lambda *_: DISK)
    monkeypatch.setattr(forecasting, "product_speed", lambda *_: 1e18)
    monkeypatch.setattr(forecasting, "seconds_of", lambda _: 0.0)


def expected(plan_: Plan, out: Path, stop: Callable[[str, int, int], None] = IGNORE) -> dict[str, float]:
    """What an export expects before it goes on until `stop` stops it."""
    found: list[Forecast] = []
    with contextlib.suppress(KeyboardInterrupt):
        run_export(
            plan_,
            out,
            force=True,
            report=stop,
            begun=lambda folder, journal: found.append(forecast(plan_, folder, journal)),
        )
    return found[0].phases


def stopping_at(phase: str, share: float) -> Callable[[str, int, int], None]:
    def stop(name: str, done: int, total: int) -> None:
        if name == phase and done >= share * total:
            raise KeyboardInterrupt

    return stop


# ---- what is added up ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_rates")
def test_weights_cost_their_source_bytes_and_golden_vectors_their_elements(
    tiny_checkpoint: Make, tmp_path: Path
) -> None:
    plan_ = plan(tiny_checkpoint())
    phases = forecast(plan_, tmp_path, ExportJournal(tmp_path)).phases
    entries = [entry for file in plan_.weights.files for entry in file.entries]
    assert phases["weights"] == pytest.approx(WRITE * sum(entry.source.nbytes for entry in entries), rel=1e-6)
    read = sum(prod(entry.source.shape) for entry in entries if "embed_tokens" not in entry.name)
    assert phases["reference"] == pytest.approx(READ * read, rel=1e-3)
    assert "thresholds" not in phases


@pytest.mark.usefixtures("known_rates")
def test_layers_from_the_first_k_on_are_read_twice(tiny_checkpoint: Make, tmp_path: Path) -> None:
    none, at_3 = (
        forecast(plan_, tmp_path, ExportJournal(tmp_path)).phases["reference"]
        for plan_ in (plan(tiny_checkpoint()), plan(tiny_checkpoint(), ks=(5, 3)))
    )
    layers = plan(tiny_checkpoint()).config.text.layers
    stored = plan(tiny_checkpoint()).weights.stored
    layer = sum(prod(tensor.shape) for name, tensor in stored.items() if name.startswith("text.layers.0."))
    assert at_3 - none == pytest.approx(READ * layer * (layers - 2), rel=1e-3)


@pytest.mark.usefixtures("known_rates")
def test_a_disk_slower_than_the_processor_decides(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ = plan(tiny_checkpoint())
    monkeypatch.setattr(forecasting, "measure_disk", lambda *_: replace(DISK, write=1e-3))
    phases = forecast(plan_, tmp_path, ExportJournal(tmp_path)).phases
    assert phases["weights"] == pytest.approx(1e3 * sum(file.size for file in plan_.weights.files), rel=1e-6)


@pytest.mark.usefixtures("known_rates")
def test_a_linked_file_is_not_written(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(tiny_checkpoint(Tiny(dtype="float32")), tmp_path / "checkpoint")
    plan_ = plan(folder, "fp32")
    monkeypatch.setattr(forecasting, "measure_disk", lambda *_: replace(DISK, write=1e-9))
    phases = forecast(plan_, tmp_path, ExportJournal(tmp_path)).phases
    assert all(file.whole for file in plan_.weights.files)
    assert phases["weights"] < 1e3 * WRITE * sum(file.size for file in plan_.weights.files)


# ---- after an interruption -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_rates")
def test_what_an_interrupted_export_has_written_is_not_counted_again(tiny_checkpoint: Make, tmp_path: Path) -> None:
    plan_, out = plan(tiny_checkpoint()), tmp_path / "b"
    whole = expected(plan_, out, stopping_at("weights", 0.5))
    [left] = tmp_path.glob(".b.partial-*")
    [written] = ExportJournal(left).tensors.values()
    [file] = plan_.weights.files
    rest = WRITE * sum(entry.source.nbytes for entry in file.entries[len(written) :])
    assert 0 < rest < whole["weights"]
    half = expected(plan_, out, stopping_at("reference", 0.5))
    assert half["weights"] == pytest.approx(rest, rel=1e-6)
    assert half["reference"] == whole["reference"]
    golden = expected(plan_, out, stopping_at("checksums", 0.5))
    assert golden["weights"] == 0
    assert golden["reference"] == whole["reference"]
    assert "reference" not in expected(plan_, out)
    assert (out / "vtx.json").is_file()


def test_what_the_machine_was_measured_with_is_no_part_of_the_bundle(tiny_checkpoint: Make, tmp_path: Path) -> None:
    plan_, out = plan(tiny_checkpoint()), tmp_path / "b"
    expected(plan_, out, stopping_at("weights", 0.5))
    [left] = tmp_path.glob(".b.partial-*")
    (left / PROBE).write_bytes(b"left by an export that was killed while it measured")
    made = run_export(plan_, out, force=False, report=IGNORE)
    assert PROBE not in made.manifest.files
    assert not (out / PROBE).exists()


# ---- measured rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float16", "fp16"), ("float32", "bf16"), ("bfloat16", "int4"), ("float16", "int8"), ("bfloat16", "fp32")],
)
def test_every_form_of_a_plan_is_measured_and_nothing_is_left(
    dtype: str, precision: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    plan_ = plan(tiny_checkpoint(Tiny(dtype=dtype, shards=2)), precision)
    paces = measure_paces(plan_.weights.files, tmp_path)
    assert set(paces) == {form_of(file, entry) for file in plan_.weights.files for entry in file.entries}
    assert all(pace.write > 0 and pace.read > 0 for pace in paces.values())
    found = forecast(plan_, tmp_path, ExportJournal(tmp_path))
    assert found.seconds == pytest.approx(sum(found.phases.values()))
    assert all(seconds > 0 for seconds in found.phases.values())
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_no_graph_uses_are_not_taken_for_weights(tiny_checkpoint: Make, tmp_path: Path) -> None:
    """A file taken whole may hold what would be no number as a weight."""
    folder = copy(tiny_checkpoint(Tiny(dtype="float16")), tmp_path / "checkpoint")
    [path] = folder.glob("*.safetensors")
    tensors = {name: read_tensor(info) for name, info in read_header(path).tensors.items()}
    write_safetensors(path, {"a.position_ids": np.full(4096, -1, np.int64), **tensors}, {"format": "pt"})
    plan_ = plan(folder, "fp16")
    assert plan_.weights.files[0].whole
    assert forecast(plan_, tmp_path, ExportJournal(tmp_path)).seconds > 0


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, [], 0)
    assert min(found.read, found.write, found.sync) > 0
    (tmp_path / PROBE).unlink(missing_ok=True)
    assert list(tmp_path.iterdir()) == []
    assert product_speed(512, 512, 16) > 1e6


def test_what_is_in_memory_is_found_without_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_share(path) in (0.0, 1.0)  # 0 where the file system cannot say

    def half(_: int, __: Any, start: int, flags: int) -> int:
        if start < 1 << 19:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", half)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    assert cached_share(path) == 0.5
    monkeypatch.delattr(os, "preadv")
    assert cached_share(path) == 0.0


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_the_bars_show_bytes_and_what_is_left_of_all_phases() -> None:
    from rich.console import Console
    from rich.progress import Progress

    now = [0.0]
    progress = Progress(console=Console(file=StringIO()), get_time=lambda: now[0])
    bars = Bars(progress)
    bars.expect({"weights": 4.0, "reference": 30.0})
    assert (bars.left("weights"), bars.left("reference")) == (4, 30)
    bars("weights", 0, 4_000_000)
    for now[0] in (1.0, 2.0):
        bars("weights", int(now[0]) * 1_000_000, 4_000_000)
    assert bars.left("weights") == 2
    tasks = {task.description: task for task in progress.tasks}
    assert tasks["weights"].fields["amount"] == "2 MB of 4 MB, 1 MB/s"
    assert tasks[ALL].fields["left"] == "32 s"
    now[0] = 4.0
    bars("weights", 4_000_000, 4_000_000)
    assert bars.left("weights") == 0
    bars("reference", 1, 3)
    assert tasks["reference"].fields["amount"] == "1 of 3"
    assert bars.left("reference") == pytest.approx(20)


@pytest.mark.parametrize(("seconds", "told"), [(30, "about 120 s, not 40 s"), (2, "about 8.4 s, not 40 s"), (12, "")])
def test_phases_to_come_are_forecast_again_by_the_pace_of_those_before_them(seconds: int, told: str) -> None:
    from rich.console import Console
    from rich.progress import Progress

    now, screen = [0.0], StringIO()
    progress = Progress(console=Console(file=screen, width=200), get_time=lambda: now[0])
    bars = Bars(progress)
    bars.expect({"graphs": 0.1, "weights": 9.9, "reference": 30.0})
    now[0] = 0.4
    bars("graphs", 1, 1)
    assert bars.left("reference") == 30, "a small part of the work says nothing of the rest"
    bars("weights", 0, 100)
    now[0] += seconds
    bars("weights", 100, 100)
    assert bars.left("reference") == pytest.approx(30 * seconds / 10)
    assert told in screen.getvalue()
    assert ("forecast again" in screen.getvalue()) == bool(told)


def test_neither_short_phases_nor_tiny_tensors_at_a_start_change_a_forecast() -> None:
    from rich.console import Console
    from rich.progress import Progress

    now, screen = [0.0], StringIO()
    progress = Progress(console=Console(file=screen, width=200), get_time=lambda: now[0])
    bars = Bars(progress)
    bars.expect({"graphs": 0.3, "weights": 1.7})
    for graphs in (1, 2, 3):
        now[0] += 0.1
        bars("graphs", graphs, 3)
    assert bars.left("weights") < 2, "a phase of less than a second is not rounded up to one"
    bars.expect({"weights": 10.0, "reference": 30.0})
    for tensor in range(20):  # 10 kB a second of 100 MB
        now[0] += 0.01
        bars("weights", 100 * tensor, 100_000_000)
    assert bars.left("weights") == pytest.approx(10, abs=0.1)
    assert "forecast again" not in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (84.6, "85 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations_are_told_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert duration(seconds) == words
