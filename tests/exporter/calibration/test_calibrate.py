"""Calibration: curves as plain PyTorch states them, the choice of K, resuming, and the commands around it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.bundles import export
from tests.support.exported import THREADS
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx import cli
from vtx.exporter.calibration import source as sources
from vtx.exporter.calibration.calibrate import CalibrationOptions, Measurement, calibrate, forecast
from vtx.exporter.calibration.report import (
    Choosing,
    Point,
    choose_by_accuracy,
    choose_by_eta,
    make_curve,
    make_report,
)
from vtx.exporter.calibration.source import open_source
from vtx.exporter.data import prompts
from vtx.exporter.data.intervals import MeanInterval, ShareInterval, mean_intervals, share_interval
from vtx.exporter.data.items import Data, Item
from vtx.exporter.data.prompts import prepare
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError, RequestError

MHA = Tiny(kv_heads=4, layers=6)
GQA = Tiny(layers=6)
QUESTIONS = ("what is there?", "which shape is red?", "how many circles?", "describe the left square", "what colour?")
ALL = CalibrationOptions(k_from=2, max_new_tokens=6, batch=2)
KS = (None, 2, 3, 4, 5, 6)
Checkpoints = Callable[..., Path]
References = Callable[..., Reference]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sources, "load", functools.partial(load, threads=THREADS))


def questions(images: int = 1, count: int = 5) -> Data:
    items = [Item(tuple(random_image(10 * n + i) for i in range(images)), QUESTIONS[n]) for n in range(count)]
    return Data("questions", tuple(items))


def measure(folder: Path, data: Data, out: Path, options: CalibrationOptions = ALL, **more: Any) -> Measurement:
    return calibrate(open_source(str(folder)), data, options, out, **more)


def stated(model: Reference, item: Item) -> tuple[Any, list[torch.Tensor]]:
    """The inputs of an item, and the next token's log-probabilities at none and every K."""
    inputs = model.inputs(prompt_messages(item.question, len(item.images)), list(item.images))  # type: ignore[arg-type]
    return inputs, [model.logits(inputs, k).double().log_softmax(-1) for k in KS]


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("images", [1, 2])
def test_every_k_is_measured_as_plain_pytorch_states_it(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, tiny: Tiny, images: int
) -> None:
    data, model = questions(images, 3), reference(tiny)
    measured = measure(tiny_checkpoint(tiny), data, tmp_path)
    assert measured.ks == KS[1:]
    agreed = []
    for row, item in zip(measured.results, data.items, strict=True):
        inputs, (full, *withdrawn) = stated(model, item)
        np.testing.assert_allclose(row["kl"], [kl(p, full) for p in withdrawn], rtol=1e-4)
        np.testing.assert_allclose(row["kl_reverse"], [kl(full, p) for p in withdrawn], rtol=1e-4)
        assert row["top1"] == [bool(p.argmax() == full.argmax()) for p in withdrawn]
        answers = [model.greedy(inputs, k, 6).ids for k in KS]
        end = answers[0].index(2) + 1 if 2 in answers[0] else 6
        assert row["agree"] == [ids[:end] == answers[0][:end] for ids in answers]
        assert row["answer"].strip() == model.tokenizer.decode(answers[0][:end], skip_special_tokens=True).strip()
        agreed += row["agree"][1:]
    assert not all(agreed)
    assert np.mean([row["kl"] for row in measured.results]) > 0.01


