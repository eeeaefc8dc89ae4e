"""The score of an answer in each benchmark, and the figures of many answers.

Answers become counts, a row per image; a figure is a function of the sum of the rows, so that images can be resampled.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.tools.data.items import plain
from vtx.tools.evaluation.questions import TaskQuestion

Counts = NDArray[np.float64]
Judge = Callable[[TaskQuestion, str], tuple[str, float]]  # the parsed answer, and its score from 0 to 1
Figure = Callable[[Counts], Counts]  # [..., columns] to [...]
PERCEPTION = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
LETTER = re.compile(r"\(?([A-Z])(?:\)|[.:)](?=\s|$)|$)")
SENTENCE = re.compile(r"answer is \(?([A-Z])\b")
NUMBERS = {
    "none": "0",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
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
    text = written = answer.replace("\n", " ").replace("\t", " ").strip()
    numeric = COMMA_IN_NUMBER.search(text) is not None
    for mark in PUNCTUATION:  # removed next to a space and in texts with such a number, else replaced by a space
        written = written.replace(mark, "" if numeric or f"{mark} " in text or f" {mark}" in text else " ")
    words = [NUMBERS.get(word, word) for word in PERIOD.sub("", written).lower().split()]
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


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts [images, columns] of a benchmark, the stratum of each image, and the figures of their sum.

    `main` is the figure that methods are compared by; `shares` are figures from 0 to 1. `answered` [images, 2] counts
    right answers and questions; None if answers are not just right or wrong.
    """

    counts: Counts
    strata: NDArray[np.int64]
    figures: Mapping[str, Figure]
    main: str
    shares: frozenset[str]
    answered: Counts | None


@dataclass(frozen=True, slots=True)
class Metric:
    """Judging answers and counting their scores."""

    judge: Judge
    tally: Callable[[Sequence[TaskQuestion], Sequence[tuple[str, float]]], Tally]


def judge_pope(question: TaskQuestion, text: str) -> tuple[str, float]:
    """As POPE's evaluation: "no" or "not" as a word of the first sentence is a no, anything else a yes."""
    words = text.split(".")[0].replace(",", "").lower().split()
    parsed = "no" if {"no", "not"} & set(words) else "yes"
    return parsed, float(parsed == question.answers[0])


def judge_mme(question: TaskQuestion, text: str) -> tuple[str, float]:
    """As MME's evaluation: yes or no among the first four letters; else "other", which is wrong."""
    answer = text.lower().strip().replace(".", "")
    start = {"y": "yes", "n": "no"}.get(answer, answer[:4])
    parsed = next((word for word in ("yes", "no") if word in start), "other")
    return parsed, float(parsed == question.answers[0])


def judge_choice(question: TaskQuestion, text: str) -> tuple[str, float]:
    """A letter alone, before a full stop, colon or bracket, or after "answer is"; an answer without one is wrong."""
    letters = text.strip()
    alone = letters.upper() if len(letters) == 1 else letters
    match = LETTER.match(alone) or SENTENCE.search(letters)
    parsed = match[1] if match and ord(match[1]) - ord("A") < question.choices else ""
    return parsed, float(parsed == question.answers[0])


def judge_vqa(question: TaskQuestion, text: str) -> tuple[str, float]:
    parsed = normalize(text)
    return parsed, agreement(parsed, [normalize(human) for human in question.answers])


def judge_text_vqa(question: TaskQuestion, text: str) -> tuple[str, float]:
    parsed = normalize_text(text)
    return parsed, agreement(parsed, [normalize_text(human) for human in question.answers])


def judge_plain_yes(question: TaskQuestion, text: str) -> tuple[str, float]:
    """POPE as lmms-eval counts it: the whole answer is yes or no."""
    parsed = text.strip().lower()
    return parsed if parsed in ("yes", "no") else "other", float(parsed == question.answers[0])


def judge_plain_letter(question: TaskQuestion, text: str) -> tuple[str, float]:
    """ScienceQA as lmms-eval counts it: the letter alone, or before a full stop."""
    parsed = text[0] if text[:1].isupper() and text[1:2] in ("", ".") else ""
    return parsed, float(parsed == question.answers[0])


def judge_first_letter(question: TaskQuestion, text: str) -> tuple[str, float]:
    """SEED-Bench as lmms-eval counts it: the first character."""
    parsed = text.strip()[:1]
    return parsed, float(parsed == question.answers[0])


def judge_without_punctuation(question: TaskQuestion, text: str) -> tuple[str, float]:
    """Equal except for case and punctuation."""
    parsed, right = (value.lower().translate(NO_PUNCTUATION) for value in (text.strip(), question.answers[0]))
    return parsed, float(parsed == right)


def judge_exact(question: TaskQuestion, text: str) -> tuple[str, float]:
    """Equal except for case, spaces around it and the final full stop."""
    parsed = plain(text)
    return parsed, float(parsed == plain(question.answers[0]))


def ratio(over: Counts, under: Counts) -> Counts:
    """Elementwise; 0 for counts of 0."""
    figures: Counts = np.divide(over, under, out=np.zeros_like(over, np.float64), where=under > 0)
    return figures


