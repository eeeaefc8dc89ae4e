"""Metrics beside plain statements of what their authors publish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vtx.tools.data.intervals import effective_count, wilson
from vtx.tools.evaluation.metrics import (
    METRICS,
    agreement,
    judge_choice,
    judge_mme,
    judge_pope,
    normalize,
    normalize_text,
)
from vtx.tools.evaluation.questions import TaskQuestion


def question(*answers: str, image: str = "a", group: str = "", choices: int = 0) -> TaskQuestion:
    return TaskQuestion((Path(image),), "?", answers, image, group, choices)


# --- VQA's normalisation: the six steps that visualqa.org lists --------------------------------------


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("Yes", "yes"),
        ("It is red.", "it is red"),
        ("2.5", "2.5"),
        ("two", "2"),
        ("None", "0"),
        ("a dog and the cat", "dog and cat"),
        ("dont", "don't"),
        ("couldntve", "couldntve"),
        ("couldnt've", "couldn't've"),
        ("100,978", "100978"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("what?!", "what"),
        ("3:30", "3:30"),
        ("line\nbreak", "line break"),
        ("somebody'd", "somebodyd"),
    ],
)
def test_an_answer_is_normalised_as_the_evaluation_server_does(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


def test_textvqa_splits_possessives_and_drops_commas_first() -> None:
    assert normalize_text("Levi's, 501") == "levi 's 501"


@pytest.mark.parametrize(("matches", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_the_soft_score_of_ten_annotators(matches: int, score: float) -> None:
    """As published for ten: 0.3 for one that agrees, 0.6, 0.9, then 1."""
    assert agreement("x", ["x"] * matches + ["y"] * (10 - matches)) == pytest.approx(score)


# --- one answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("Yes", "yes"), ("no", "no"), ("No, there is not.", "no"), ("There is not. Yes", "no"), ("I see it", "yes"),
     ("nothing", "yes"), ("Yes. No doubt", "yes"), ("", "yes")],
)  # fmt: skip
def test_pope_hears_a_no_in_the_first_sentence(text: str, parsed: str) -> None:
    assert judge_pope(question("yes"), text) == (parsed, float(parsed == "yes"))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("Yes.", "yes"), ("y", "yes"), ("N", "no"), ("No, it is", "no"), ("Not", "no"), ("it is yes", "other"),
     ("", "other")],
)  # fmt: skip
def test_mme_looks_at_the_first_four_letters(text: str, parsed: str) -> None:
    assert judge_mme(question("no"), text) == (parsed, float(parsed == "no"))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("B", "B"), ("b", "B"), ("B.", "B"), ("(B)", "B"), ("B. a cat", "B"), ("The answer is B.", "B"), ("E", ""),
     ("A cat", ""), ("cat", ""), ("", ""), ("Because", "")],
)  # fmt: skip
def test_a_choice_is_a_letter_that_stands_alone(text: str, parsed: str) -> None:
    assert judge_choice(question("B", choices=4), text) == (parsed, float(parsed == "B"))


# --- many answers ---------------------------------------------------------------------------------


def figures(task: str, questions: list[TaskQuestion], texts: list[str]) -> dict[str, float]:
    metric = METRICS[task]
    tally = metric.tally(questions, [metric.judge(q, text) for q, text in zip(questions, texts, strict=True)])
    return {name: float(figure(tally.counts.sum(0))) for name, figure in tally.figures.items()}


def test_pope_counts_yes_as_positive() -> None:
    labels = ["yes"] * 6 + ["no"] * 4
    said = ["yes"] * 4 + ["no"] * 2 + ["yes"] * 1 + ["no"] * 3
    found = figures("pope", [question(label, image=str(n)) for n, label in enumerate(labels)], said)
    precision, recall = 4 / 5, 4 / 6
    expected = {
        "accuracy": 0.7, "precision": precision, "recall": recall,
        "f1": 2 * precision * recall / (precision + recall), "yes_ratio": 0.5,
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_pope_without_a_yes_has_figures_of_zero() -> None:
    assert figures("pope", [question("yes")], ["no"])["f1"] == 0


def test_mme_adds_accuracy_and_pairs_of_each_category() -> None:
    """Two images of colour, one pair right; one image of OCR, one of two right; code reasoning all right."""
    pairs = [("color", "1"), ("color", "2"), ("OCR", "1"), ("code_reasoning", "1")]
    asked = [question(label, image=f"{g}/{i}", group=g) for g, i in pairs for label in ("yes", "no")]
    found = figures("mme", asked, ["yes", "no", "yes", "yes", "no", "no", "Yes.", "No"])
    color, ocr, code = 75 + 50, 50 + 0, 100 + 100
    assert found == pytest.approx(
        {"score": color + ocr + code, "perception": color + ocr, "cognition": code, "accuracy": 6 / 8, "plus": 2 / 4}
    )


def test_vqa_accuracy_is_the_mean_soft_score() -> None:
    humans = ["red"] * 3 + ["blue"] * 7
    asked = [question(*humans, image="a"), question(*humans, image="b")]
    assert figures("vqav2", asked, ["Red.", "the blue"]) == pytest.approx({"accuracy": (0.9 + 1) / 2})


# --- intervals ------------------------------------------------------------------------------------


def test_questions_that_fall_together_are_worth_one_an_image() -> None:
    counts = np.full(40, 5.0)
    together = np.where(np.arange(40) % 4, 5.0, 0.0)
    assert effective_count(together, counts) == pytest.approx(39)
    assert effective_count(counts, counts) == 40, "all are right: how they fall together is unknown"
    assert effective_count(np.ones(40), np.ones(40)) == 40


def test_wilson_s_interval_holds_its_share_however_it_is_rounded() -> None:
    for count in range(1, 500):
        for share in (0.0, 1 / count, 1.0):
            low, high = wilson(share, count)
            assert 0.0 <= low <= share <= high <= 1.0


def test_wilson_s_interval_covers_what_it_promises() -> None:
    rng, covered = np.random.default_rng(0), 0
    for hits in rng.binomial(80, 0.85, 2000):
        low, high = wilson(hits / 80, 80)
        covered += low <= 0.85 <= high
    assert 0.93 < covered / 2000 < 0.97
