"""Drawn pages: labels and answers are what stands on them, and their reader's optimizer is PyTorch's."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.pages import ASKED, equal, lines, row
from PIL import Image

from vtx.tools.bench.methods import Method
from vtx.tools.evaluation.ask import Asked, CostedAnswer
from vtx.tools.evaluation.questions import TaskQuestion

ROOT = Path(__file__).resolve().parents[2]
PAGES = 5


@pytest.fixture(scope="module")
def pages() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "demo" / "pages.py"))


def test_each_character_is_on_a_patch_that_is_not_white(pages: dict[str, Any]) -> None:
    rng = random.Random(1)
    for _ in range(PAGES):
        page = pages["random_page"](rng)
        labels = pages["page_labels"](page, 7)
        ink = 255 - np.asarray(pages["draw_page"](page).convert("L"), np.int64)
        by_patch = ink.reshape(7, 8, 7, 8).sum((1, 3)).reshape(-1)
        for glyph, line, column, _, _ in page.glyphs():
            shown = (labels == (1 + pages["GLYPHS"].index(glyph), line, column)).all(1)
            assert shown.any()
            assert by_patch[shown].max() > 255


def test_the_questions_written_have_answers_that_stand_on_the_page(pages: dict[str, Any], tmp_path: Path) -> None:
    pages["write"](tmp_path, PAGES)
    records = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    whole = {one["image"]: one["answer"] for one in records if ASKED[one["question"].split()[0]] == "all"}
    assert len(whole) == PAGES
    for record in records:
        first, last = record["question"].rstrip(".?").split()[:: len(record["question"].split()) - 1]
        page = lines(whole[record["image"]])
        kind = ASKED[first]
        if kind == "line":
            assert record["answer"] == page[int(last) - 1]
        if kind == "number":
            assert f"{last} {record['answer']}" in page
        if kind == "letter":
            assert record["answer"] == ("yes" if last in {line[0] for line in page} else "no")
        with Image.open(tmp_path / record["image"]) as image:
            assert image.size == (56, 56)


def test_parts_of_an_answer_are_right_at_their_places_alone() -> None:
    assert equal("abcd", "axc") == [True, False, True, False]
    assert equal("ab", "abcd") == [True, True]
    assert equal(lines("e 471 s 002"), lines("s 002 e 471")) == [False, False]
    assert equal(lines("e 471 s 002"), lines("e 471 t 002 a 111")) == [True, False]


def test_a_row_has_shares_of_characters_lines_and_answers() -> None:
    whole = TaskQuestion((), "read all.", ("e 471 s 002",), "a.png")
    one = TaskQuestion((), "line 1?", ("e 471",), "a.png")
    replies = [CostedAnswer(text, None, 0, 0, tokens, 3, 1) for text, tokens in ((" e 471 s 102", 4), ("e 471", 6))]
    asked = Asked((whole, one), (Method(3),), tuple((reply,) for reply in replies), ())
    cells = row(asked, Method(3), replies)
    assert cells.pop("image tokens") == "5.0"
    shares = {name: cell[0] for name, cell in cells.items() if name}
    assert shares == {
        "characters of a page": "87.5",
        "lines of a page": "50.0",
        "whole pages": "0.0",
        "a line": "100.0",
    }


def test_muon_in_float32_is_pytorchs_but_for_bfloat16() -> None:
    muon = runpy.run_path(str(ROOT / "demo" / "muon.py"))["Float32Muon"]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((24, 48), (48, 24), (24, 48))] for _ in "ab")
    optimizers = (
        muon(ours, lr=0.01, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        moved = (1 - other).norm()
        assert (own - other).norm() < 0.02 * moved
