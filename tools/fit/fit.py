"""From configurations and questions to the one to ship: search, test on the questions held out, times, verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import ceil, floor, inf, log2
from typing import Any

import numpy as np

from vtx.runtime.bundle.card import KINDS, Evidence, KindDepth, Times
from vtx.runtime.errors import RequestError
from vtx.runtime.units import counted
from vtx.tools.data.bounds import RISK, ImageLosses, least_images, passing, quantile_upper
from vtx.tools.fit.asking import KeptAnswers, Questions, TimedAnswer, split
from vtx.tools.fit.search import FINALISTS, FIRST, Answers, Budget, Rung, planned, rate, search
from vtx.tools.fit.settings import Setting, pairs_of

TIMED = 300  # questions whose times are measured again until they agree
FURTHER = 2  # turns of measuring beyond those that must agree
TURNS = 20  # of these, where few questions are held out
QUIET = 0.1  # the shares by which the medians and the 99th percentiles of these turns may differ
QUIET_LATE = 0.25
LATE = 0.99  # the quantile of times that a budget is about
LEAST_TIMES = least_images(1 - LATE, single=True)  # of which a bound of this quantile is known


@dataclass(frozen=True, slots=True)
class Fitted:
    """The outcome. `chosen` is None if nothing fits; `verdict` says so, and what comes nearest.

    `front`: those tested, which of them `passed` the test of the answers, and their `evidence`. `reference` is tested
    by its times alone. `settings` were searched in `rungs`; `asked` answers were computed. `kinds`: see `fit_kinds`.
    """

    budget: Budget
    reference: Setting
    chosen: Setting | None
    verdict: tuple[str, ...]
    evidence: Mapping[Setting, Evidence]
    tested: tuple[Setting, ...]
    passed: tuple[Setting, ...]
    method: str
    settings: int
    rungs: tuple[Rung, ...]
    held_out: tuple[int, ...]
    quiet: bool
    asked: int
    skipped: tuple[str, ...]
    kinds: tuple[KindDepth, ...] = ()

    @property
    def front(self) -> tuple[Setting, ...]:
        """Of the reference and those tested, the ones that no other beats in both time and changed answers."""
        fitting = list[Setting]()
        least = float("inf")
        for setting in sorted(self.evidence, key=lambda s: (self.evidence[s].answer_ms.p50, self.evidence[s].changed)):
            if self.evidence[setting].changed < least:
                fitting.append(setting)
                least = self.evidence[setting].changed
        return tuple(fitting)


def check_enough(questions: Questions, held_out: Sequence[int], budget: Budget) -> None:
    """Raise RequestError if so few images are held out that no result could show what `keep` asks for."""
    have = len(set(questions.images))
    images = len(questions.images)
    held_images = len({questions.images[n] for n in held_out})
    least = least_images(budget.limit, single=have == images)
    if held_images < least:
        same = "stay right where they were" if budget.of_right else "stay the same"
        remark = "; questions about one image count as one" if have < images else ""
        raise RequestError(
            f"{questions.data.source}: {counted(images, 'question')} about {counted(have, 'image')}, half of which "
            f"are held out, and to show that {100 * budget.keep:g}% of the answers {same} takes at least "
            f"{counted(least, 'image')} held out, {2 * least} in all, if no answer changes{remark}; give more, or a "
            f"{'larger --accuracy-drop' if budget.of_right else 'lower --keep'}"
        )


def fit(
    settings: Sequence[Setting],
    reference: Setting,
    answers: KeptAnswers,
    budget: Budget,
    seed: int,
    predict: Callable[[float], None] = lambda _: None,
) -> Fitted:
    """Search with half of the images, test on the other half, and choose the fastest that passes and is in time.

    `predict` gets the total seconds, at most, estimated from the first question.
    """
    questions = answers.questions
    estimated = reference.on.planned is not None
    searched, held_out = split(questions, seed)
    check_enough(questions, held_out, budget)
    timed = min(TIMED, len(held_out))
    most = 1 if estimated else turns_for(timed, budget) + FURTHER
    start = time.monotonic()
    answers.ask([reference, *settings], searched[:1], "searching")
    if answers.asked:
        tested = (FINALISTS + 1) * (len(held_out) + (most - 1) * timed)
        seconds = (time.monotonic() - start - answers.loading_s) / answers.asked
        of_kind = planned(len(pairs_of(reference)), -(-len(searched) // len(KINDS)))
        tested += len(KINDS) * of_kind + FINALISTS * len(held_out)
        steps = most + max(0, ceil(log2(len(searched) / FIRST)))  # engines take turns in each
        predict(seconds * (planned(len(settings), len(searched)) + tested) + steps * answers.loading_s)
    finalists, rungs = search(settings, reference, searched, questions.images, answers, budget)
    answers.ask([reference, *finalists], held_out, "testing")
    held_usable = answers.usable(held_out)
    clocked = held_usable[:timed]
    turns = range(1)
    quiet = True
    if not estimated:
        fewest = fewest_times([reference, *finalists], clocked, answers, budget)
        turns, quiet = measure_turns([reference, *finalists], clocked, answers, turns_for(fewest, budget))

    losses = {setting: losses_of(setting, reference, held_usable, questions.images, answers) for setting in finalists}
    passed = finalists[: passing(list(losses.values()), budget.limit)]
    evidence = {
        setting: evidence_of(
            setting, losses.get(setting), [[answers.reply(setting, n, turn) for n in clocked] for turn in turns]
        )
        for setting in (reference, *finalists)
    }
    keeping = [*passed, *([reference] if reference in settings else [])]  # which may be too large to be shipped
    # Times are tested like answers: the quickest in the search first, until one is not shown to be in time.
    searched_usable = answers.usable(searched)
    speed = {s: rate(s, reference, searched_usable, questions.images, answers, budget).used for s in keeping}
    late = {s: excess(item, budget, estimated=estimated) for s, item in evidence.items()}
    in_time = list(takewhile(lambda s: not late[s], sorted(keeping, key=lambda s: speed[s])))
    choice = min(in_time, key=lambda s: evidence[s].answer_ms.p50, default=None)
    method = next(iter(losses.values())).method if losses else "none is needed"
    return Fitted(
        budget,
        reference,
        choice,
        nearest(evidence, late, keeping, finalists, budget)
        if choice is None
        else (_in_words(choice, evidence[choice], reference, budget),),
        evidence,
        tuple(finalists),
        tuple(passed),
        method,
        len(settings),
        tuple(rungs),
        tuple(held_usable),
        quiet,
        answers.asked,
        tuple(answers.skipped.values()),
    )


def losses_of(
    setting: Setting, reference: Setting, numbers: Sequence[int], images: Sequence[str], answers: Answers
) -> ImageLosses:
    return ImageLosses.of([answers.changed(setting, reference, n) for n in numbers], [images[n] for n in numbers])


def fewest_times(settings: Sequence[Setting], numbers: Sequence[int], answers: Answers, budget: Budget) -> int:
    """The fewest times that a turn has of any setting: answers of one token have none of a further token."""
    if budget.per_token_ms is None:
        return len(numbers)
    several = [sum(answers.reply(setting, n).per_token_ms is not None for n in numbers) for setting in settings]
    return min(filter(None, several), default=len(numbers))


def turns_for(times: int, budget: Budget) -> int:
    """The turns that must agree: two, or more where a bound takes more than this number of times a turn."""
    return min(TURNS, max(2, ceil(LEAST_TIMES / times))) if budget.used(1.0, 1.0) else 2


def measure_turns(
    settings: Sequence[Setting], numbers: Sequence[int], answers: Answers, agreeing: int
) -> tuple[range, bool]:
    """Ask again until the times of the last `agreeing` turns agree for all settings; all turns, and False if never.

    No turn is left out, however slow it was: it may happen again.
    """

    def quantiles(turn: int) -> list[Any]:
        times = ([answers.reply(setting, n, turn).answer_ms for n in numbers] for setting in settings)
        return [np.quantile(values, [0.5, LATE]) for values in times]

    turns = [quantiles(0)]
    for turn in range(1, agreeing + FURTHER):
        answers.ask(settings, numbers, "timing", turn)
        turns.append(quantiles(turn))
        last = np.array(turns[-agreeing:])
        if len(last) == agreeing and (last.max(0) <= (1 + np.array([QUIET, QUIET_LATE])) * last.min(0)).all():
            return range(len(turns)), True
    return range(len(turns)), False


def _times(by_turn: Sequence[Sequence[float]], *, planned: bool) -> Times:
    values = [ms for turn in by_turn for ms in turn]
    ends = [np.quantile(turn, LATE) for turn in by_turn if turn]
    upper = None if planned else quantile_upper(values, LATE)
    widened = None if upper is None else round(upper * float(max(ends) / min(ends)), 3)
    middle, late = (round(float(ms), 3) for ms in np.quantile(values, [0.5, LATE]))
    return Times(middle, late, len(values), widened)


def evidence_of(setting: Setting, losses: ImageLosses | None, turns: Sequence[Sequence[TimedAnswer]]) -> Evidence:
    """`losses` of None are those of the reference, which changes nothing by definition.

    Upper ends of times grow with what the 99th percentiles of `turns` differ by: another turn may be as much slower.
    """
    times = partial(_times, planned=setting.on.planned is not None)
    decoded = [[reply.per_token_ms for reply in turn if reply.per_token_ms is not None] for turn in turns]
    return Evidence(
        bundle=setting.on.name,
        configuration=setting.configuration,
        changed=0.0 if losses is None else losses.mean,
        upper=0.0 if losses is None else losses.upper(),
        first_token_ms=times([[reply.first_token_ms for reply in turn] for turn in turns]),
        per_token_ms=times(decoded) if any(decoded) else None,
        answer_ms=times([[reply.answer_ms for reply in turn] for turn in turns]),
        memory=setting.on.memory,
    )


def excess(evidence: Evidence, budget: Budget, *, estimated: bool = False) -> float:
    """By which share the times of 99 answers of 100 may exceed the budget: by their upper ends, or as estimated."""

    def worst(times: Times) -> float:
        return times.p99 if estimated else inf if times.p99_upper is None else times.p99_upper

    return budget.over(worst(evidence.first_token_ms), worst(evidence.per_token_ms) if evidence.per_token_ms else None)


def _in_words(choice: Setting, evidence: Evidence, reference: Setting, budget: Budget) -> str:
    retained = (
        "the full model itself"
        if choice == reference
        else f"{evidence.changed:.2%} of the answers held out {budget.loss}, at most {100 * budget.limit:.3g}% of all "
        f"with {1 - RISK:.0%} confidence"
    )
    return f"chosen: {choice.name}; {retained}; {spoken(evidence)}"


def nearest(
    evidence: Mapping[Setting, Evidence],
    late: Mapping[Setting, float],
    keeping: Sequence[Setting],
    tested: Sequence[Setting],
    budget: Budget,
) -> tuple[str, ...]:
    """Sentences on what comes nearest and which budget would do, if nothing fits; `late`: the `excess` of each."""
    sentences = ["nothing fits the budget: none of those tested is shown to keep the answers"]
    if keeping:
        closest = min(keeping, key=lambda s: late[s])
        near = f"{closest.name}; {spoken(evidence[closest])}"
        sentences = [f"nothing fits the budget. Nearest that keeps the answers: {near}"]
        limits = {"first-token": budget.first_token_ms, "per-token": budget.per_token_ms}
        times = evidence[closest].first_token_ms, evidence[closest].per_token_ms
        conditions = [
            f"--{name} {round_up(of.p99_upper or of.p99):g}"
            for (name, limit), of in zip(limits.items(), times, strict=True)
            if limit is not None and of is not None
        ]
        sentences.append(f"it fits with {' '.join(conditions)}")
    if quick := [s for s in tested if not late[s]]:
        least = min(quick, key=lambda s: evidence[s].upper)
        keep = floor(1000 * (1 - evidence[least].upper)) / 10
        wanted_keep = f"--accuracy-drop {100 - keep:.1f}" if budget.of_right else f"--keep {keep:g}%"
        sentences.append(
            f"in time, but changing too much or not tested to the end: {least.name}, {evidence[least].changed:.2%} of "
            f"the answers held out; with {wanted_keep} it may pass, which other questions would have to show"
        )
    return tuple(sentences)


def spoken(evidence: Evidence) -> str:
    token = f", a token {_spoken(evidence.per_token_ms)}" if evidence.per_token_ms else ""
    return f"first token {_spoken(evidence.first_token_ms)}{token}"


def _spoken(times: Times) -> str:
    upper = "" if times.p99_upper is None else f", at most {times.p99_upper:.1f} with {1 - RISK:.0%} confidence"
    return f"{times.p50:.1f} ms (p99 {times.p99:.1f}{upper})"


def round_up(ms: float) -> float:
    """A little above, with two or three figures, so that a budget has some room."""
    step = 10 ** (int(np.floor(np.log10(ms))) - 1)
    return float(np.ceil(1.05 * ms / step) * step)
