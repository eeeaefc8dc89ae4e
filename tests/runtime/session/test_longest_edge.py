"""Fewer tokens of an image by request, of models that limit its longest edge: transformers' logits, and libvtx's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cpp import assert_budgets_equal, failure, needs_cpp, write_pictures
from tests.support.exported import Models, greedy, prompt
from tests.support.families.pixtral import MISTRAL3, PIXTRAL
from tests.support.fixtures import References
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.errors import ContextError
from vtx.runtime.vision.layout import sized_layout

BUDGETS = (20, 9, 4)
SIZES = ((100, 60), (17, 19), (64, 64), (300, 200), (40, 130), (90, 91))
FEW = replace(PIXTRAL, context=130)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [PIXTRAL, MISTRAL3], ids=["pixtral", "mistral3"])
def test_fewer_tokens_are_a_shorter_edge_with_the_logits_of_transformers(
    models: Models, reference: References, tiny: Tiny
) -> None:
    model, judge, picture = models(tiny, (3, 5)), reference(tiny), random_image(2, (100, 60))
    edges = []
    for tokens in BUDGETS:
        edge = sized_layout(model.loaded.images.layout, tokens, *picture.size).longest  # type: ignore[attr-defined]
        judge.processor.image_processor.size = {"longest_edge": edge}
        messages = prompt_messages("red?")
        inputs = judge.inputs(messages, [picture])
        messages[0]["content"][0]["image_tokens"] = tokens
        asked = prompt(model, messages, [picture])
        assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
        for k in (None, 3):
            expected_answer = judge.greedy(inputs, k, 2)
            answer = greedy(model, asked, k, 2, forced=expected_answer.ids)
            assert_near(answer.logits, expected_answer.logits, 1e-4)
        edges.append(edge)
    judge.processor.image_processor.size = {"longest_edge": tiny.image}
    assert edges == sorted({*edges}, reverse=True)


@needs_cpp
def test_libvtx_sees_each_number_of_tokens_as_python_does(models: Models, tmp_path: Path) -> None:
    assert_budgets_equal(models(PIXTRAL, (3, 5)), write_pictures(tmp_path, SIZES), BUDGETS)


@needs_cpp
def test_the_edge_that_a_long_prompt_needs_counts_the_ends_of_rows_in_both_runtimes(
    models: Models, tmp_path: Path
) -> None:
    """Four images of 64 tokens and 8 ends of rows are too many for 130 slots."""
    model, paths = models(FEW, (3,)), write_pictures(tmp_path, [(64, 64), (64, 63), (63, 64), (63, 63)])
    with pytest.raises(ContextError) as refused, model.open(paths) as conversation:
        conversation.ask("red?", max_new_tokens=1)
    (pixels,) = (int(number) for number in re.findall(r"max_pixels=(\d+)", str(refused.value)))
    folder = model.bundle.folder
    with load(folder, device="cpu", threads=1, max_pixels=pixels) as smaller, smaller.open(paths) as conversation:
        assert conversation.ask("red?", max_new_tokens=1).token_ids
    words = [part for path in paths[1:] for part in ("--image", path)]
    message = failure("run", "--bundle", folder, *words, paths[0], "red?")
    assert f"--max-pixels {pixels} (max_pixels={pixels}) fits" in message