def test_a_right_answer_is_followed_token_by_token_at_every_k(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = questions(count=2), reference(GQA)
    answers = [model.greedy(stated(model, item)[0], 3, 5).ids for item in data.items]
    wanted = {item.question: np.array(ids) for item, ids in zip(data.items, answers, strict=True)}
    monkeypatch.setattr(prompts, "answer_ids", lambda _, item, __: wanted[item.question])
    for options in (ALL, replace(ALL, max_new_tokens=0)):
        for row, item in zip(
            measure(tiny_checkpoint(GQA), data, tmp_path / str(options), options).results, data.items, strict=True
        ):
            inputs = stated(model, item)[0]
            expected = [model.greedy(inputs, k, 5).ids == wanted[item.question].tolist() for k in KS]
            assert row["right"] == expected
            assert (expected[0], expected[2]) == (False, True)


def test_an_answer_that_reads_as_the_right_one_is_right(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    item, model = questions(count=1).items[0], reference(GQA)
    ids = model.greedy(stated(model, item)[0], None, 4).ids
    folder = tiny_checkpoint(replace(GQA, eos=(2, ids[-1])))
    answer = measure(folder, Data("a", (item,)), tmp_path / "a").results[0]["answer"]
    row = measure(folder, Data("b", (replace(item, answer=f" {answer.strip().upper()}."),)), tmp_path / "b").results[0]
    assert row["right"] == row["agree"]
    assert row["right"][0] is True
    other = measure(folder, Data("c", (replace(item, answer="red"),)), tmp_path / "c").results[0]
    assert other["right"] == [False] * len(KS)


def test_the_right_answers_tokens_continue_the_prompt_and_end(tiny_checkpoint: Checkpoints) -> None:
    source, item = open_source(str(tiny_checkpoint(GQA))), replace(questions(count=1).items[0], answer="red square")
    one = prepare(source, Data("a", (item,)), 6)[0][0]
    assert one.answer_ids is not None
    assert one.answer_ids[-1] == 2
    assert source.text.decode(one.answer_ids).strip() == "red square"
    long = replace(item, answer="red square " * 20)
    assert prepare(source, Data("a", (long,)), 6)[0][0].answer_ids is None


def test_without_answers_only_the_next_token_is_compared(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data, folder = questions(count=2), tiny_checkpoint(GQA)
    with_answers = measure(folder, data, tmp_path / "a").results
    without = measure(folder, data, tmp_path / "b", replace(ALL, max_new_tokens=0)).results
    assert all(row["agree"] is None and row["answer"] is None for row in without)
    np.testing.assert_allclose([r["kl"] for r in without], [r["kl"] for r in with_answers], rtol=1e-4)


def test_attention_is_as_transformers_gives_it(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    data, model = questions(images=2, count=1), reference(GQA)
    row = measure(tiny_checkpoint(GQA), data, tmp_path, replace(ALL, max_new_tokens=0, attention=True)).results[0]
    inputs, _ = stated(model, data.items[0])
    with torch.inference_mode():
        layers = model.model(**inputs, output_attentions=True).attentions
    vision = np.flatnonzero(inputs["input_ids"][0] == model.image_token)
    for found, by_question, weights in zip(
        row["attention"]["answer"], row["attention"]["question"], layers, strict=True
    ):
        mean = weights[0].mean(0).double()
        for shares, rows in ((found, mean[-1:]), (by_question, mean[vision[-1] + 1 :])):
            system, seen = rows[:, : vision[0]].sum(1).mean(), rows[:, vision].sum(1).mean()
            np.testing.assert_allclose(shares, [system, seen, 1 - system - seen, 0], atol=1e-5)
    np.testing.assert_allclose(row["attention"]["steps"], [np.mean(row["attention"]["answer"], 0)])


def test_items_that_cannot_be_asked_are_named_and_too_many_stop(tiny_checkpoint: Checkpoints) -> None:
    source, data = open_source(str(tiny_checkpoint(GQA))), questions()
    long = Item(data.items[0].images, "red " * 300)
    prepared, skipped = prepare(source, replace(data, items=(*data.items, long)), 6)
    assert len(prepared) == 5
    assert "question 6" in skipped[0]
    assert "the limit is 224 of a context of 256" in skipped[0]
    odd = Item(data.items[0].images, "\ud800")
    assert "surrogate" in prepare(source, replace(data, items=(*data.items, odd)), 6)[1][0]
    with pytest.raises(RequestError, match="2 of 7"):
        prepare(source, replace(data, items=(*data.items, long, long)), 6)


@pytest.mark.parametrize(("k_from", "first"), [(None, 5), (2, 2), (6, 6)])
def test_candidates_run_from_five_or_the_first_asked_to_the_last_layer(k_from: int | None, first: int) -> None:
    assert CalibrationOptions(k_from).ks(6) == tuple(range(first, 7))
    assert CalibrationOptions().ks(3) == (3,)


@pytest.mark.parametrize("k_from", [-1, 0, 1, 7])
def test_candidates_out_of_range_are_refused(k_from: int) -> None:
    with pytest.raises(RequestError, match=r"must be 2 to 6"):
        CalibrationOptions(k_from).ks(6)


def test_the_forecast_grows_with_the_items_and_with_answers(tiny_checkpoint: Checkpoints) -> None:
    source, data = open_source(str(tiny_checkpoint(GQA))), questions()
    prepared = prepare(source, data, 6)[0]
    whole, part = forecast(source, prepared, ALL), forecast(source, prepared[:1], ALL)
    assert whole.flops > 4 * part.flops
    assert whole.seconds > 0
    assert forecast(source, prepared, replace(ALL, max_new_tokens=0)).memory < whole.memory


# --- resuming -------------------------------------------------------------------------------------


class Stop(Exception):
    """An interrupt after some layers."""


def stopping_after(count: int) -> Callable[[str, int, int], None]:
    def report(phase: str, done: int, _: int) -> None:
        if phase == "measuring" and done == count:
            raise Stop

    return report


@pytest.mark.parametrize("layers", [7, 18])
def test_an_interrupted_measurement_goes_on_and_gives_the_same(
    tiny_checkpoint: Checkpoints, tmp_path: Path, layers: int
) -> None:
    data, folder = questions(), tiny_checkpoint(GQA)
    whole = measure(folder, data, tmp_path / "whole")
    with pytest.raises(Stop):
        measure(folder, data, tmp_path / "part", report=stopping_after(layers))
    journal = tmp_path / "part" / "samples.jsonl"
    assert len(journal.read_bytes().splitlines()) == 1 + 2 * ((layers - 1) // 6)
    journal.write_bytes(journal.read_bytes() + b'{"item": "torn')
    left = list[int]()
    resumed = measure(
        folder, data, tmp_path / "part", report=lambda phase, _, n: left.append(n) if phase == "measuring" else None
    )
    assert resumed == whole
    assert set(left) == {6 * (3 - (layers - 1) // 6)}
    assert {path.name for path in (tmp_path / "part").iterdir()} == {"samples.jsonl"}


def test_more_samples_are_added_to_those_measured(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data, folder, seen = questions(), tiny_checkpoint(GQA), list[str]()
    first = measure(folder, replace(data, items=data.items[:3]), tmp_path)
    both = measure(folder, data, tmp_path, report=lambda phase, *_: seen.append(phase))
    assert both.results[:3] == first.results
    assert seen.count("measuring") == 6
    assert measure(folder, data, tmp_path, report=stopping_after(1)) == both


def test_a_measurement_of_another_model_or_with_other_options_is_not_continued(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    with pytest.raises(RequestError, match=r"another model.*--out"):
        measure(tiny_checkpoint(GQA, 1), data, tmp_path)
    with pytest.raises(RequestError, match=r"another set of options.*--out"):
        measure(tiny_checkpoint(GQA), data, tmp_path, replace(ALL, k_from=3))
    assert measure(tiny_checkpoint(GQA), data, tmp_path, replace(ALL, batch=1)).results


@pytest.mark.parametrize("line", [b"garbage\n", b"[]\n", b'{"item": 5}\n', b'{"item": "a"}\n{"model": 1}\n'])
def test_a_damaged_journal_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path, line: bytes) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    journal = tmp_path / "samples.jsonl"
    journal.write_bytes(journal.read_bytes() + line)
    with pytest.raises(RequestError, match=r"samples\.jsonl"):
        measure(tiny_checkpoint(GQA), data, tmp_path)


def test_a_row_without_every_k_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    data = questions(count=1)
    measure(tiny_checkpoint(GQA), data, tmp_path)
    journal = tmp_path / "samples.jsonl"
    head, row = journal.read_text().splitlines()
    journal.write_text(head + "\n" + json.dumps({**json.loads(row), "kl": [1.0]}) + "\n")
    with pytest.raises(RequestError, match="no kl for every K"):
        measure(tiny_checkpoint(GQA), data, tmp_path)


# --- bundles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [GQA, replace(GQA, names="saved", dtype="float16", tied=True)], ids=["fp32", "fp16"])
def test_a_bundle_is_measured_as_its_checkpoint(tiny_checkpoint: Checkpoints, tmp_path: Path, tiny: Tiny) -> None:
    data, folder = questions(count=2), tiny_checkpoint(tiny)
    bundle = export(folder, tmp_path / "bundle", precision={"float32": "fp32"}.get(tiny.dtype, "fp16"))
    from_checkpoint = measure(folder, data, tmp_path / "a")
    source = open_source("demo", bundle.folder)
    assert source.fingerprint == open_source(str(folder)).fingerprint
    assert calibrate(source, data, ALL, tmp_path / "b") == from_checkpoint


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_bundle_is_refused_with_its_checkpoint_named(
    precision: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    bundle = export(tiny_checkpoint(GQA), tmp_path / "bundle", precision=precision).folder
    with pytest.raises(BundleError, match=rf"{precision}.* measure the checkpoint .*: --model "):
        open_source("demo", bundle)


@pytest.mark.parametrize("tiny", [GQA, Tiny(vision="siglip", tied=True), Tiny(rope="llama3")])
def test_a_bundle_is_measured_by_the_configuration_that_it_declares(
    tiny: Tiny, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(tiny)
    bundle = export(checkpoint, tmp_path / "bundle").folder
    assert open_source("demo", bundle).config == open_source(str(checkpoint)).config


# --- choosing -------------------------------------------------------------------------------------


def curve(kls: Sequence[float], right: Sequence[float] | None = None, count: int = 100) -> list[Point]:
    """Points at K = none, 5, 6, ... with intervals of a tenth of the mean; `right` has a share for none as well."""
    points = []
    for i, value in enumerate([0.0, *kls]):
        share = None if right is None else ShareInterval(right[i], 0.0, 1.0, count)
        interval = MeanInterval(value, 0.9 * value, 1.1 * value)
        k = i + 4 if i else None
        points.append(Point(k, k and k - 1, interval, interval, None, None, share))
    return points


@pytest.mark.parametrize(
    ("kls", "k"),
    [([0.1, 0.01, 0.002, 0.001], 7), ([0.001, 0.0005], 5), ([0.003, 0.0029], 6), ([0.2, 0.1, 0.05, 0.0], 8)],
)
def test_the_first_k_below_eta_is_chosen(kls: list[float], k: int) -> None:
    assert choose_by_eta(curve(kls), 0.003, 20).k == k


def test_a_curve_that_rises_again_is_chosen_at_its_first_k_and_said() -> None:
    choice = choose_by_eta(curve([0.1, 0.001, 0.02, 0.002, 0.004, 0.001]), 0.003, 20)
    assert choice.k == 6
    assert len(choice.notes) == 1
    assert "not monotone" in choice.notes[0]
    assert "at K = 7, 9" in choice.notes[0]
    assert not choose_by_eta(curve([0.1, 0.001, 0.002, 0.0005]), 0.003, 20).notes


def test_an_interval_that_includes_eta_is_said() -> None:
    choice = choose_by_eta(curve([0.1, 0.0029]), 0.003, 20)
    assert choice.k == 6
    assert "with 20 samples" in choice.notes[0]
    assert "between 0.0026 and 0.0032" in choice.notes[0]


def test_an_eta_out_of_reach_says_the_smallest_kl_and_where() -> None:
    choice = choose_by_eta(curve([0.3, 0.01, 0.02]), 0.003, 20)
    assert choice.k is None
    assert "0.01, at K = 6" in choice.notes[0]


@pytest.mark.parametrize(
    ("right", "drop", "k", "again"),
    [
        ([0.90, 0.50, 0.88, 0.90], 2, 6, ""),
        ([0.90, 0.50, 0.88, 0.90], 1, 7, ""),
        ([0.90, 0.95, 0.88, 0.90], 0, 5, "at K = 6"),
        ([0.90, 0.50, 0.89, 0.80], 1, 6, "at K = 7"),
        ([0.90, 0.50, 0.60, 0.80], 5, None, ""),
    ],
)
def test_the_smallest_k_within_the_accuracy_drop_is_chosen(
    right: list[float], drop: float, k: int | None, again: str
) -> None:
    choice = choose_by_accuracy(curve([1, 1, 1], right, 1000), drop)
    assert choice.k == k
    assert [again] == [note[-8:] if "not monotone" in note else "" for note in [*choice.notes[:1], ""][:1]]
    if k is None:
        assert "10.0 points, at K = 7" in choice.notes[0]


def test_few_answers_are_said_to_be_coarse_and_none_is_an_error() -> None:
    assert "one answer of these 20 is 5 points" in choose_by_accuracy(curve([1], [1, 1], 20), 1).notes[0]
    with pytest.raises(RequestError, match="--max-new-tokens"):
        choose_by_accuracy(curve([1, 1]), 1)


@pytest.mark.parametrize("wrong", [{"eta": 0}, {"eta": float("nan")}, {"max_drop": -1}, {"max_drop": 101}])
def test_rules_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="must be"):
        Choosing(**wrong)


def test_intervals_are_those_of_the_textbooks() -> None:
    assert astuple(share_interval(8, 10)) == pytest.approx((0.8, 0.4902, 0.9433, 10), abs=1e-4)
    assert share_interval(10, 10).high == pytest.approx(1)
    values = np.random.default_rng(1).normal(5, 2, (400, 1))
    found = mean_intervals(np.hstack([values, np.ones((400, 1))]))
    assert found[1] == MeanInterval(1, 1, 1)
    half = 1.96 * values.std() / 20
    assert found[0].low == pytest.approx(values.mean() - half, abs=half / 10)
    assert found[0].high == pytest.approx(values.mean() + half, abs=half / 10)
    assert mean_intervals(values) == mean_intervals(values)


def test_a_curve_counts_only_the_items_that_have_an_answer() -> None:
    rows = [
        {"kl": [0.2, 0.1], "kl_reverse": [0.4, 0.2], "top1": [False, True], "agree": None, "right": right}
        for right in ([True, False, True], None, [True, False, False], None)
    ]
    none, first, second = make_curve(Measurement((5, 6), tuple(rows), ()))
    assert (none.k, first.k, second.full_layers) == (None, 5, 5)
    assert none.kl.mean == 0
    assert first.kl_reverse.mean == pytest.approx(0.4)
    assert [p.right.share for p in (none, first, second)] == [1, 0, 0.5]
    assert none.right.count == 2
    assert none.top1.share == 1
    assert first.agree is None


# --- commands -------------------------------------------------------------------------------------


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
        (["--bundle", "."], "not a bundle"),
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


def test_an_export_takes_the_k_of_a_calibration(tiny_checkpoint: Checkpoints, workplace: Path) -> None:
    model = str(tiny_checkpoint(Tiny(layers=8)))
    words = ("export", "--model", model, "--k", "auto", "--precision", "fp32", "--out", "bundle")
    source = open_source(model)
    measured = calibrate(source, questions(), replace(ALL, max_new_tokens=0), workplace / "c")
    means = np.mean([row["kl"] for row in measured.results], 0)
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


def test_an_export_calibrates_on_data_and_stops_where_no_k_fits(
    tiny_checkpoint: Checkpoints, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_checkpoint(GQA))
    words = ("export", "--model", model, "--k", "auto", "--precision", "fp32", "--calibration", "questions.jsonl")
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


def test_k_auto_alone_names_both_ways_to_choose(workplace: Path) -> None:
    done = vtx("export", "--k", "auto")
    assert done.exit_code == 1
    assert "--gates FILE" in done.stderr
    assert "--calibration DATA" in done.stderr
    assert vtx("export", "--k", "5", "--calibration", "scenes").exit_code == 2


@pytest.mark.parametrize("broken", [{"data": []}, {"choices": []}, {"choices": [1]}, {"model": None}, {"k": True}])
def test_a_broken_report_chooses_nothing(tiny_checkpoint: Checkpoints, workplace: Path, broken: Any) -> None:
    source = open_source(str(tiny_checkpoint(GQA)))
    row = {"kl": [1.0], "kl_reverse": [1.0], "top1": [True], "agree": None, "right": None}
    report = make_report(source, "q", Measurement((5,), (row,), ()), Choosing(2.0)).to_dict()
    (workplace / "report.json").write_text(json.dumps({**report, **broken}, indent=1))
    done = vtx("export", "--model", str(tiny_checkpoint(GQA)), "--k", "auto", "--calibration", "report.json")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
