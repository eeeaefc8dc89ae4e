"""vtx-calibrate, and the exports that take the K it chooses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.bundles import ORT, export
from tests.support.calibrating import GQA, KS, QUESTIONS
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json
from tests.support.tiny import Tiny, random_image
from vtx import cli
from vtx.exporter.bundling.build import fill
from vtx.exporter.calibration.source import open_source
from vtx.runtime.bundle.bundle import Bundle
from vtx.tools.calibration.choosing import Choosing
from vtx.tools.calibration.report import ItemResult, Measurement, make_report, write_report


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with five pictures and questions about them in questions.jsonl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number, question in enumerate(QUESTIONS):
        random_image(number).save(tmp_path / f"{number}.png")
        with (tmp_path / "questions.jsonl").open("a") as file:
            file.write(json.dumps({"image": f"{number}.png", "question": question, "answer": "red"}) + "\n")
    return tmp_path


def vtx(*words: str) -> Result:
    return CliRunner().invoke(cli.main, words)


@pytest.mark.slow
def test_calibrating_writes_report_table_and_plots(tiny_checkpoint: Checkpoints, workplace: Path) -> None:
    model = str(tiny_checkpoint(GQA))
    with (workplace / "questions.jsonl").open("a") as file:
        file.write('{"image": "none.png", "question": "?"}\n')
    words = (
        "calibrate",
        "questions.jsonl",
        "--model",
        model,
        "--k-from",
        "2",
        "--max-new-tokens",
        "4",
        "--out",
        "found",
    )
    done = vtx(*words, "--eta", "1e9", "--max-accuracy-drop", "100", "--attention")
    assert done.exit_code == 0, done.stderr
    assert "line 6" in done.stderr
    assert "predicted, roughly" in done.stderr
    assert "chosen: K = 2 (1 full layers)" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("warning: at K = 2, ")
    assert done.stderr.splitlines()[-1].endswith("vtx-export accepts this K only with --allow-changed-answers")
    names = {"samples.jsonl", "report.json", "kl.png", "accuracy.png", "attention.png"}
    assert {path.name for path in (workplace / "found").iterdir()} == names
    again = vtx(*words, "--eta", "1e-30", "--attention", "--json")
    assert "warning" not in again.stderr.splitlines()[-1], "where no K is chosen there is nothing to warn of"
    report = json.loads(again.stdout)
    assert again.exit_code == 0
    assert report["k"] is None
    assert "smallest mean KL" in report["choices"][0]["notes"][0]
    assert [point["k"] for point in report["curve"]] == list(KS)
    assert len(report["samples"]) == 5
    assert report["data"]["skipped"][0].startswith("line 6")
    assert report == read_json(workplace / "found" / "report.json")
    keys = "format model data confidence k eta min_kept choices curve attention kinds samples"
    assert list(report) == keys.split()
    assert list(report["model"]) == ["name", "fingerprint", "layers"]
    assert list(report["data"]) == ["source", "items", "skipped"]
    assert list(report["choices"][0]) == ["rule", "k", "notes"]
    assert list(report["curve"][1]) == ["k", "full_layers", "kl", "kl_reverse", "top1", "agree", "right", "lost"]
    assert list(report["curve"][1]["kl"]) == ["mean", "low", "high"]
    assert list(report["curve"][1]["top1"]) == ["share", "low", "high", "count"]


def test_a_missing_plot_library_costs_the_plots_alone(
    tiny_checkpoint: Checkpoints, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = vtx(
        "calibrate", "questions.jsonl", "--model", str(tiny_checkpoint(GQA)), "--max-new-tokens", "0", "--out", "o"
    )
    assert done.exit_code == 0
    assert 'pip install "vtx-edge[plot]"' in done.stderr
    assert {path.name for path in (workplace / "o").iterdir()} == {"samples.jsonl", "report.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jsonl"], "none.jsonl"),
        (["--samples", "0"], "--samples"),
        (["--eta", "-1"], "--eta"),
        (["--min-kept", "100"], "--min-kept"),
        (["--k-from", "9"], "must be 2 to 6"),
        (["--batch", "0"], "--batch"),
        (["questions.jsonl", "--max-accuracy-drop", "200"], "--max-accuracy-drop"),
        (["questions.jsonl", "--out", "questions.jsonl"], "--out"),
    ],
)
def test_bad_requests_are_one_line(
    tiny_checkpoint: Checkpoints, workplace: Path, words: list[str], message: str
) -> None:
    done = vtx("calibrate", "--model", str(tiny_checkpoint(GQA)), *words)
    assert done.exit_code == 1
    assert message in done.stderr.splitlines()[-1]
    assert isinstance(done.exception, SystemExit)


def test_options_of_a_checkpoint_do_not_go_with_a_bundle(workplace: Path) -> None:
    refused = vtx("calibrate", "--bundle", "x", "--model", "demo", "--tower", "tower")
    assert refused.exit_code == 1
    assert "--model and --tower cannot be used with --bundle; leave one out" in refused.stderr
    assert "not a bundle" in vtx("calibrate", "--bundle", ".").stderr


def test_a_bundle_is_calibrated_as_it_is_deployed(tiny_checkpoint: Checkpoints, workplace: Path) -> None:
    export(tiny_checkpoint(GQA), workplace / "b", (2, 4), "int4", dialects=ORT)
    words = ("calibrate", "questions.jsonl", "--bundle", "b", "--max-new-tokens", "4", "--device", "cpu")
    done = vtx(*words, "--threads", "1", "--json")
    assert done.exit_code == 0, done.stderr
    assert " by its engine: int4 on cpu in f32: 5 items" in done.stderr
    report = json.loads(done.stdout)
    assert [point["k"] for point in report["curve"]] == [None, 2, 4]
    assert report["model"]["engine"] == "int4 on cpu in f32"
    refused = vtx(*words, "--attention")
    assert refused.exit_code == 1
    assert "an engine does not give its attention; leave out --attention, or --device and" in refused.stderr
    refused = vtx("calibrate", "--threads", "1", "--device", "cpu")
    assert "--device and --threads: only a bundle is measured by its engine; give one with --bundle" in refused.stderr


def write_calibration(model: Path, kept: int | None, count: int) -> None:
    """c/report.json: a tiny mean KL and `kept` unchanged answers of `count` at K = 3; None: they were not compared."""
    Path("c").mkdir()
    source = open_source(str(model))
    rows = [
        ItemResult(
            None, kl=(0.5, 1e-5), kl_reverse=(0.5, 1e-5), top1=(False, True), right=None,
            agree=None if kept is None else (True, False, row < kept),
        )
        for row in range(count)
    ]  # fmt: skip
    choosing = Choosing(min_kept=1)
    write_report(make_report(source.calibrated, "q", Measurement((2, 3), tuple(rows), ()), choosing), Path("c"))


EXPORT = ("export", "--k", "auto", "--calibration", "c", "--precision", "fp32", "--dialect", "ort", "--out", "bundle")


def test_an_export_takes_the_k_of_a_calibration(tiny_checkpoint: Checkpoints, workplace: Path) -> None:
    model = tiny_checkpoint(Tiny(layers=8))
    write_calibration(model, 40, 40)
    done = vtx(*EXPORT, "--model", str(model))
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stderr
    made = Bundle.open("bundle")
    assert made.manifest.variants == (3,)
    assert made.manifest.default_k == 3
    recorded = made.manifest.record["calibration"]
    assert {name: recorded[name] for name in ("k", "rule", "data", "items")} == {
        "k": 3, "rule": "at least 1% of the answers kept", "data": "q", "items": 40,
    }  # fmt: skip
    assert (recorded["kept"]["share"], recorded["kept"]["count"]) == (1.0, 40)
    other = vtx("export", "--model", str(tiny_checkpoint(GQA)), "--k", "auto", "--calibration", "c/report.json")
    assert other.exit_code == 1
    assert "another model" in other.stderr
    again = vtx("calibrate", "questions.jsonl", "--bundle", "bundle", "--max-new-tokens", "0")
    assert again.exit_code == 0, again.stderr
    assert "chosen without comparing answers" in again.stderr.splitlines()[-1] or "no K satisfies it" in again.stdout
    assert Path("vtx-calibration-bundle/report.json").exists()


@pytest.mark.parametrize(
    ("kept", "said"),
    [(7, "35.0% of 20 answers stay the same, 17.8% at the lower end"), (None, "chosen without comparing answers")],
)
def test_a_k_that_changes_answers_is_exported_only_with_consent(
    tiny_checkpoint: Checkpoints, workplace: Path, kept: int | None, said: str
) -> None:
    model = tiny_checkpoint(GQA)
    write_calibration(model, kept, 20)
    words = (*EXPORT, "--model", str(model))
    refused = vtx(*words)
    assert refused.exit_code == 1
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("export: ")]
    assert said in line
    assert "90%" in line
    assert "--allow-changed-answers" in line
    assert not Path("bundle").exists()
    taken = vtx(*words, "--allow-changed-answers")
    assert taken.exit_code == 0, taken.stderr
    assert taken.stderr.splitlines()[-1].startswith("warning: ")
    assert said in taken.stderr.splitlines()[-1]
    record = Bundle.open("bundle").manifest.record
    assert record["options"]["allow_changed_answers"] is True
    assert (record["calibration"]["kept"] or {}).get("share") == (None if kept is None else 0.35)


def test_an_interrupted_export_needs_the_consent_again(
    tiny_checkpoint: Checkpoints, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint(GQA)
    write_calibration(model, 7, 20)
    words = (*EXPORT, "--model", str(model), "--precision", "int8")  # whose weights an export writes itself

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "checksums":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(
            "vtx.exporter.bundling.build.fill", lambda folder, plan, journal, _: fill(folder, plan, journal, interrupt)
        )
        assert vtx(*words, "--allow-changed-answers").exit_code == 130
    refused = vtx(*words)
    assert refused.exit_code == 1
    assert "--allow-changed-answers" in refused.stderr
    assert not Path("bundle").exists()
    resumed = vtx(*words, "--allow-changed-answers")
    assert resumed.exit_code == 0
    assert "resuming an interrupted export" in resumed.stderr


def test_consent_to_nothing_is_refused(workplace: Path) -> None:
    done = vtx("export", "--k", "3", "--allow-changed-answers")
    assert done.exit_code == 2
    assert "--allow-changed-answers is about the K of --k auto" in done.stderr


def test_an_export_calibrates_on_data_and_stops_where_no_k_fits(
    tiny_checkpoint: Checkpoints, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = workplace / "photos"
    photos.mkdir()
    for picture in workplace.glob("*.png"):
        picture.rename(photos / picture.name)
    model = str(tiny_checkpoint(GQA))
    words = ("export", "--model", model, "--k", "auto", "--precision", "fp32", "--calibration", "questions.jsonl")
    done = vtx(*words, "--out", "bundle")
    assert done.exit_code == 1
    assert "give the image directory with --images" in done.stderr
    words = (*words, "--images", "photos", "--out", "bundle")
    done = vtx(*words)
    assert done.exit_code == 1
    assert "calibration picks no K" in done.stderr
    assert "to show 90% takes at least 35 answers, all unchanged; give more --samples" in done.stderr
    assert not (workplace / "bundle").exists()
    monkeypatch.setattr("vtx.tools.calibration.choosing.Choosing", lambda: Choosing(min_kept=1e-9))
    done = vtx(*words)
    assert done.exit_code == 1
    assert "calibration chooses K = 5 (at least 1e-09% of the answers kept, 5 items of questions.jsonl)" in done.stderr
    assert "of 5 answers stay the same" in done.stderr.splitlines()[-1]
    done = vtx(*words, "--allow-changed-answers")
    assert done.exit_code == 0, done.stderr
    assert Bundle.open("bundle").manifest.variants == (5,)


def test_integer_weights_are_refused_with_the_checkpoint_as_it_was_given(
    tiny_checkpoint: Checkpoints, workplace: Path
) -> None:
    model = str(tiny_checkpoint(GQA))
    assert vtx("export", "--model", model, "--precision", "int8", "--dialect", "ort", "--out", "i8").exit_code == 0
    done = vtx("calibrate", "questions.jsonl", "--bundle", "i8")
    assert done.exit_code == 1
    assert f"--model {model} without --bundle" in done.stderr


def test_k_auto_alone_names_both_ways_to_choose(workplace: Path) -> None:
    done = vtx("export", "--k", "auto")
    assert done.exit_code == 1
    assert "--gates FILE" in done.stderr
    assert "--calibration DATA" in done.stderr
    assert vtx("export", "--k", "5", "--calibration", "scenes").exit_code == 2
    assert "--images has no effect" in vtx("export", "--k", "5", "--images", ".").stderr


@pytest.mark.parametrize(
    "broken",
    [
        {"data": []},
        {"choices": []},
        {"choices": [1]},
        {"model": None},
        {"k": True},
        {"curve": []},
        {"curve": [{"k": 5}]},
    ],
)
def test_a_broken_report_chooses_nothing(tiny_checkpoint: Checkpoints, workplace: Path, broken: Any) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    row = ItemResult(None, kl=(1.0,), kl_reverse=(1.0,), top1=(True,), agree=None, right=None)
    report = make_report(source.calibrated, "q", Measurement((5,), (row,), ()), Choosing(2.0)).to_dict()
    (workplace / "report.json").write_text(json.dumps({**report, **broken}, indent=1))
    done = vtx("export", "--model", str(tiny_checkpoint(GQA)), "--k", "auto", "--calibration", "report.json")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)


@pytest.mark.slow
def test_a_tower_and_pickled_weights_are_read_where_they_are_given(
    tiny_checkpoint: Checkpoints, workplace: Path
) -> None:
    pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")
    folder = Path(shutil.copytree(tiny_checkpoint(Tiny(family="llava_llama", pickled=True, shards=2)), "model"))
    (folder / "clip-tower").rename(workplace / "tower")
    question = ("questions.jsonl", "--model", "model")
    ways = {
        "calibrate": ("--max-new-tokens", "0", "--k-from", "8", "--samples", "2"),
        "train-gate": ("--max-new-tokens", "2", "--items", "2", "--held-out", "1", "--width", "8", "--epochs", "1"),
    }
    for name, words in ways.items():
        assert "or --allow-pickle, which reads only the tensors" in vtx(name, *question, *words).stderr
        assert "with --tower PATH" in vtx(name, *question, *words, "--allow-pickle").stderr
        done = vtx(name, *question, *words, "--allow-pickle", "--tower", "tower")
        assert done.exit_code == 0, done.stderr
