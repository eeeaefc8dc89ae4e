"""Any sequence of questions, chats, interleaved chats and abandoned answers gives what fresh ones give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exported import Models
from tests.support.sequences import OPTIONS, Sequences, Setting, Step, steps
from tests.support.tiny import Tiny, random_image

DUAL = "mustdrop:gamma=0.011,alpha=1,layers=2/4/6"
SETTINGS: tuple[Setting, ...] = (
    (None, "none"),
    (3, "none"),
    (None, "fastv:k=3"),
    (5, "fastv:k=3"),
    (None, DUAL),
    (None, "lsm:tau=0.1+fastv:k=3"),
    (5, f"{DUAL},positions=renumber"),
    (None, "cdpruner:keep=20"),
    (5, "dart:keep=24"),
    (None, "dart:keep=20,k=0"),
)


@pytest.fixture(scope="module")
def one_image(models: Models) -> Sequences:
    model = models(Tiny(image=126, context=512), (3, 5), reductions=(DUAL, "fastv:k=3", "dart"))
    return Sequences(model, [random_image(4)], SETTINGS, tolerance=2e-5)


@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_a_chat_after_an_independent_question_chooses_its_own_rows(one_image: Sequences, setting: int) -> None:
    one_image.check([Step(1, setting), Step(2, setting, chat=0), Step(0, setting, chat=0)])


@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_two_interleaved_chats_keep_their_own_rows(one_image: Sequences, setting: int) -> None:
    turns = [Step(question, setting, chat=chat) for question, chat in ((1, 0), (2, 1), (0, 0), (3, 1), (2, 0))]
    one_image.check(turns)


@pytest.mark.parametrize("setting", range(2, len(SETTINGS)))
def test_a_first_turn_that_was_abandoned_chooses_nothing(one_image: Sequences, setting: int) -> None:
    one_image.check([Step(1, setting, chat=0, tokens=2), Step(2, setting, chat=0), Step(0, setting, chat=0)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sequence_equals_fresh_answers(one_image: Sequences, data: st.DataObject) -> None:
    assert OPTIONS.ignore_eos  # so that every answer has as many logits
    one_image.check(data.draw(steps(len(SETTINGS))))
