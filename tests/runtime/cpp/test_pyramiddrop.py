"""PyramidDrop in libvtx on random settings and layouts: answers, tokens and slots are those of Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cpp import ask, expected, needs_cpp
from tests.support.exported import Models
from tests.support.pyramiddrop import CASES, EXPORTED, drawn
from tests.support.reduced import word

pytestmark = needs_cpp


@pytest.mark.sampled(7)
@pytest.mark.parametrize("number", [n for n in CASES if not drawn(n).tiny.family.startswith("qwen")])
def test_random_settings_equal_python(models: Models, tmp_path: Path, number: int) -> None:
    case = drawn(number)
    model, spec = models(case.tiny, (4,), "fp32", (EXPORTED,)), word(case.method)
    paths = [tmp_path / f"{number}.png" for number in range(len(case.images))]
    for path, image in zip(paths, case.images, strict=True):
        image.save(path)
    more = [text for path in paths[1:] for text in ("--image", str(path))]
    questions = (case.question, "red?", case.question)
    for k in ("none", "4"):
        options = ("--k", k, "--reduce", spec, "--max-new-tokens", "6")
        found = ask(model.bundle.folder, paths[0], *questions, *more, *options)
        with model.open(paths) as conversation:
            for question, answer in zip(questions, found, strict=True):
                want = conversation.ask(question, k if k == "none" else int(k), reduce=spec, max_new_tokens=6)
                assert expected(answer) == expected(want.to_dict())
