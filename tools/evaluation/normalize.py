"""Answers as VQA's evaluation compares them: punctuation, number words, articles and contractions made alike.

These are the rules published with VQAv2, applied to every answer; the released script does not change answers if all
annotators agree.
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


CONTRACTIONS = {  # each spelling that lacks one apostrophe, and its word
    word[:at] + word[at + 1 :]: word for word in CONTRACTED.split() for at, letter in enumerate(word) if letter == "'"
}
CONTRACTIONS["somebody'd"] = "somebodyd"  # as published


def normalize(answer: str) -> str:
    """An answer as VQAv2 compares it."""
    text = made = answer.replace("\n", " ").replace("\t", " ").strip()
    numeric = COMMA_IN_NUMBER.search(text) is not None
    for mark in PUNCTUATION:  # removed next to a space and in texts with such a number, else replaced by a space
        made = made.replace(mark, "" if numeric or f"{mark} " in text or f" {mark}" in text else " ")
    words = [NUMBERS.get(word, word) for word in PERIOD.sub("", made).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def normalize_text(answer: str) -> str:
    """An answer as TextVQA compares it: commas, question marks and possessives are split off first."""
    return normalize(answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip())


def agreement(answer: str, humans: list[str]) -> float:
    """VQA accuracy of one answer: leaving out each annotator in turn, min(matches among the others / 3, 1), averaged.

    All answers must be normalised.
    """
    matches = humans.count(answer)
    scores = [min((matches - (human == answer)) / 3, 1.0) for human in humans]
    return sum(scores) / len(scores)
