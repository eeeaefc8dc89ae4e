"""From measurements to a K: curves with their intervals, the choice by eta or by accuracy, and its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vtx.exporter.calibration.measurement import ItemResult, Measurement
from vtx.exporter.checkpoint.loader import read_json_object
from vtx.exporter.common.files import write_json
from vtx.exporter.data.intervals import CONFIDENCE, MeanInterval, ShareInterval, mean_intervals, share_interval
from vtx.exporter.data.source import Source
from vtx.exporter.reference.attention import KINDS, Shares
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, later, plain

FORMAT = "vtx-calibration-1"
REPORT = "report.json"
ETA = 0.003
MAX_REPORT = 1 << 28


@dataclass(frozen=True, slots=True)
class Choosing:
    """How K is chosen: mean KL below `eta` nats, or accuracy within `max_drop` percentage points of K = none."""

    eta: float = ETA
    max_drop: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eta < float("inf"):
            raise RequestError(f"--eta is {self.eta}; it must be a finite number above 0, such as {ETA}")
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise RequestError(f"--max-accuracy-drop is {self.max_drop}; it must be 0 to 100 percentage points")


@dataclass(frozen=True, slots=True)
class Choice:
    """The K that a rule picks, None where no K satisfies it; `notes` say how far to trust it."""

    rule: str
    k: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One K of the curve, None for no withdrawal: KL both ways in nats, and shares of equal next tokens, of equal and
    of right answers. A share that was not measured is None.
    """

    k: int | None
    full_layers: int | None
    kl: MeanInterval
    kl_reverse: MeanInterval
    top1: ShareInterval | None
    agree: ShareInterval | None
    right: ShareInterval | None


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """What was measured. `fingerprint` is its checkpoint's."""

    name: str
    fingerprint: str
    layers: int


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """The questions measured, and a line for each that could not be."""

    source: str
    items: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanAttention:
    """Mean shares over the items: `question` and `answer` [layers][kinds], `steps` [output tokens][kinds].

    The figure of an output token is the mean over the answers that reach it.
    """

    kinds: tuple[str, ...]
    question: Shares
    answer: Shares
    steps: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """A calibration: `k` is the last rule's choice, `confidence` that of the intervals, `samples` the items."""

    model: CalibratedModel
    data: CalibrationData
    confidence: float = CONFIDENCE
    k: int | None
    eta: float
    choices: tuple[Choice, ...]
    curve: tuple[Point, ...]
    attention: MeanAttention | None = later(None)
    samples: tuple[ItemResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """As report.json holds it; attention only where it was measured."""
        return {"format": FORMAT, **plain(self)}


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """The choice of a report as an export records it: K, the rule, and the items of the data it rests on."""

    k: int
    rule: str
    data: str
    items: int


def make_report(source: Source, data: str, measured: Measurement, choosing: Choosing) -> CalibrationReport:
    """The whole report; `k` is the choice, by the accuracy rule where one was given."""
    curve = make_curve(measured)
    choices = [choose_by_eta(curve, choosing.eta, len(measured.results))]
    if choosing.max_drop is not None:
        choices.append(choose_by_accuracy(curve, choosing.max_drop))
    return CalibrationReport(
        model=CalibratedModel(source.name, source.fingerprint, source.config.text.layers),
        data=CalibrationData(data, len(measured.results), measured.skipped),
        k=choices[-1].k,
        eta=choosing.eta,
        choices=tuple(choices),
        curve=curve,
        attention=mean_attention(measured.results),
        samples=measured.results,
    )


def make_curve(measured: Measurement) -> tuple[Point, ...]:
    """One point per K, K = none first."""
    ks = (None, *measured.ks)
    kl, reverse = (
        mean_intervals(np.array([[0.0, *getattr(r, name)] for r in measured.results])) for name in ("kl", "kl_reverse")
    )
    shares = [_shares(measured, name) for name in ("top1", "agree", "right")]
    return tuple(
        Point(k, None if k is None else k - 1, *values) for k, *values in zip(ks, kl, reverse, *shares, strict=True)
    )


def _shares(measured: Measurement, name: str) -> list[ShareInterval | None]:
    """Shares at K = none and every K, over the items that have the quantity; at none every next token is equal."""
    measurements = [hits for result in measured.results if (hits := getattr(result, name)) is not None]
    known = [[True, *hits] for hits in measurements] if name == "top1" else measurements
    if not known:
        return [None] * (1 + len(measured.ks))
    return [share_interval(int(hits), len(known)) for hits in np.array(known, int).sum(0)]


def choose_by_eta(curve: Sequence[Point], eta: float, samples: int) -> Choice:
    """The first K, in rising order, whose mean KL is below eta (VTW Eq. 6 and Algorithm 1)."""
    points, rule = curve[1:], f"mean KL < {eta:g}"
    for i, point in enumerate(points):
        if point.kl.mean < eta:
            return Choice(rule, point.k, tuple(_doubts(point, points[i + 1 :], eta, samples)))
    least = min(points, key=lambda p: p.kl.mean)
    return Choice(rule, None, (f"no K satisfies it: the smallest mean KL is {least.kl.mean:.3g}, at K = {least.k}",))


def _doubts(point: Point, later: Sequence[Point], eta: float, samples: int) -> list[str]:
    k, kl, notes = point.k, point.kl, []
    if above := [p.k for p in later if p.kl.mean >= eta]:
        notes.append(
            f"the curve is not monotone: after K = {k} the mean KL is {eta:g} or more again at K = {_listed(above)}"
        )
    if kl.high >= eta:
        notes.append(
            f"with {samples} samples the mean KL at K = {k} lies between {kl.low:.2g} and {kl.high:.2g} "
            f"({CONFIDENCE:.0%}), so it may well be above {eta:g}; more --samples narrow the interval"
        )
    return notes


def choose_by_accuracy(curve: Sequence[Point], max_drop: float) -> Choice:
    """The smallest K whose accuracy is at most `max_drop` points below that of no withdrawal.

    Accuracy is the share of right answers, or of answers equal to the full model's where no right ones are known.
    """
    by_data = curve[0].right is not None
    quantity = "accuracy" if by_data else "answer agreement"
    none, *shares = [point.right if by_data else point.agree for point in curve]
    if none is None:
        raise RequestError("--max-accuracy-drop needs answers; give --max-new-tokens above 0, or data with answers")
    full, count = none.share, none.count
    rule = f"{quantity} at most {max_drop:g} points below {full:.1%}"
    drops = {
        point.k: 100 * (full - share.share)
        for point, share in zip(curve[1:], shares, strict=True)
        if share and point.k is not None
    }
    fits = [k for k, drop in drops.items() if drop <= max_drop + 1e-9]
    if not fits:
        k = min(drops, key=lambda k: drops[k])
        return Choice(rule, None, (f"no K satisfies it: the smallest drop is {drops[k]:.1f} points, at K = {k}",))
    notes = []
    if worse := [k for k in drops if k > fits[0] and k not in fits]:
        notes.append(f"not monotone: after K = {fits[0]} the drop is larger again at K = {_listed(worse)}")
    if 100 / count > max_drop / 2:
        notes.append(f"one answer of these {count} is {100 / count:.2g} points; more --samples resolve smaller drops")
    return Choice(rule, fits[0], tuple(notes))


def _listed(ks: Sequence[int | None]) -> str:
    return ", ".join(map(str, ks))


def mean_attention(results: Sequence[ItemResult]) -> MeanAttention | None:
    """The mean over the items; None where attention was not measured."""
    samples = [result.attention for result in results if result.attention is not None]
    if not samples:
        return None
    longest = max(len(sample.steps) for sample in samples)
    return MeanAttention(
        kinds=KINDS,
        question=_mean([sample.question for sample in samples]),
        answer=_mean([sample.answer for sample in samples]),
        steps=tuple(
            _mean([sample.steps[i : i + 1] for sample in samples if i < len(sample.steps)])[0] for i in range(longest)
        ),
    )


def _mean(shares: Sequence[Shares]) -> Shares:
    return tuple(tuple(row) for row in np.mean(shares, axis=0).tolist())


def write_report(report: CalibrationReport, folder: Path) -> Path:
    """Write `folder`/report.json, which is replaced only once complete, and return its path."""
    path = folder / REPORT
    write_json(path, report.to_dict())
    return path


def read_choice(path: Path, fingerprint: str) -> RecordedChoice:
    """The choice of a vtx-calibrate report on disk.

    Raises:
        RequestError: the report is missing, was measured on another model, or picks no K.

    """
    report = read_json_object(path, MAX_REPORT, error=RequestError)
    if report.get("format") != FORMAT:
        raise RequestError(f"{path} is not a report of vtx-calibrate")
    strict, choices = Strict(RequestError, "calibrate again"), report.get("choices")
    model = strict.read(CalibratedModel, report.get("model"), f"{path.name}: model")
    data = strict.read(CalibrationData, report.get("data"), f"{path.name}: data")
    last = choices[-1] if isinstance(choices, list) and choices else None
    choice = strict.read(Choice, last, f"{path.name}: the last of choices")
    if model.fingerprint != fingerprint:
        raise RequestError(f"{path} was measured on another model, {model.name}; calibrate this one")
    return _recorded(report.get("k"), choice, data)


def find_report(path: Path) -> Path | None:
    """The vtx-calibrate report at `path`, a file or a directory that holds one."""
    file = path / REPORT if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            return file if f'"format": "{FORMAT}"'.encode() in stream.read(64) else None
    except OSError:
        return None


def chosen(report: CalibrationReport) -> RecordedChoice:
    """The choice of a report as an export records it. RequestError where no K fits."""
    return _recorded(report.k, report.choices[-1], report.data)


def _recorded(k: Any, choice: Choice, data: CalibrationData) -> RecordedChoice:
    if type(k) is not int:
        notes = "; ".join(choice.notes) or "the report has none"
        raise RequestError(f"calibration picks no K: {notes}; raise --eta with vtx-calibrate, or name a K")
    return RecordedChoice(k, choice.rule, data.source, data.items)
