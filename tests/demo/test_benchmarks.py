"""The drawn benchmark files are read as the real ones, without a bad record, and their own answers score fully."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.json_files import read_json
from vtx.tools.evaluation.formats import FORMATS
from vtx.tools.evaluation.metrics import METRICS
from vtx.tools.evaluation.questions import QuestionFiles, read_questions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmarks").resolve()
    runpy.run_path(str(ROOT / "demo" / "benchmarks.py"))["write"](out, 6)
    return out


@pytest.mark.parametrize("name", ["random", "adversarial"])
def test_half_of_the_drawn_pope_questions_are_about_what_is_there(folder: Path, name: str) -> None:
    found = read_questions(FORMATS["pope"], QuestionFiles(folder / f"pope_{name}.json", folder / "images"))
    labels = [question.answers[0] for question in found.questions]
    assert not found.skipped
    assert labels.count("yes") == labels.count("no") > 6


def test_the_drawn_vqa_answers_agree_after_normalisation(folder: Path) -> None:
    where = QuestionFiles(folder / "vqa_questions.json", folder / "images", folder / "vqa_annotations.json")
    found = read_questions(FORMATS["vqav2"], where)
    annotations = read_json(folder / "vqa_annotations.json")["annotations"]
    assert not found.skipped
    assert {question.group for question in found.questions} == {"number", "other", "yes/no"}
    for question, note in zip(found.questions, annotations, strict=True):
        assert METRICS["vqav2"].judge(question, note["multiple_choice_answer"])[1] == 1
