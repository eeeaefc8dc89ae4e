"""From measurements to a K: curves with their intervals, the choice by eta or by accuracy, and its caveats."""

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
            raise RequestError(f"--eta is {self.eta}; it must be a finite number above 0, such as {ETA}")
        if self.max_drop is not None and not 0 <= self.max_drop <= 100:
            raise RequestError(f"--max-accuracy-drop is {self.max_drop}; it must be 0 to 100 percentage points")


@dataclass(frozen=True, slots=True)
class Choice:
    """The K that a rule picks, None where no K satisfies it; `notes` say how far to trust it."""

    rule: str
    k: int | None
    notes: tuple[str, ...]


def make_report(source: Source, data: str, measured: Measurement, choosing: Choosing) -> dict[str, Any]:
    """The whole report as a JSON object; `k` is the choice, by the accuracy rule where one was given."""
    curve = make_curve(measured)
    choices = [choose_by_eta(curve, choosing.eta, len(measured.results))]
    if choosing.max_drop is not None:
        choices.append(choose_by_accuracy(curve, choosing.max_drop))
    attention = mean_attention(measured.results)
    return {
        "format": FORMAT,
        "model": {"name": source.name, "fingerprint": source.fingerprint, "layers": source.config.text.layers},
        "data": {"source": data, "items": len(measured.results), "skipped": list(measured.skipped)},
        "confidence": CONFIDENCE,
        "k": choices[-1].k,
        "eta": choosing.eta,
        "choices": [asdict(choice) for choice in choices],
        "curve": curve,
        **({"attention": {"kinds": list(KINDS), **attention}} if attention else {}),
        "samples": list(measured.results),
    }


def make_curve(measured: Measurement) -> list[dict[str, Any]]:
    """One point per K, K = none first: KL both ways (nats), and shares of equal next tokens, equal and right answers.

    Means have a bootstrap interval, shares a Wilson interval; a quantity that was not measured is None.
    """
    results, count = measured.results, len(measured.ks)
    curve: list[dict[str, Any]] = [{"k": k, "full_layers": None if k is None else k - 1} for k in (None, *measured.ks)]
    for name in ("kl", "kl_reverse"):
        values = np.array([[0.0, *result[name]] for result in results])
        for point, interval in zip(curve, mean_intervals(values), strict=True):
            point[name] = interval
    for name in ("top1", "agree", "right"):
        measurements = [result[name] for result in results if result[name] is not None]
        known = [[True, *hits] for hits in measurements] if name == "top1" else measurements
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
        rule, None, (f"no K satisfies it: the smallest mean KL is {least['kl']['mean']:.3g}, at K = {least['k']}",)
    )


def _doubts(point: Mapping[str, Any], later: Sequence[Mapping[str, Any]], eta: float, samples: int) -> list[str]:
    k, kl, notes = point["k"], point["kl"], []
    if above := [p["k"] for p in later if p["kl"]["mean"] >= eta]:
        notes.append(
            f"the curve is not monotone: after K = {k} the mean KL is {eta:g} or more again at K = {_listed(above)}"
        )
    if kl["high"] >= eta:
        notes.append(
            f"with {samples} samples the mean KL at K = {k} lies between {kl['low']:.2g} and {kl['high']:.2g} "
            f"({CONFIDENCE:.0%}), so it may well be above {eta:g}; more --samples narrow the interval"
        )
    return notes


def choose_by_accuracy(curve: Sequence[Mapping[str, Any]], max_drop: float) -> Choice:
    """The smallest K whose accuracy is at most `max_drop` points below that of no withdrawal.

    Accuracy is the share of right answers, or of answers equal to the full model's where no right ones are known.
    """
    name, quantity = ("right", "accuracy") if curve[0]["right"] else ("agree", "answer agreement")
    if not curve[0][name]:
        raise RequestError("--max-accuracy-drop needs answers; give --max-new-tokens above 0, or data with answers")
    full, count = curve[0][name]["share"], curve[0][name]["count"]
    rule = f"{quantity} at most {max_drop:g} points below {full:.1%}"
    drops = {point["k"]: 100 * (full - point[name]["share"]) for point in curve[1:]}
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


def _listed(ks: Sequence[int]) -> str:
    return ", ".join(map(str, ks))


def mean_attention(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean shares over the samples: `question` and `answer` [layers][KINDS], `steps` [output tokens][KINDS].

    The figure of an output token is the mean over the answers that reach it.
    """
    samples = [result["attention"] for result in results if "attention" in result]
    if not samples:
        return {}
    steps = [
        [sample["steps"][i] for sample in samples if i < len(sample["steps"])]
        for i in range(max(len(sample["steps"]) for sample in samples))
    ]
    return {
        "question": np.mean([sample["question"] for sample in samples], axis=0).tolist(),
        "answer": np.mean([sample["answer"] for sample in samples], axis=0).tolist(),
        "steps": [np.mean(step, axis=0).tolist() for step in steps],
    }


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write `folder`/report.json, which is replaced only once complete, and return its path."""
    path = folder / REPORT
    write_json(path, report)
    return path


def read_choice(path: Path, fingerprint: str) -> dict[str, Any]:
    """The choice, as `chosen` returns it, of a vtx-calibrate report on disk.

    Raises:
        RequestError: the report is missing, was measured on another model, or picks no K.

    """
    report = read_json_object(path, MAX_REPORT, error=RequestError)
    model, data, choices = (report.get(name) for name in ("model", "data", "choices"))
    sound = isinstance(data, dict) and isinstance(choices, list) and choices and isinstance(choices[-1], dict)
    if report.get("format") != FORMAT or not isinstance(model, dict) or not sound:
        raise RequestError(f"{path} is not a report of vtx-calibrate")
    if model.get("fingerprint") != fingerprint:
        raise RequestError(f"{path} was measured on another model, {model.get('name')}; calibrate this one")
    return chosen(report)


def find_report(path: Path) -> Path | None:
    """The vtx-calibrate report at `path`, a file or a directory that holds one."""
    file = path / REPORT if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            return file if f'"format": "{FORMAT}"'.encode() in stream.read(64) else None
    except OSError:
        return None


def chosen(report: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of a report as an export records it: `k`, `rule`, `data`, `items`. RequestError where no K fits."""
    choice, data, k = report["choices"][-1], report["data"], report.get("k")
    if type(k) is not int:
        notes = "; ".join(map(str, choice.get("notes") or ["the report has none"]))
        raise RequestError(f"calibration picks no K: {notes}; raise --eta with vtx-calibrate, or name a K")
    return {"k": k, "rule": choice.get("rule"), "data": data.get("source"), "items": data.get("items")}
