"""From measurements to a K: curves with their intervals, the choice by eta or by accuracy, and what to be wary of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vtx.exporter.calibration.calibrate import Measurement
from vtx.exporter.checkpoint.loader import read_json_object
from vtx.exporter.common.files import write_json
from vtx.exporter.data.intervals import CONFIDENCE, mean_intervals, share_interval
from vtx.exporter.data.source import Source
from vtx.exporter.reference.attention import KINDS
from vtx.runtime.errors import RequestError

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
            raise RequestError(f"--eta is {self.eta}; give a number above 0, such as {ETA}")
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise RequestError(f"--max-accuracy-drop is {self.max_drop}; give percentage points from 0 to 100")


@dataclass(frozen=True, slots=True)
class Choice:
    """The K that a rule picks, None where no K keeps to it; `notes` are sentences on how far to trust it."""

    rule: str
    k: int | None
    notes: tuple[str, ...]


def make_report(source: Source, data: str, measured: Measurement, choosing: Choosing) -> dict[str, Any]:
    """Everything that was found as a JSON object; `k` is the choice, of the accuracy rule where one was given."""
    curve = make_curve(measured)
    choices = [choose_by_eta(curve, choosing.eta, len(measured.rows))]
    if choosing.max_drop is not None:
        choices.append(choose_by_accuracy(curve, choosing.max_drop))
    attention = mean_attention(measured.rows)
    return {
        "format": FORMAT,
        "model": {"name": source.name, "fingerprint": source.fingerprint, "layers": source.config.text.layers},
        "data": {"source": data, "items": len(measured.rows), "skipped": list(measured.skipped)},
        "confidence": CONFIDENCE,
        "k": choices[-1].k,
        "eta": choosing.eta,
        "choices": [asdict(choice) for choice in choices],
        "curve": curve,
        **({"attention": {"kinds": list(KINDS), **attention}} if attention else {}),
        "samples": list(measured.rows),
    }


def make_curve(measured: Measurement) -> list[dict[str, Any]]:
    """One point a K, K = none first: KL both ways (nats), and shares of equal next tokens, equal and right answers.

    Means have a bootstrap interval, shares a Wilson interval; what was not measured is None.
    """
    rows, count = measured.rows, len(measured.ks)
    curve: list[dict[str, Any]] = [{"k": k, "full_layers": None if k is None else k - 1} for k in (None, *measured.ks)]
    for name in ("kl", "kl_reverse"):
        values = np.array([[0.0, *row[name]] for row in rows])
        for point, interval in zip(curve, mean_intervals(values), strict=True):
            point[name] = interval
    for name in ("top1", "agree", "right"):
        known = [([True, *row[name]] if name == "top1" else row[name]) for row in rows if row[name] is not None]
        hits = np.array(known, int).sum(0) if known else np.zeros(1 + count, int)
        for point, number in zip(curve, hits, strict=True):
            point[name] = share_interval(int(number), len(known)) if known else None
    return curve


def choose_by_eta(curve: Sequence[Mapping[str, Any]], eta: float, samples: int) -> Choice:
    """The first K, in rising order, whose mean KL is below eta (VTW Eq. 6 and Algorithm 1)."""
    points, rule = curve[1:], f"mean KL < {eta:g}"
    for i, point in enumerate(points):
        if point["kl"]["mean"] < eta:
            return Choice(rule, point["k"], tuple(_doubts(point, points[i + 1 :], eta, samples)))
    least = min(points, key=lambda p: float(p["kl"]["mean"]))
    return Choice(
        rule, None, (f"no K reaches it: the smallest mean KL is {least['kl']['mean']:.3g}, at K = {least['k']}",)
    )


def _doubts(point: Mapping[str, Any], later: Sequence[Mapping[str, Any]], eta: float, samples: int) -> list[str]:
    k, kl, notes = point["k"], point["kl"], []
    if above := [p["k"] for p in later if p["kl"]["mean"] >= eta]:
        notes.append(
            f"the curve is not monotone: behind K = {k} the mean KL is {eta:g} or more again at K = {_listed(above)}"
        )
    if kl["high"] >= eta:
        notes.append(
            f"with {samples} samples the mean KL at K = {k} lies between {kl['low']:.2g} and {kl['high']:.2g} "
            f"({CONFIDENCE:.0%}), so it may well be above {eta:g}; more --samples would settle it"
        )
    return notes


def choose_by_accuracy(curve: Sequence[Mapping[str, Any]], max_drop: float) -> Choice:
    """The smallest K whose accuracy is at most `max_drop` points below that of no withdrawal.

    Accuracy is the share of right answers, or of answers equal to the full model's where no right ones are known.
    """
    name, what = ("right", "accuracy") if curve[0]["right"] else ("agree", "answer agreement")
    if not curve[0][name]:
        raise RequestError("--max-accuracy-drop needs answers; give --max-new-tokens above 0, or data with answers")
    full, count = curve[0][name]["share"], curve[0][name]["count"]
    rule = f"{what} at most {max_drop:g} points below {full:.1%}"
    drops = {point["k"]: 100 * (full - point[name]["share"]) for point in curve[1:]}
    fits = [k for k, drop in drops.items() if drop <= max_drop + 1e-9]
    if not fits:
        k = min(drops, key=lambda k: drops[k])
        return Choice(rule, None, (f"no K keeps to it: the smallest drop is {drops[k]:.1f} points, at K = {k}",))
    notes = []
    if worse := [k for k in drops if k > fits[0] and k not in fits]:
        notes.append(f"not monotone: behind K = {fits[0]} the drop is larger again at K = {_listed(worse)}")
    if 100 / count > max_drop / 2:
        notes.append(f"one answer of these {count} is {100 / count:.2g} points; more --samples would tell finer")
    return Choice(rule, fits[0], tuple(notes))


def _listed(ks: Sequence[int]) -> str:
    return ", ".join(map(str, ks))


def mean_attention(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean shares over the samples: `question` and `answer` [layers][KINDS], `steps` [output tokens][KINDS].

    A later output token is the mean over the answers that are so long.
    """
    found = [row["attention"] for row in rows if "attention" in row]
    if not found:
        return {}
    steps = [
        [one["steps"][i] for one in found if i < len(one["steps"])] for i in range(max(len(f["steps"]) for f in found))
    ]
    return {
        "question": np.mean([one["question"] for one in found], axis=0).tolist(),
        "answer": np.mean([one["answer"] for one in found], axis=0).tolist(),
        "steps": [np.mean(step, axis=0).tolist() for step in steps],
    }


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/report.json, which is replaced only once complete, and return its path."""
    path = folder / REPORT
    write_json(path, report)
    return path


def read_choice(path: Path, fingerprint: str) -> dict[str, Any]:
    """What `chosen` gives for a report of vtx-calibrate on disk.

    Raises:
        RequestError: no such report, one of another model, or one without a K.

    """
    report = read_json_object(path, MAX_REPORT, error=RequestError)
    model, data, choices = (report.get(name) for name in ("model", "data", "choices"))
    sound = isinstance(data, dict) and isinstance(choices, list) and choices and isinstance(choices[-1], dict)
    if report.get("format") != FORMAT or not isinstance(model, dict) or not sound:
        raise RequestError(f"{path} is no report of vtx-calibrate")
    if model.get("fingerprint") != fingerprint:
        raise RequestError(f"{path} was measured on another model, {model.get('name')}; calibrate this one")
    return chosen(report)


def find_report(path: Path) -> Path | None:
    """The report of vtx-calibrate that `path`, a file or a folder, is or holds."""
    found = path / REPORT if path.is_dir() else path
    try:
        with found.open("rb") as file:
            return found if f'"format": "{FORMAT}"'.encode() in file.read(64) else None
    except OSError:
        return None


def chosen(report: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of a report as an export records it: `k`, `rule`, `data`, `items`. RequestError where no K fits."""
    choice, data, k = report["choices"][-1], report["data"], report.get("k")
    if type(k) is not int:
        notes = "; ".join(map(str, choice.get("notes") or ["the report has none"]))
        raise RequestError(f"calibration picks no K: {notes}; raise --eta with vtx-calibrate, or name a K")
    return {"k": k, "rule": choice.get("rule"), "data": data.get("source"), "items": data.get("items")}
