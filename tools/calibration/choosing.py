"""The rules that choose a K from a curve: answers kept, accuracy, and KL as a second opinion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from vtx.runtime.errors import RequestError
from vtx.runtime.strict import optional
from vtx.tools.data.choice import KEPT
from vtx.tools.data.intervals import CONFIDENCE, NORMAL, MeanInterval, ShareInterval

ETA = 0.003


@dataclass(frozen=True, slots=True)
class Choosing:
    """The rule that chooses K: `min_kept` percent of unchanged answers, or accuracy within `max_drop` points of none.

    Mean KL below `eta` nats is a second opinion; it decides only if no answers were compared.
    """

    eta: float = ETA
    max_drop: float | None = None
    min_kept: float = 100 * KEPT

    def __post_init__(self) -> None:
        if not 0 < self.min_kept < 100:
            raise RequestError(
                f"--min-kept is {self.min_kept:g}; it must be above 0 and below 100 percent, such as {KEPT:.0%}"
            )
        if not 0 < self.eta < float("inf"):
            raise RequestError(f"--eta is {self.eta}; it must be a finite number above 0, such as {ETA}")
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise RequestError(f"--max-accuracy-drop is {self.max_drop}; it must be 0 to 100 percentage points")


@dataclass(frozen=True, slots=True)
class Choice:
    """The K that a rule picks, None if no K satisfies it; `notes` limit how far it can be trusted."""

    rule: str
    k: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One K of the curve, None for no withdrawal: KL both ways in nats, and shares of equal next tokens, of equal and
    of right answers. A share that was not measured is None. `lost`: by how much less of them is right than at none, or
    equal where the data have no answers, with its interval paired by question.
    """

    k: int | None
    full_layers: int | None
    kl: MeanInterval
    kl_reverse: MeanInterval
    top1: ShareInterval | None
    agree: ShareInterval | None
    right: ShareInterval | None
    lost: MeanInterval | None = optional(None)


def choose(curve: Sequence[Point], choosing: Choosing, samples: int) -> tuple[Choice, ...]:
    """The choice of every rule, the deciding one last: accuracy if a drop was given, else answers kept, else KL."""
    choices = [choose_by_eta(curve, choosing.eta, samples)]
    if curve[0].agree is not None:
        choices.append(choose_by_kept(curve, choosing.min_kept, choosing.eta))
    if choosing.max_drop is not None:
        choices.append(choose_by_accuracy(curve, choosing.max_drop))
    return tuple(choices)


def choose_by_kept(curve: Sequence[Point], min_kept: float, eta: float) -> Choice:
    """The smallest K that keeps `min_kept` percent of the answers, at the lower end: 20 of 20 answers show 84%."""
    limit = min_kept / 100
    rule = f"at least {min_kept:g}% of the answers kept"
    points = [(point, point.agree) for point in curve[1:] if point.agree is not None]
    fits = [point for point, interval in points if interval.low >= limit]
    if not fits:
        best, interval = max(points, key=lambda pair: pair[1].low)
        notes = [
            f"no K satisfies it: the most are kept at K = {best.k}, {interval.share:.1%} of {interval.count}, "
            f"{interval.low:.1%} at the lower end of the interval"
        ]
        count = ceil(NORMAL**2 * limit / (1 - limit))
        if interval.count < count:
            notes.append(f"to show {min_kept:g}% takes at least {count} answers, all unchanged; give more --samples")
        return Choice(rule, None, tuple(notes))
    first_fit = fits[0]
    notes = []
    if first_fit.kl.mean >= eta:
        notes.append(f"second opinion: the mean KL at K = {first_fit.k} is {first_fit.kl.mean:.2g}, not below {eta:g}")
    below = [point.k for point, interval in points if (point.k or 0) > (first_fit.k or 0) and interval.low < limit]
    if below:
        notes.append(f"not monotone: after K = {first_fit.k} fewer are kept again at K = {_listed(below)}")
    return Choice(rule, first_fit.k, tuple(notes))


def choose_by_eta(curve: Sequence[Point], eta: float, samples: int) -> Choice:
    """The first K, in rising order, whose mean KL is below eta (VTW Eq. 6 and Algorithm 1)."""
    points = curve[1:]
    rule = f"mean KL < {eta:g}"
    for i, point in enumerate(points):
        if point.kl.mean < eta:
            k = point.k
            kl = point.kl
            notes = []
            if above := [p.k for p in points[i + 1 :] if p.kl.mean >= eta]:
                notes.append(
                    f"not monotone: after K = {k} the mean KL is {eta:g} or more again at K = {_listed(above)}"
                )
            if kl.high >= eta:
                notes.append(
                    f"with {samples} samples the mean KL at K = {k} lies between {kl.low:.2g} and {kl.high:.2g} "
                    f"({CONFIDENCE:.0%}), so it may well be above {eta:g}; more --samples narrow the interval"
                )
            return Choice(rule, k, tuple(notes))
    least = min(points, key=lambda p: p.kl.mean)
    return Choice(rule, None, (f"no K satisfies it: the smallest mean KL is {least.kl.mean:.3g}, at K = {least.k}",))


def choose_by_accuracy(curve: Sequence[Point], max_drop: float) -> Choice:
    """The smallest K at most `max_drop` points less accurate than none: by right answers, else by equal ones."""
    by_data = curve[0].right is not None
    quantity = "accuracy" if by_data else "answer agreement"
    none, *shares = [_judged(point, by_data=by_data) for point in curve]
    if none is None:
        raise RequestError("--max-accuracy-drop needs answers; give --max-new-tokens above 0, or data with answers")
    full = none.share
    count = none.count
    rule = f"{quantity} at most {max_drop:g} points below {full:.1%}"
    drops = _drops(curve[1:], shares, full)
    fits = [k for k in drops if drops[k] <= max_drop + 1e-9]
    if not fits:
        least, k = min((drop, k) for k, drop in drops.items())
        return Choice(rule, None, (f"no K satisfies it: the smallest drop is {least:.1f} points, at K = {k}",))
    point = next(point for point in curve[1:] if point.k == fits[0])
    notes = _notes_of(point, max_drop)
    worse = sorted({k for k in drops if k > fits[0]} - set(fits))
    if worse:
        notes.append(f"not monotone: after K = {fits[0]} the drop is larger again at K = {_listed(worse)}")
    if 100 / count > max_drop / 2:
        notes.append(f"one answer of these {count} is {100 / count:.2g} points; more --samples resolve smaller drops")
    return Choice(rule, fits[0], tuple(notes))


def _drops(points: Sequence[Point], shares: Sequence[ShareInterval | None], full: float) -> dict[int, float]:
    """By K, by how many points its share is below the `full` one."""
    drops = dict[int, float]()
    for point, share in zip(points, shares, strict=True):
        if share and point.k is not None:
            drops[point.k] = 100 * (full - share.share)
    return drops


def _judged(point: Point, *, by_data: bool) -> ShareInterval | None:
    """The share of right answers, or that of answers equal to those without withdrawal."""
    return point.right if by_data else point.agree


def _notes_of(point: Point, max_drop: float) -> list[str]:
    """A note if the interval of a point's drop reaches beyond the limit."""
    lost = point.lost
    if lost is None or 100 * lost.high <= max_drop:
        return []
    return [
        f"question by question the drop at K = {point.k} is between {100 * lost.low:.1f} and {100 * lost.high:.1f} "
        f"points ({CONFIDENCE:.0%}), so it may be above {max_drop:g}; more --samples narrow the interval"
    ]


def _listed(ks: Sequence[int | None]) -> str:
    return ", ".join(map(str, ks))
