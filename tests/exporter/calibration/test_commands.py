"""vtx-calibrate, and the exports that take the K it chooses."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.exporter.calibration.measuring import ALL, GQA, KS, QUESTIONS, Checkpoints, questions
from tests.support.tiny import Tiny, random_image
from vtx import cli
from vtx.exporter.calibration.calibrate import calibrate
from vtx.exporter.calibration.measurement import ItemResult, Measurement
from vtx.exporter.calibration.report import (
    Choosing,
    make_report,
)
from vtx.exporter.calibration.source import open_source
from vtx.runtime.bundle.bundle import Bundle


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
    names = {"samples.jsonl", "report.json", "kl.png", "accuracy.png", "attention.png"}
    assert {path.name for path in (workplace / "found").iterdir()} == names
    again = vtx(*words, "--eta", "1e-30", "--attention", "--json")
    report = json.loads(again.stdout)
    assert again.exit_code == 0
    assert report["k"] is None
    assert "smallest mean KL" in report["choices"][0]["notes"][0]
    assert [point["k"] for point in report["curve"]] == list(KS)
    assert len(report["samples"]) == 5
    assert report["data"]["skipped"][0].startswith("line 6")
    assert report == json.loads((workplace / "found" / "report.json").read_text())
    keys = "format model data confidence k eta choices curve attention samples"
    assert list(report) == keys.split()
    assert list(report["model"]) == ["name", "fingerprint", "layers"]
    assert list(report["data"]) == ["source", "items", "skipped"]
    assert list(report["choices"][0]) == ["rule", "k", "notes"]
    assert list(report["curve"][1]) == ["k", "full_layers", "kl", "kl_reverse", "top1", "agree", "right"]
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
    assert "a bundle takes no --model or --tower; leave it out" in refused.stderr
    assert "not a bundle" in vtx("calibrate", "--bundle", ".").stderr


def test_an_export_takes_the_k_of_a_calibration(tiny_checkpoint: Checkpoints, workplace: Path) -> None:
    model = str(tiny_checkpoint(Tiny(layers=8)))
    words = ("export", "--model", model, "--k", "auto", "--precision", "fp32", "--out", "bundle")
    source = open_source(model)
    measured = calibrate(source, questions(), replace(ALL, max_new_tokens=0), workplace / "c")
    means = np.mean([row.kl for row in measured.results], 0)
    eta = float(np.sort(means)[2])
    k = 2 + int(np.argmax(means < eta))
    (workplace / "c" / "report.json").write_text(
        json.dumps(make_report(source, "q", measured, Choosing(eta)).to_dict(), indent=1)
    )
    done = vtx(*words, "--calibration", "c")
    assert done.exit_code == 0, done.stderr
    made = Bundle.open("bundle")
    assert made.manifest.variants == (k,)
    assert made.manifest.default_k == k
    assert made.manifest.record["calibration"] == {"k": k, "rule": f"mean KL < {eta:g}", "data": "q", "items": 5}
    other = vtx("export", "--model", str(tiny_checkpoint(GQA)), "--k", "auto", "--calibration", "c/report.json")
    assert other.exit_code == 1
    assert "another model" in other.stderr
    again = vtx("calibrate", "questions.jsonl", "--bundle", "bundle", "--max-new-tokens", "0")
    assert again.exit_code == 0, again.stderr
    assert Path("vtx-calibration-bundle/report.json").exists()


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
    words = (*words, "--images", "photos")
    done = vtx(*words, "--out", "bundle")
    assert done.exit_code == 1
    assert "calibration picks no K" in done.stderr
    assert "smallest mean KL" in done.stderr
    assert not (workplace / "bundle").exists()
    monkeypatch.setattr("vtx.exporter.calibration.report.Choosing", functools.partial(Choosing, eta=1e9))
    done = vtx(*words, "--out", "bundle")
    assert done.exit_code == 0, done.stderr
    assert "calibration chooses K = 5 (mean KL < 1e+09, 5 items of questions.jsonl)" in done.stderr
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


@pytest.mark.parametrize("broken", [{"data": []}, {"choices": []}, {"choices": [1]}, {"model": None}, {"k": True}])
def test_a_broken_report_chooses_nothing(tiny_checkpoint: Checkpoints, workplace: Path, broken: Any) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    row = ItemResult(None, kl=(1.0,), kl_reverse=(1.0,), top1=(True,), agree=None, right=None)
    report = make_report(source, "q", Measurement((5,), (row,), ()), Choosing(2.0)).to_dict()
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
        assert "with --allow-pickle" in vtx(name, *question, *words).stderr
        assert "with --tower PATH" in vtx(name, *question, *words, "--allow-pickle").stderr
        done = vtx(name, *question, *words, "--allow-pickle", "--tower", "tower")
        assert done.exit_code == 0, done.stderr
