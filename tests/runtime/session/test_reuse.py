"""The beginning of a prompt that caches hold is taken from them, whoever filled them; else answers say why not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.exported import QUESTIONS, Models
from tests.support.families.paligemma import PALIGEMMA
from tests.support.replacing import QUESTION, SYSTEM, asked, check
from tests.support.tiny import Tiny, random_image
from vtx.runtime.bundle.spec import names
from vtx.runtime.session.prefix import Key, Prefix, Remaining

FASTV = "fastv:k=3"


def test_an_image_that_comes_back_is_in_the_stages_that_another_one_did_not_reach(models: Models) -> None:
    model, image, other = models(Tiny(context=512), (3,)), random_image(1), random_image(2)
    with model.open(image, system=SYSTEM) as held:
        held.ask(QUESTION, None)
        check(model, held, other, 3)
        run, whole = check(model, held, image, None)
        tokens = held.images[0].tokens
    assert whole - run > tokens * (len(model.manifest.stages) - 1)  # the first stage alone ran them


def test_text_before_an_image_that_a_question_chooses_tokens_of_is_not_run_again(models: Models) -> None:
    model = models(Tiny(context=512), (3,), reductions=("cdpruner:keep=8",))
    with model.open(random_image(1), system=SYSTEM) as held:
        stats = [held.ask(question, None, reduce="cdpruner:keep=8").stats for question in QUESTIONS[:2]]
    assert 0 == stats[0].reused_tokens < stats[1].reused_tokens
    assert [one.not_reused for one in stats] == ["first", "image"]


def test_answers_say_why_image_tokens_were_run(models: Models) -> None:
    model = models(Tiny(context=512), (3, 5), reductions=(FASTV,))
    steps = [(3, "none", "first"), (3, "none", None), (5, "none", "k"), (3, "none", None), (None, FASTV, "k")]
    with model.open(random_image(1), system=SYSTEM) as held:
        for k, reduce, reason in [*steps, (None, FASTV, "reduction"), (5, "none", None)]:
            assert asked(held, k, reduce)[0].stats.not_reused == reason
        held.replace(random_image(2))
        assert asked(held, 3)[0].stats.not_reused == "image"
    with model.open([], system=SYSTEM) as text:
        assert asked(text, 3)[0].stats.not_reused is None


def test_an_image_that_sees_the_question_is_run_for_another_one(models: Models) -> None:
    with models(PALIGEMMA, (3,)).open(random_image(1)) as held:
        reasons = [held.ask(question, 3).stats.not_reused for question in ("red?", QUESTIONS[1], QUESTIONS[1])]
    assert reasons == ["first", "question", None]


def prefix(groups: list[int]) -> Prefix:
    """A prefix of equal tokens; those of a group that is not -1 are an image's, which see each other."""
    of_image = np.array(groups) >= 0
    inputs = {names.GROUP: np.array(groups, np.float32)[:, None]}
    count = len(groups)
    return Prefix(Key(), of_image, (), np.arange(count), count, np.ones((count, 4), np.float32), inputs)


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [
        ([-1, 1, 1, -1, 2, 2], [-1, 1, 1, -1, 2, 2], 6),
        ([-1, 1, 1, -1, 2, 2], [-1, 1, 1, -1], 4),
        ([-1, 1, 1], [-1, 1, 1, 1, 1], 1),
        ([-1, 1, 1, 1, 1], [-1, 1, 1], 1),
        ([1, 1], [1, 1, 1], 0),
    ],
)
def test_tokens_that_see_each_other_are_taken_together_or_not(mine: list[int], theirs: list[int], common: int) -> None:
    """Also where the image goes on in the caches and ends in the prompt."""
    assert Remaining.of(prefix(mine)).agreement(Remaining.of(prefix(theirs))) == common
