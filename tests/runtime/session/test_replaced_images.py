"""Images of a conversation that are replaced: answers are those of fresh ones, and what did not change is not run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.exported import Models
from tests.support.families.internvl import INTERNVL
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN3
from tests.support.families.smolvlm import SMOLVLM
from tests.support.replacing import QUESTION, SYSTEM, asked, check
from tests.support.sequences import same_answer
from tests.support.tiny import Tiny, marked, random_image
from vtx.runtime.errors import RequestError

TILED = {"internvl": INTERNVL, "smolvlm": SMOLVLM}


@pytest.mark.sampled
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("family", TILED)
def test_tiles_before_the_first_changed_one_are_not_run_again(models: Models, family: str, k: int | None) -> None:
    model, wide = models(TILED[family], (3,)), random_image(4, (150, 60))
    with model.open(wide, system=SYSTEM) as held:
        held.ask(QUESTION, k)
        late, whole = check(model, held, marked(wide, 0.95), k)
        early, _ = check(model, held, marked(wide, 0.01), k)
        image = held.images[0].tokens
    assert whole - late > image / 2
    assert late < early < whole  # the system text alone is left


@pytest.mark.parametrize("k", [None, 3])
def test_images_and_text_before_the_one_that_changes_are_not_run_again(models: Models, k: int | None) -> None:
    model, empty = models(Tiny(context=512), (3,)), random_image(1)
    with model.open([empty, random_image(2)], system=SYSTEM) as held:
        held.ask(QUESTION, k)
        for seed in (3, 4):
            run, whole = check(model, held, [empty, random_image(seed)], k)
            assert run <= whole - held.images[0].tokens


@pytest.mark.parametrize("k", [None, 3])
def test_what_an_image_adds_after_layers_is_compared_too(models: Models, k: int | None) -> None:
    model, wide = models(replace(QWEN3), (3,)), random_image(5, (150, 60))
    with model.open([wide, random_image(2)], system=SYSTEM) as held:
        held.ask(QUESTION, k)
        run, whole = check(model, held, [wide, random_image(3)], k)
        assert run < whole


def test_a_prompt_that_sees_itself_both_ways_is_run_as_a_whole(models: Models) -> None:
    model, first = models(PALIGEMMA, (3,)), random_image(1)
    with model.open([first, random_image(2)]) as held, model.open([first, random_image(3)]) as fresh:
        held.ask(QUESTION, 3)
        held.replace([first, random_image(3)])
        answer, logits, run = asked(held, 3)
        wanted, wanted_logits, whole = asked(fresh, 3)
    same_answer(answer, logits, wanted, wanted_logits, 2e-5)
    assert run == whole


def test_a_method_that_ranks_all_tokens_runs_all_of_them(models: Models) -> None:
    """Their hidden states at its layer are not kept; only text before the first image is reused."""
    model, empty = models(Tiny(context=512), (3,), reductions=("fastv:k=3",)), random_image(1)
    with model.open([empty, random_image(2)], system=SYSTEM) as held:
        held.ask(QUESTION, None, reduce="fastv:k=3")
        for reduce in ("fastv:k=3", "none", "fastv:k=3"):
            check(model, held, [empty, random_image(3)], None, reduce)
            check(model, held, [empty, random_image(4)], None, reduce)


def test_a_chat_about_images_that_were_replaced_is_refused_and_an_answer_to_come_is_cancelled(models: Models) -> None:
    model = models(Tiny(context=512), (3,))
    with model.open(random_image(1)) as held:
        chat, stream = held.chat(), held.stream(QUESTION)
        held.replace(random_image(2))
        with pytest.raises(RequestError, match="images of this chat were replaced; start another one"):
            chat.ask(QUESTION)
        assert stream.read().stopped == "cancelled"
        assert held.ask(QUESTION).token_ids == model.open(random_image(2)).ask(QUESTION).token_ids
        assert np.array_equal(held.images[0].views, model.loaded.images.prepare(random_image(2)).views)
