"""From measurements to a K: curves with their intervals, the choices of the rules, and the report on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vtx.runtime.bundle.card import KINDS as ANSWERS
from vtx.runtime.bundle.card import Kind
from vtx.runtime.bundle.safetensors import shown
from vtx.runtime.errors import RequestError
from vtx.runtime.strict import Strict, json_value, optional
from vtx.tools.calibration.choosing import Choice, Choosing, Point, choose
from vtx.tools.common.files import read_json_object, write_json
from vtx.tools.data.choice import RecordedChoice, changed_answers
from vtx.tools.data.intervals import CONFIDENCE, MeanInterval, ShareInterval, grouped_share, mean_intervals

FORMAT = "vtx-calibration-1"
REPORT = "report.json"
DOWNSAMPLED = "@"  # in a model's fingerprint, before the number of patches in an image token
MAX_REPORT = 1 << 28
KINDS = ("system", "vision", "question", "answer")
Shares = tuple[tuple[float, ...], ...]  # [layers or tokens][KINDS]


@dataclass(frozen=True, slots=True)
class AttentionShares:
    """Shares of attention from 0 to 1, in the order of `KINDS`.

    `question` and `answer` have one entry a layer, `steps` one an output token, mean over the layers.
    """

    question: Shares
    answer: Shares
    steps: Shares


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """The measured model. `fingerprint` identifies its checkpoint; `engine` is None for the reference in float32."""

    name: str
    fingerprint: str
    layers: int
    engine: str | None = optional(None)


@dataclass(frozen=True, slots=True)
class CalibrationData:
    source: str
    items: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanAttention:
    """Means over the items that reach a token: `question`, `answer` [layers][kinds], `steps` [output tokens][kinds]."""

    kinds: tuple[str, ...]
    question: Shares
    answer: Shares
    steps: Shares


@dataclass(frozen=True, slots=True)
class KindCurve:
    """The curve over the items whose answers are of one kind, and the deciding rule's `k` for them alone."""

    kind: Kind
    items: int
    k: int | None
    curve: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """A calibration: `k` is the last rule's choice, `confidence` that of the intervals, `min_kept` in percent.

    `rest`: what stayed of the image from each K on, None for nothing.
    """

    model: CalibratedModel
    data: CalibrationData
    confidence: float = CONFIDENCE
    k: int | None
    eta: float
    min_kept: float
    choices: tuple[Choice, ...]
    curve: tuple[Point, ...]
    attention: MeanAttention | None = optional(None)
    kinds: tuple[KindCurve, ...] = optional(())
    rest: str | None = optional(None)
    samples: tuple[ItemResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **json_value(self)}

    @property
    def warning(self) -> str | None:
        """A warning if the chosen K changes too many answers or an unknown number, else None."""
        shares = [point.agree for point in self.curve if point.k == self.k]
        return None if self.k is None else changed_answers(self.k, shares[0])


def make_report(
    model: CalibratedModel, data: str, measured: Measurement, choosing: Choosing, rest: str | None = None
) -> CalibrationReport:
    curve = make_curve(measured)
    choices = choose(curve, choosing, len(measured.results))
    return CalibrationReport(
        model=model,
        data=CalibrationData(data, len(measured.results), measured.skipped),
        k=choices[-1].k,
        eta=choosing.eta,
        min_kept=choosing.min_kept,
        choices=choices,
        curve=curve,
        attention=mean_attention(measured.results),
        kinds=kind_curves(measured, choosing),
        rest=rest,
        samples=measured.results,
    )


def kind_curves(measured: Measurement, choosing: Choosing) -> tuple[KindCurve, ...]:
    """A curve for each kind of answer that some items have."""
    curves = list[KindCurve]()
    for kind in ANSWERS:
        results = tuple(result for result in measured.results if result.kind == kind)
        if results:
            curve = make_curve(replace(measured, results=results))
            curves.append(KindCurve(kind, len(results), choose(curve, choosing, len(results))[-1].k, curve))
    return tuple(curves)


def make_curve(measured: Measurement) -> tuple[Point, ...]:
    ks = (None, *measured.ks)
    images = images_of(measured.results)
    kl, reverse = (
        mean_intervals(np.array([[0.0, *getattr(r, name)] for r in measured.results]), images)
        for name in ("kl", "kl_reverse")
    )
    shares = list[list[ShareInterval | None]]()
    lost = list[MeanInterval | None]([None] * len(ks))
    for name in ("top1", "agree", "right"):  # over the items that have the quantity
        numbers = [n for n, result in enumerate(measured.results) if getattr(result, name) is not None]
        if not numbers:
            shares.append([None] * len(ks))
            continue
        first = [True] if name == "top1" else []  # at K = none every next token is equal
        hits = np.array([[*first, *getattr(measured.results[n], name)] for n in numbers], float)
        about = [images[n] for n in numbers]
        shares.append([grouped_share(of_k, about) for of_k in hits.T.tolist()])
        lost = [None, *mean_intervals(hits[:, :1] - hits[:, 1:], about)]
    return tuple(
        Point(k, None if k is None else k - 1, *values)
        for k, *values in zip(ks, kl, reverse, *shares, lost, strict=True)
    )


def images_of(results: Sequence[ItemResult]) -> list[int]:
    """The number of each item's images; items of older files count as being about images of their own."""
    return [-1 - n if result.image is None else result.image for n, result in enumerate(results)]


