"""Successive halving: all configurations on few questions, the better half of them on twice as many, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from vtx.runtime.bundle.card import CHANGED, LOST
from vtx.runtime.errors import RequestError
from vtx.tools.data.bounds import ImageLosses
from vtx.tools.fit.asking import TimedAnswer
from vtx.tools.fit.settings import Setting

FIRST = 8  # questions that every configuration is asked
FINALISTS = 6  # configurations that are tested on the questions held out


@dataclass(frozen=True, slots=True)
class Budget:
    """`keep`: the share of answers that must stay the same; milliseconds that 99% of the answers must keep.

    `of_right`: only an answer that was right and is wrong now counts against `keep`, so accuracy drops by no more.
    """

    keep: float
    first_token_ms: float | None = None
    per_token_ms: float | None = None
    of_right: bool = False

    def __post_init__(self) -> None:
        if not 0.5 <= self.keep <= 0.999:
            problem = f"--accuracy-drop is {100 * self.limit:g} points; it must be from 0.1 to 50"
            raise RequestError(
                problem if self.of_right else f"--keep is {100 * self.keep:g}%; it must be from 50% to 99.9%"
            )
        for name in ("first_token_ms", "per_token_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                option = name.removesuffix("_ms").replace("_", "-")
                raise RequestError(f"--{option} is {value:g} ms; it must be above 0")

    @property
    def limit(self) -> float:
        return 1 - self.keep

    @property
    def loss(self) -> str:
        """The change of an answer that counts, in words."""
        return LOST if self.of_right else CHANGED

    def used(self, first_token_ms: float, per_token_ms: float | None) -> list[float]:
        """Times as shares of their limits; empty without limits."""
        pairs = (first_token_ms, self.first_token_ms), (per_token_ms or 0.0, self.per_token_ms)
        return [ms / most for ms, most in pairs if most is not None]

    def over(self, first_token_ms: float, per_token_ms: float | None) -> float:
        """By which share times exceed the budget, 0 if they keep it."""
        return sum(max(0.0, share - 1) for share in self.used(first_token_ms, per_token_ms))


class Answers(Protocol):
    """Answers to numbered questions, asked on demand."""

    def ask(self, settings: Sequence[Setting], numbers: Sequence[int], phase: str, turn: int = 0) -> None: ...
    def usable(self, numbers: Sequence[int]) -> list[int]: ...
    def reply(self, setting: Setting, number: int, turn: int = 0) -> TimedAnswer: ...
    def changed(self, setting: Setting, reference: Setting, number: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Rating:
    """A configuration after some questions. `excess`: how far it is beyond the budget, 0 if it may keep it.

    `used`: the largest share that a median time has of its limit.
    """

    changed: float
    answer_ms: float
    excess: float
    used: float

    @property
    def rank(self) -> tuple[float, float]:
        return self.excess, self.answer_ms


@dataclass(frozen=True, slots=True)
class Rung:
    """The configurations that were asked the first `questions`, as they stood then."""

    questions: int
    ratings: Mapping[Setting, Rating]


def search(
    settings: Sequence[Setting],
    reference: Setting,
    numbers: Sequence[int],
    images: Sequence[str],
    answers: Answers,
    budget: Budget,
) -> tuple[list[Setting], list[Rung]]:
    """The configurations worth testing, those that change the fewest answers first, and the steps that led there.

    `numbers` are the questions to search with, in random order, and `images` their keys by number.
    """
    alive = [s for s in dict.fromkeys(settings) if s != reference]
    count = min(FIRST, len(numbers))
    rungs = list[Rung]()
    while True:
        answers.ask([reference, *alive], numbers[:count], "searching")
        usable = answers.usable(numbers[:count])
        if not usable:  # all of the first ones could not be asked
            count = min(2 * count, len(numbers))
            continue
        ratings = {setting: rate(setting, reference, usable, images, answers, budget) for setting in alive}
        rungs.append(Rung(len(usable), ratings))
        ended = count >= len(numbers)
        alive = best(ratings, FINALISTS if ended else max(FINALISTS, -(-len(alive) // 2)), budget.limit)
        if ended:
            return sorted(alive, key=lambda s: (ratings[s].changed, -ratings[s].answer_ms)), rungs
        count = min(2 * count, len(numbers))


def planned(settings: int, numbers: int) -> int:
    """The answers that a search computes at most, from the numbers of configurations and questions."""
    alive = settings
    before = 0
    count = min(FIRST, numbers)
    total = 0
    while before < numbers:
        total += (alive + 1) * (count - before)
        alive = min(alive, max(FINALISTS, -(-alive // 2)))
        before = count
        count = min(2 * count, numbers)
    return total


def rate(
    setting: Setting,
    reference: Setting,
    numbers: Sequence[int],
    images: Sequence[str],
    answers: Answers,
    budget: Budget,
) -> Rating:
    """Medians decide over times, since of few answers no 99th percentile is known, and it is never below them."""
    replies = [answers.reply(setting, n) for n in numbers]
    losses = ImageLosses.of([answers.changed(setting, reference, n) for n in numbers], [images[n] for n in numbers])
    decoded = [reply.per_token_ms for reply in replies if reply.per_token_ms is not None]
    medians = median(reply.first_token_ms for reply in replies), median(decoded) if decoded else None
    wrong = max(0.0, losses.lower() / budget.limit - 1)
    share = max(budget.used(*medians), default=0.0)
    return Rating(losses.mean, fmean(r.answer_ms for r in replies), budget.over(*medians) + wrong, share)


def best(ratings: Mapping[Setting, Rating], count: int, limit: float) -> list[Setting]:
    """At most `count`: first the fastest for each share of changed answers, then by rank."""
    ranked = sorted(ratings, key=lambda setting: ratings[setting].rank)
    front = list[Setting]()
    least = float("inf")
    for setting in ranked:
        if ratings[setting].excess == 0 and ratings[setting].changed < least:
            front.append(setting)
            least = ratings[setting].changed
    front.sort(key=lambda setting: (ratings[setting].changed > limit, ratings[setting].answer_ms))
    return list(dict.fromkeys([*front, *ranked]))[:count]
