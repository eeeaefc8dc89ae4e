"""--k card in the commands: by the form that the options, or the line of a batch, ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support import bundles
from tests.support.exported import Models
from tests.support.kinds import depth, write_kinds
from tests.support.tiny import Tiny, random_image
from vtx import cli
from vtx.runtime.bundle.card import CHOICE, TEXT, YES_NO


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    folder = bundles.copy(models(Tiny(context=512), (2, 5, 8)).bundle.folder, tmp_path / "bundle")
    write_kinds(folder, [depth(YES_NO, 2), depth(CHOICE, 5, 0.1), depth(TEXT, 8, 0.4)])
    random_image(0).save(tmp_path / "a.png")
    return folder


def invoke(command: str, *words: object) -> Result:
    return CliRunner().invoke(getattr(cli, command), [str(word) for word in words])


@pytest.mark.parametrize(
    ("form", "k", "rest"), [((), 8, 7), (("--choices", "yes,no"), 2, 0), (("--choices", "a,b"), 5, 2)]
)
def test_vtx_run_takes_it_by_its_form(folder: Path, form: tuple[str, ...], k: int, rest: int) -> None:
    asked = ("--bundle", folder, folder.parent / "a.png", "red?", "--k", "card", "--json", "--threads", 1)
    done = invoke("run", *asked, *form, "--max-new-tokens", 4)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["k"], answer["rest"]) == (k, rest)


def test_each_line_of_a_batch_takes_it_by_its_own_form(folder: Path) -> None:
    lines = [{"image": "a.png", "question": "red?"}, {"image": "a.png", "question": "red?", "choices": ["yes", "no"]},
             {"image": "a.png", "question": "red?", "k": "none"}]  # fmt: skip
    file, out = folder.parent / "lines.jsonl", folder.parent / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = invoke("batch", file, out, "--bundle", folder, "--k", "card", "--max-new-tokens", 4, "--threads", 1)
    assert done.exit_code == 0, done.output
    answers = sorted(map(json.loads, out.read_text().splitlines()), key=lambda answer: answer["line"])
    assert [answer["k"] for answer in answers] == [8, 2, None]


def test_the_doctor_shows_the_kinds_of_a_card(folder: Path) -> None:
    done = invoke("doctor", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    for words in (["yes", "or", "no", "2", "-"], ["choice", "5", "10%"], ["quoted", "text", "8", "40%"]):
        assert any(row[: len(words)] == words for row in rows)
