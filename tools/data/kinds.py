"""The kind of a question, told from its reference answer: what is measured by kind is measured by this."""

from __future__ import annotations

import re

from vtx.runtime.bundle.card import CHOICE, NUMBER, SENTENCE, TEXT, WORD, YES_NO, Kind

_LETTER = re.compile(r"\(?[A-Z]\)?[.:]?")  # of a choice
_NUMBER = re.compile(r"[-+]?[$€£]?[0-9]+([.,:/ -]?[0-9]+)*%?")
_COUNTS = {
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
}
_WORD = re.compile(r"[^\W\d_]+(['\u2019-][^\W\d_]+)*")
_ENDED = re.compile(r"[.!?]$")
SHORT = 4  # words; fewer are no sentence, however they end
LONG = 12  # words; more are one, however they end


def kind_of(answer: str, choices: int = 0) -> Kind:
    """The kind of a reference answer, of a question with that many `choices`; what fits no other is quoted text."""
    text = " ".join(answer.split())
    bare = text.rstrip(" .!").casefold()
    words = len(text.split())
    if bare in ("yes", "no"):
        return YES_NO
    if choices or _LETTER.fullmatch(text):
        return CHOICE
    if bare in _COUNTS or _NUMBER.fullmatch(bare):
        return NUMBER
    if _WORD.fullmatch(bare):
        return WORD
    return SENTENCE if words > LONG or (words >= SHORT and _ENDED.search(text)) else TEXT
