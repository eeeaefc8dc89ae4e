"""Accuracy against coverage: plain counts, and a threshold only where the accuracy is shown."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support import bundles
from tests.support.cards import card_of
from tests.support.exported import Models
from tests.support.json_files import read_json
from tests.support.tiny import random_image

from vtx.cli import evaluate
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import read_card, write_card
from vtx.runtime.errors import RequestError
from vtx.tools.evaluation.coverage import THRESHOLDS, ScoredAnswers, check_target


def drawn(count: int, seed: int) -> ScoredAnswers:
    """Answers that are right as often as their probability says."""
    rng = random.Random(seed)
    probabilities = [rng.random() ** 0.2 for _ in range(count)]
    return ScoredAnswers(probabilities, [float(rng.random() < p) for p in probabilities], list(range(count)))


def test_points_are_plain_counts() -> None:
    answers = drawn(400, 1)
    for point in answers.points():
        scores = [score for score, p in zip(answers.scores, answers.probabilities, strict=True) if p >= point.threshold]
        assert (point.accepted, point.coverage) == (len(scores), len(scores) / 400)
        if scores:
            assert point.accuracy == pytest.approx(sum(scores) / len(scores))
            assert point.low is not None
            assert point.high is not None
            assert 0 <= point.low <= point.accuracy <= point.high <= 1
        else:
            assert point.accuracy is None
    assert [point.threshold for point in answers.points()] == list(THRESHOLDS)


@pytest.mark.slow
def test_a_threshold_is_wrong_in_at_most_one_of_twenty_searches() -> None:
    """Of these answers the accuracy above a threshold is known: the mean of probabilities above it."""
    target, wrong, given = 0.9, 0, 0
    population = drawn(20_000, 9999).probabilities
    for seed in range(200):
        acceptance = drawn(300, seed).acceptance(target, "q", "m")
        if acceptance is None:
            continue
        given += 1
        many = [p for p in population if p >= acceptance.threshold]
        wrong += sum(many) / len(many) < target
        assert acceptance.low <= acceptance.accuracy
        assert acceptance.low >= target - 1e-6
    assert given > 120
    assert wrong <= 0.05 * given + 6


def test_without_evidence_there_is_no_threshold() -> None:
    few = ScoredAnswers([0.9] * 5, [1.0] * 5, list(range(5)))
    assert few.acceptance(0.95, "q", "m") is None
    bad = ScoredAnswers([0.9] * 300, [0.0] * 300, list(range(300)))
    assert bad.acceptance(0.5, "q", "m") is None
    sure = ScoredAnswers([0.9] * 300, [1.0] * 300, list(range(300)))
    acceptance = sure.acceptance(0.95, "q", "m")
    assert acceptance is not None
    assert (acceptance.threshold, acceptance.coverage, acceptance.accuracy) == (0.0, 1.0, 1.0)
    for target in (0.0, 1.0, 95.0, float("nan")):
        with pytest.raises(RequestError, match="an accuracy between 0 and 1"):
            check_target(target)


@pytest.mark.slow
def test_the_command_writes_the_threshold_into_the_card(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    folder = bundles.copy(models(ks=(2,)).bundle.folder, tmp_path / "bundle")
    write_card(folder, card_of(Bundle.open(folder), 2, "none"))
    lines = list[dict[str, str]]()
    wanted = list[float]()
    questions = [f"question {number}?" for number in range(12)]
    with load(folder, threads=1) as model:
        for number, question in enumerate(questions):
            random_image(number).save(tmp_path / f"{number}.png")
            with model.open(random_image(number)) as image:
                own = image.ask(question, choices=["yes", "no"])
            assert own.choices is not None
            assert own.choices_mass is not None
            lines.append({"image": f"{number}.png", "question": question, "answer": own.text})
            wanted.append(own.choices[own.text] * own.choices_mass)
    data = tmp_path / "q.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    words = ["exact", str(data), "--bundle", str(folder), "--device", "cpu", "--threads", "1", "--no-times"]
    words += ["--choices", "yes,no", "--json", "--instruction", ""]

    def said(*more: str, code: int = 0) -> str:
        done = CliRunner().invoke(evaluate, [*words, "--out", str(tmp_path / "out"), *more])
        assert done.exit_code == code, done.output
        return done.output if code else done.stdout + done.stderr

    before = (folder / "card.json").read_bytes()
    said("--coverage", "0.99")  # twelve answers do not show that
    assert (folder / "card.json").read_bytes() == before
    output = said("--coverage", "0.7")
    report = read_json(tmp_path / "out" / "report.json")
    [method] = report["methods"]
    assert method["k"] == 2, "the bundle's default"
    assert method["coverage"][-1]["coverage"] == 1.0
    assert method["figures"]["accuracy"]["value"] == 1.0
    card = read_card(Bundle.open(folder))
    assert card is not None
    assert card.accept is not None
    assert card.accept.questions == 12
    assert "--accept card applies it" in output
    assert dataclasses.replace(card, accept=None) == card_of(Bundle.open(folder), 2, "none")
    saved = (tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8")
    known = map(float, re.findall(r'"probability": ?([^,}]+)', saved))
    assert sorted(known) == pytest.approx(sorted(wanted), rel=1e-3)
    assert (
        "--coverage needs the probabilities of choices: add --choices"
        in CliRunner().invoke(evaluate, [*words[:8], "--coverage", "0.9"]).output
    )
