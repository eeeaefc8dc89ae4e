"""The kind of a question, told from its reference answer."""

from __future__ import annotations

import pytest

from vtx.runtime.bundle.card import CHOICE, NUMBER, SENTENCE, TEXT, WORD, YES_NO
from vtx.tools.data.kinds import kind_of

ANSWERS = {
    YES_NO: ("yes", "No.", " YES ", "no!"),
    CHOICE: ("A", "B.", "(C)", "D:"),
    NUMBER: ("3", "3.", "-12.5", "1,024", "$4.50", "80%", "three", "Twelve.", "12:30", "2024-05-17"),
    WORD: ("red", "Circle.", "mother-in-law", "Miller", "a", "élan", "don't"),
    TEXT: ("INV-2041", "a red circle", "17 Main Street", "OPEN 24 H", "total: 12.50 EUR", "It is.", ""),
    SENTENCE: (
        "The sign says OPEN.", "Yes, there is a dog.", "Is it a circle or a square?",
        "a man rides a brown horse along a beach while the sun goes down",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "answer"), [(kind, answer) for kind in ANSWERS for answer in ANSWERS[kind]])
def test_a_reference_answer_tells_the_kind(kind: str, answer: str) -> None:
    assert kind_of(answer) == kind


def test_choices_make_an_answer_a_choice_unless_it_is_yes_or_no() -> None:
    assert kind_of("a red circle", choices=3) == CHOICE
    assert kind_of("yes", choices=2) == YES_NO
