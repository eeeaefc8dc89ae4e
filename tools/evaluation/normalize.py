"""Answers as VQA's evaluation compares them: punctuation, number words, articles and contractions made alike.

The rules are those published with VQAv2. They are applied to every answer; the released script leaves answers as they
are where all annotators agree.
"""

from __future__ import annotations

import re

NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6",
    "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
PERIOD = re.compile(r"\.(?!\d)")
COMMA_IN_NUMBER = re.compile(r"\d,\d")
CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


def _without_one_apostrophe(words: str) -> dict[str, str]:
    """Each spelling that lacks one apostrophe, and the word it stands for."""
    return {
        word[:at] + word[at + 1 :]: word for word in words.split() for at, letter in enumerate(word) if letter == "'"
    }


CONTRACTIONS = {**_without_one_apostrophe(CONTRACTED), "somebody'd": "somebodyd"}  # the last: as published


def normalize(answer: str) -> str:
    """An answer as VQAv2 compares it."""
    text = _unpunctuated(answer.replace("\n", " ").replace("\t", " ").strip())
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def normalize_text(answer: str) -> str:
    """An answer as TextVQA compares it: commas, question marks and possessives are split off first."""
    return normalize(answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip())


def _unpunctuated(text: str) -> str:
    """A mark beside a space leaves nothing, one inside a word a space; all go where a number has a comma."""
    gone = COMMA_IN_NUMBER.search(text) is not None
    made = text
    for mark in PUNCTUATION:
        made = made.replace(mark, "" if gone or f"{mark} " in text or f" {mark}" in text else " ")
    return PERIOD.sub("", made)


def agreement(answer: str, humans: list[str]) -> float:
    """VQA accuracy of one answer: leaving out each annotator in turn, min(matches among the others / 3, 1), averaged.

    All answers are normalised already.
    """
    matches = humans.count(answer)
    scores = [min((matches - (human == answer)) / 3, 1.0) for human in humans]
    return sum(scores) / len(scores)
