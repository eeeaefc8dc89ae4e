"""vtx-eval --protocol lmms-eval: prompts byte for byte, and scores where lmms-eval counts in another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.bundles import ORT, export
from tests.support.fixtures import Checkpoints
from tests.support.lmms_prompts import CASES
from tests.support.tiny import Tiny

from vtx import cli
from vtx.tools.evaluation import formats, metrics
from vtx.tools.evaluation.questions import TaskQuestion, read_questions


@pytest.mark.parametrize("task", CASES)
def test_prompts_are_those_of_lmms_eval_byte_for_byte(task: str, tmp_path: Path) -> None:
    """Held to its code where that is installed, by tests/plugins/test_lmms_eval.py."""
    form = formats.LMMS_EVAL.get(task, formats.FORMATS[task])
    [question] = read_questions(form, CASES[task].write(tmp_path)).questions
    assert question.text.encode() == CASES[task].prompt.encode()


def test_the_authors_prompts_differ_where_theirs_do(tmp_path: Path) -> None:
    differing = set()
    for task, case in CASES.items():
        questions = read_questions(formats.FORMATS[task], case.write(tmp_path / task)).questions
        if [question.text for question in questions] != [case.prompt]:
            differing.add(task)
    assert differing == set(formats.LMMS_EVAL) == {"mme", "textvqa", "scienceqa", "vizwiz"}


@pytest.mark.parametrize(
    ("task", "answer", "right", "by_authors", "by_lmms_eval"),
    [
        ("scienceqa", "(A)", "A", 1.0, 0.0),
        ("scienceqa", "A. a leaf", "A", 1.0, 1.0),
        ("scienceqa", "A", "A", 1.0, 1.0),
        ("scienceqa", "a", "A", 1.0, 0.0),
        ("pope", "Yes.", "yes", 1.0, 0.0),
        ("pope", "Yes", "yes", 1.0, 1.0),
        ("pope", "No, there is none", "no", 1.0, 0.0),
        ("seedbench", "A leaf", "A", 0.0, 1.0),
        ("gqa", "Yes.", "yes", 1.0, 1.0),
        ("gqa", "yes it is", "yes", 0.0, 0.0),
    ],
)
def test_scores(task: str, answer: str, right: str, by_authors: float, by_lmms_eval: float) -> None:
    question = TaskQuestion((), "?", (right,), "a.jpg", choices=3)
    assert metrics.METRICS[task].judge(question, answer)[1] == by_authors
    assert metrics.LMMS_EVAL.get(task, metrics.METRICS[task]).judge(question, answer)[1] == by_lmms_eval


def test_an_answer_of_pope_that_is_neither_counts_against_accuracy_alone() -> None:
    questions = [TaskQuestion((), "?", ("yes",), f"{n}.jpg") for n in range(4)]
    metric = metrics.LMMS_EVAL["pope"]
    scores = [
        metric.judge(question, text) for question, text in zip(questions, ["yes", "yes", "no", "maybe"], strict=True)
    ]
    tally = metric.tally(questions, scores)
    figures = {name: float(figure(tally.counts.sum(0))) for name, figure in tally.figures.items()}
    assert (figures["accuracy"], figures["precision"]) == (0.5, 1.0)
    assert figures["recall"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_the_command_takes_the_protocol(
    tmp_path: Path, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export(tiny_checkpoint(Tiny()), tmp_path / "b", (3,), dialects=ORT)
    CASES["mme"].write(tmp_path / "mme")
    words = ["mme", "mme", "--bundle", "b", "--no-times", "--max-new-tokens", "2", "--k", "none", "--json"]
    told = {}
    for protocol in ("authors", "lmms-eval"):
        done = CliRunner().invoke(cli.evaluate, [*words, "--protocol", protocol, "--out", protocol])
        assert done.exit_code == 0, done.stderr
        told[protocol] = json.loads(done.stdout)["task"]
    assert told["authors"]["instruction"] == ""
    assert told["lmms-eval"]["instruction"] == formats.SHORT
    assert [told[name]["protocol"] for name in told] == ["authors", "lmms-eval"]
