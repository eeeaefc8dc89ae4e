"""All methods at equal cost: the settings of each to try, and the best setting of each within each budget.

A budget is a share of the cost without any method. A setting is chosen by half of the questions and judged by the other
half, so that a method with many settings does not gain by chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import parse, to_spec
from vtx.runtime.policies.make import check_provided
from vtx.tools.bench.measure import K
from vtx.tools.bench.methods import NONE, Method
from vtx.tools.data.intervals import MeanInterval, ShareInterval, grouped_share, mean_intervals

WITHDRAWAL, GATES = "withdrawal", "gates"
KEPT, DROPPED = (0.75, 0.5, 0.25, 0.125), (0.25, 0.5, 0.75, 0.9)
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "cls": tuple(f"cls:keep={share}" for share in KEPT),
    "random": tuple(f"random:keep={share}" for share in KEPT),
    "divprune": tuple(f"divprune:keep={share}" for share in KEPT),
    "visionzip": tuple(f"visionzip:dominant={share},contextual={share / 8}" for share in KEPT),
    "hiprune": tuple(f"hiprune:keep={share},layer={block}" for share in KEPT for block in (2, 9)),
    "lsm": tuple(f"lsm:tau={tau}" for tau in (0.95, 0.9, 0.8, 0.6)),
    "cdpruner": tuple(f"cdpruner:keep={share}" for share in KEPT),
    "cdpruner, text=none": tuple(f"cdpruner:keep={share},text=none" for share in KEPT),
    "cdpruner, text=tower": tuple(f"cdpruner:keep={share},text=tower" for share in KEPT),
    "dart": tuple(f"dart:keep={share}" for share in KEPT),
    "dart, k=0": tuple(f"dart:keep={share},k=0" for share in KEPT),
    "fastv": tuple(f"fastv:k=2,ratio={share}" for share in DROPPED),
    "pyramiddrop": tuple(f"pyramiddrop:ratio={share},layers={a}/{2 * a}/{3 * a}" for a in (6, 8) for share in KEPT[:3]),
    "mustdrop": (
        "mustdrop:192", "mustdrop:64", "mustdrop:64,tau=off", "mustdrop:gamma=0.02,alpha=0.03,tau=off",
        "mustdrop:gamma=0.05,alpha=0.1,tau=off",
    ),
}  # fmt: skip
MILD = ("cls:keep=0.5", "cdpruner:keep=0.5", "dart:keep=0.5", "mustdrop:64,tau=off")  # before a withdrawal
Ladder = Mapping[str, tuple[Method, ...]]
Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Best:
    """The best setting of one family of methods within a budget.

    `budget` and `cost` are shares of the cost without any method; `score` is the share of good answers to the questions
    that did not choose the setting, `behind` by how much more of them the best family of this budget answers.
    """

    budget: float
    family: str
    method: str
    cost: float
    score: ShareInterval
    behind: MeanInterval

    @property
    def told_apart(self) -> bool:
        """True if the best family is better beyond chance."""
        return self.behind.low > 0


def make_ladder(manifest: Manifest, dialect: str, ks: Sequence[K]) -> tuple[Ladder, tuple[str, ...]]:
    """The settings of each family that the bundle can run, and the families that it was not exported for."""
    depths = [k for k in ks if isinstance(k, int)]

    def methods(specs: Sequence[str], depths: Sequence[K]) -> list[Method]:
        return [Method(k, to_spec(parse(spec))) for spec in specs for k in depths]

    wanted = {WITHDRAWAL: [Method(k) for k in depths], GATES: [Method("auto")] * bool(manifest.gates)}
    wanted |= {family: methods(specs, (None,)) for family, specs in SETTINGS.items()}
    wanted |= {f"{parse(spec)[0].name} + {WITHDRAWAL}": methods((spec,), depths) for spec in MILD}
    ladder = dict[str, tuple[Method, ...]]()
    for family, settings in wanted.items():
        provided = list[Method]()
        for method in settings:
            with contextlib.suppress(RequestError):
                check_provided(parse(method.reduce) if method.reduce != NONE else (), manifest, dialect)
                provided.append(method)
        if provided:
            ladder[family] = tuple(provided)
    return ladder, tuple(family for family, settings in wanted.items() if settings and family not in ladder)


def find_best(
    ladder: Ladder, methods: Sequence[Method], scores: Scores, costs: Sequence[float], budgets: Sequence[float],
    images: Sequence[int],
) -> tuple[Best, ...]:  # fmt: skip
    """The best setting of each family within each budget, budgets as given, the best family first.

    `scores` [questions, methods] are 1 for a good answer and NaN if that is unknown; `costs` belong to `methods`, of
    which the first is none. `images` [questions] number what each is about: every other one chooses, the rest judge. A
    family without a setting within a budget is left out there. Known answers about fewer than two give nothing.
    """
    known, about = scores[~np.isnan(scores).any(1)], np.asarray(images)[~np.isnan(scores).any(1)]
    odd = np.unique(about, return_inverse=True)[1] % 2 == 1
    if not odd.any():
        return ()
    choosing, judging, judged = known[~odd], known[odd], about[odd].tolist()
    found = list[Best]()
    for budget in budgets:
        chosen = dict[str, int]()
        for family, settings in ladder.items():
            fitting = [n for n in map(methods.index, settings) if costs[n] <= budget * costs[0]]
            if fitting:  # among equally good ones the costliest, the nearest to the budget
                chosen[family] = max(fitting, key=lambda n: (choosing[:, n].mean(), costs[n]))
        if not chosen:
            continue
        first = max(chosen.values(), key=lambda n: (judging[:, n].mean(), -costs[n]))
        rows = list[Best]()
        for family, n in chosen.items():
            [behind] = mean_intervals((judging[:, first] - judging[:, n])[:, None], judged)
            score = grouped_share(judging[:, n].astype(bool).tolist(), judged)
            rows.append(Best(budget, family, methods[n].name, costs[n] / costs[0], score, behind))
        found += sorted(rows, key=lambda row: (-row.score.share, row.cost))
    return tuple(found)


def verdict(rows: Sequence[Best], cost: str) -> list[str]:
    """A sentence per budget: the best method, those not told apart from it, and those that are worse."""
    sentences = list[str]()
    for budget in dict.fromkeys(row.budget for row in rows):
        best, *others = (row for row in rows if row.budget == budget)
        level = [row.family for row in others if not row.told_apart]
        behind = [f"{row.family} ({100 * row.behind.mean:.1f} points)" for row in others if row.told_apart]
        sentences.append(
            f"Within {best.budget:.0%} of {cost}, {best.method} answers most: {best.score.share:.1%}."
            + (f" Not told apart from it: {', '.join(level)}." if level else "")
            + (f" Worse beyond chance: {', '.join(behind)}." if behind else "")
        )
    return sentences


def parse_budgets(text: str) -> tuple[float, ...]:
    """Shares from percentages, e.g. "75,50,25". Raises RequestError."""
    try:
        budgets = tuple(float(part) / 100 for part in text.split(","))
    except ValueError as e:
        raise RequestError(f"--budgets is {text!r:.40}; give percentages of the unreduced cost, e.g. 75,50,25") from e
    if not all(0 < budget <= 1 for budget in budgets):
        raise RequestError(f"--budgets is {text!r:.40}; each must be above 0 and at most 100")
    return budgets