def _summed(keys: Sequence[Any], rows: Counts) -> tuple[list[Any], Counts]:
    """The distinct keys in their order, and the sum of each one's rows."""
    order = list(dict.fromkeys(keys))
    index = {key: n for n, key in enumerate(order)}
    sums = np.zeros((len(order), rows.shape[1]))
    np.add.at(sums, [index[key] for key in keys], rows)
    return order, sums


def tally_mean(questions: Sequence[TaskQuestion], scores: Sequence[tuple[str, float]]) -> Tally:
    """Accuracy: the mean score of the questions."""
    rows = np.array([[score, 1.0] for _, score in scores])
    order, counts = _summed([question.image for question in questions], rows)
    exact = all(score in (0.0, 1.0) for _, score in scores)
    return Tally(
        counts,
        np.zeros(len(order), np.int64),
        {"accuracy": lambda c: ratio(c[..., 0], c[..., 1])},
        "accuracy",
        frozenset({"accuracy"}),
        counts if exact else None,
    )


def tally_pope(questions: Sequence[TaskQuestion], scores: Sequence[tuple[str, float]]) -> Tally:
    """True and false positives, false and true negatives, "yes" being positive; and answers that are neither."""
    cells = [("yes", 1.0), ("yes", 0.0), ("no", 0.0), ("no", 1.0), ("other", 0.0)]
    rows = np.array([[float(score == cell) for cell in cells] for score in scores])
    order, counts = _summed([question.image for question in questions], rows)
    figures: dict[str, Figure] = {
        "accuracy": lambda c: ratio(c[..., 0] + c[..., 3], c.sum(-1)),
        "precision": lambda c: ratio(c[..., 0], c[..., 0] + c[..., 1]),
        "recall": lambda c: ratio(c[..., 0], c[..., 0] + c[..., 2]),
        "f1": lambda c: ratio(2 * c[..., 0], 2 * c[..., 0] + c[..., 1] + c[..., 2]),
        "yes_ratio": lambda c: ratio(c[..., 0] + c[..., 1], c.sum(-1)),
    }
    answered = np.stack([counts[:, 0] + counts[:, 3], counts.sum(1)], 1)
    return Tally(counts, np.zeros(len(order), np.int64), figures, "accuracy", frozenset(figures), answered)


def tally_mme(questions: Sequence[TaskQuestion], scores: Sequence[tuple[str, float]]) -> Tally:
    """Accuracy over questions and over pairs: "plus" counts images of which both questions are answered right.

    A category's score is 100 for each of the two, so at most 200; the whole is the sum over categories.
    """
    rows = np.array([[score, 1.0] for _, score in scores])
    images, sums = _summed([(question.group, question.image) for question in questions], rows)
    groups = list(dict.fromkeys(group for group, _ in images))
    strata = np.array([groups.index(group) for group, _ in images])
    paired = sums[:, 1] == 2
    columns = np.stack([sums[:, 0], sums[:, 1], paired & (sums[:, 0] == 2), paired], 1)
    counts = np.zeros((len(images), len(groups), 4))
    counts[np.arange(len(images)), strata] = columns
    figures: dict[str, Figure] = {"score": lambda c: _points(c, len(groups)).sum(-1)}
    for name, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
        held = [n for n, group in enumerate(groups) if group in members]
        if held:
            figures[name] = lambda c, held=held: _points(c, len(groups))[..., held].sum(-1)  # type: ignore[misc]
    figures["accuracy"] = lambda c: ratio(c[..., 0::4].sum(-1), c[..., 1::4].sum(-1))
    figures["plus"] = lambda c: ratio(c[..., 2::4].sum(-1), c[..., 3::4].sum(-1))
    return Tally(counts.reshape(len(images), -1), strata, figures, "score", frozenset({"accuracy", "plus"}), sums)


def _points(counts: Counts, groups: int) -> Counts:
    """MME's score of each category, [..., groups]."""
    cells = counts.reshape(*counts.shape[:-1], groups, 4)
    return 100 * (ratio(cells[..., 0], cells[..., 1]) + ratio(cells[..., 2], cells[..., 3]))


METRICS: dict[str, Metric] = {
    "pope": Metric(judge_pope, tally_pope), "mme": Metric(judge_mme, tally_mme),
    "scienceqa": Metric(judge_choice, tally_mean), "vqav2": Metric(judge_vqa, tally_mean),
    "textvqa": Metric(judge_text_vqa, tally_mean), "vizwiz": Metric(judge_text_vqa, tally_mean),
    "gqa": Metric(judge_without_punctuation, tally_mean), "seedbench": Metric(judge_choice, tally_mean),
    "choices": Metric(judge_choice, tally_mean), "exact": Metric(judge_exact, tally_mean),
}  # fmt: skip
LMMS_EVAL = {  # where lmms-eval counts in another way
    "pope": Metric(judge_plain_yes, tally_pope),
    "scienceqa": Metric(judge_plain_letter, tally_mean),
    "seedbench": Metric(judge_first_letter, tally_mean),
}