def mean_attention(results: Sequence[ItemResult]) -> MeanAttention | None:
    samples = [result.attention for result in results if result.attention is not None]
    if not samples:
        return None
    longest = max(len(sample.steps) for sample in samples)
    question, answer = (_mean([getattr(sample, kind) for sample in samples]) for kind in ("question", "answer"))
    steps = [[sample.steps[i : i + 1] for sample in samples if i < len(sample.steps)] for i in range(longest)]
    return MeanAttention(KINDS, question, answer, tuple(_mean(step)[0] for step in steps))


def _mean(shares: Sequence[Shares]) -> Shares:
    return tuple(tuple(row) for row in np.mean(shares, axis=0).tolist())


def write_report(report: CalibrationReport, folder: Path) -> Path:
    """Write `folder`/report.json, which is replaced only once complete, and return its path."""
    write_json(folder / REPORT, report.to_dict())
    return folder / REPORT


def read_choice(path: Path, fingerprint: str) -> RecordedChoice:
    report = read_json_object(path, MAX_REPORT, error=RequestError)
    if report.get("format") != FORMAT:
        raise RequestError(f"{path} is not a report of vtx-calibrate")
    strict = Strict(RequestError, "calibrate again")
    choices = report.get("choices")
    model = strict.read(CalibratedModel, report.get("model"), f"{path.name}: model")
    if model.fingerprint != fingerprint:
        if modes := other_downsampling(model.fingerprint, fingerprint):
            raise RequestError(
                f"{path} was measured with --downsample {shown(modes[0][:12])}, this is {modes[1]}; calibrate a bundle "
                "of this one"
            )
        raise RequestError(f"{path} was measured on another model, {model.name}; calibrate this one")
    if (rest := report.get("rest")) is not None:
        raise RequestError(
            f"{path} was measured with a rest of {shown(str(rest))}, which an export does not record; name its K with "
            f"--k, and ask with the rest"
        )
    data = strict.read(CalibrationData, report.get("data"), f"{path.name}: data")
    last = choices[-1] if isinstance(choices, list) and choices else None
    choice = strict.read(Choice, last, f"{path.name}: the last of choices")
    k = report.get("k")
    curve = report.get("curve")
    points = [point for point in curve if isinstance(point, dict)] if isinstance(curve, list) else []
    at = [strict.read(Point, point, f"{path.name}: K = {k} of the curve") for point in points if point.get("k") == k]
    return _recorded(k, choice, data, at)


def other_downsampling(measured: str, fingerprint: str) -> tuple[str, str] | None:
    """The patches in an image token of two fingerprints, if these alone differ; None: another model, or unknown."""
    (first, _, then), (second, _, now) = (name.partition(DOWNSAMPLED) for name in (measured, fingerprint))
    return (then, now) if first == second and then and now and then != now else None


def find_report(path: Path) -> Path | None:
    """The vtx-calibrate report at `path`, a file or a directory that holds one."""
    file = path / REPORT if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            return file if f'"format": "{FORMAT}"'.encode() in stream.read(64) else None
    except OSError:
        return None


def chosen(report: CalibrationReport) -> RecordedChoice:
    """The choice of a report as an export records it. RequestError if no K fits."""
    at = [point for point in report.curve if point.k == report.k]
    return _recorded(report.k, report.choices[-1], report.data, at)


def _recorded(k: Any, choice: Choice, data: CalibrationData, at: Sequence[Point]) -> RecordedChoice:
    if type(k) is not int:
        notes = "; ".join(choice.notes) or "the report has none"
        raise RequestError(f"calibration picks no K: {notes}; name a K, or calibrate again with another limit")
    if len(at) != 1:
        raise RequestError(f"the calibration has {len(at)} points at its K = {k}, not one; calibrate again")
    return RecordedChoice(k, choice.rule, data.source, data.items, at[0].agree)


DAMAGED = "samples.jsonl is damaged, remove it"


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item. `kl` and `kl_reverse` [K's] are nats of the next token, `top1` [K's] is true if it stays the same.

    `agree` and `right` [1 + K's], no withdrawal first: true if greedy decoding gives the model's own answer and the
    right one; None if there is none. `answer` is the model's own. `image` numbers what it is about: items with the same
    images are not independent of each other. `kind`: that of the right answer, or of the model's own.
    """

    answer: str | None
    kl: tuple[float, ...]
    kl_reverse: tuple[float, ...]
    top1: tuple[bool, ...]
    agree: tuple[bool, ...] | None
    right: tuple[bool, ...] | None
    attention: AttentionShares | None = optional(None)
    image: int | None = optional(None)
    kind: Kind | None = optional(None)


@dataclass(frozen=True, slots=True)
class Measurement:
    """`results` has an entry for each item, `items` their digests; `skipped` a line for each that was not asked."""

    ks: tuple[int, ...]
    results: tuple[ItemResult, ...]
    skipped: tuple[str, ...]
    items: tuple[str, ...] = ()


def read_result(line: dict[str, Any], ks: int) -> ItemResult:
    """The result that a line holds. RequestError if it does not have a figure for each of `ks` K's."""
    result = Strict(RequestError, DAMAGED).read(ItemResult, line, "an item")
    lengths = {"kl": ks, "kl_reverse": ks, "top1": ks, "agree": 1 + ks, "right": 1 + ks}
    for name, length in lengths.items():
        values = getattr(result, name)
        if values is not None and len(values) != length:
            raise RequestError(f"an item has no {name} for every K; {DAMAGED}")
    return result
