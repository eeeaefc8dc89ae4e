"""Calibration as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vtx.exporter.calibration.choosing import Point
from vtx.exporter.calibration.report import CalibrationReport
from vtx.tools.common.plots import GREY, draw, headline, integer_axis, lines, percent_axis
from vtx.tools.data.intervals import MeanInterval, ShareInterval

FLOOR = 1e-9  # a logarithmic axis has no zero


def draw_report(report: CalibrationReport, folder: Path) -> list[Path]:
    """Write kl.png, accuracy.png and, where it was measured, attention.png into `folder`. Raises as `draw` does."""
    drawings = [("kl.png", _kl, 9), ("accuracy.png", _accuracy, 9)]
    if report.attention is not None:
        drawings.append(("attention.png", _attention, 12))
    for name, fill, width in drawings:
        draw(folder / name, partial(fill, report=report), width=width)
    return [folder / name for name, *_ in drawings]


@dataclass(frozen=True, slots=True)
class _Curve:
    """A line and the interval around it, a value for each K."""

    middle: list[float]
    low: list[float]
    high: list[float]


def _band(axes: Any, points: Sequence[Point], curves: Mapping[str, _Curve]) -> None:
    ks = [point.k for point in points if point.k is not None]
    colors = lines(axes, ks, {label: curve.middle for label, curve in curves.items()})
    for label, curve in curves.items():
        axes.fill_between(ks, curve.low, curve.high, alpha=0.15, color=colors[label], linewidth=0)


def _finish(figure: Any, axes: Any, report: CalibrationReport, title: str) -> None:
    if report.k is not None:
        axes.axvline(report.k, color="black", linestyle="--", linewidth=1, label=f"chosen: K = {report.k}")
    integer_axis(axes, "K: the first layer without image tokens")
    axes.legend()
    headline(figure, title, _source(report))


def _source(report: CalibrationReport) -> str:
    model, data = report.model, report.data
    return (
        f"{model.name}, {model.layers} layers; {data.items} items of {data.source}; computed in float32 on "
        f"the CPU; bands: {report.confidence:.0%} intervals"
    )


def _kl(figure: Any, report: CalibrationReport) -> None:
    axes, points = figure.subplots(), report.curve[1:]
    curves = {
        "KL(withdrawn || full)": _nats([p.kl for p in points]),
        "KL(full || withdrawn)": _nats([p.kl_reverse for p in points]),
    }
    _band(axes, points, curves)
    axes.axhline(report.eta, color=GREY, linestyle=":", label=f"eta = {report.eta:g}")
    axes.set(yscale="log", ylabel="mean KL of the next token, nats")
    _finish(figure, axes, report, "How far withdrawal at K moves the next token")


def _nats(intervals: Sequence[MeanInterval]) -> _Curve:
    return _Curve(
        [max(i.mean, FLOOR) for i in intervals],
        [max(i.low, FLOOR) for i in intervals],
        [max(i.high, FLOOR) for i in intervals],
    )


def _accuracy(figure: Any, report: CalibrationReport) -> None:
    axes, (none, *points) = figure.subplots(), report.curve
    shares = {
        "right answer": [p.right for p in points],
        "answer as without withdrawal": [p.agree for p in points],
        "next token as without withdrawal": [p.top1 for p in points],
    }
    curves = {label: _percent([s for s in values if s]) for label, values in shares.items() if all(values)}
    _band(axes, points, curves)
    if none.right:
        share = 100 * none.right.share
        axes.axhline(share, color=GREY, linestyle=":", label=f"right without withdrawal: {share:.1f}%")
    percent_axis(axes, "share of the items, %", min(low for curve in curves.values() for low in curve.low))
    _finish(figure, axes, report, "Answers by K")


def _percent(intervals: Sequence[ShareInterval]) -> _Curve:
    return _Curve(
        [100 * i.share for i in intervals], [100 * i.low for i in intervals], [100 * i.high for i in intervals]
    )


def _attention(figure: Any, report: CalibrationReport) -> None:
    means = report.attention
    assert means is not None
    layers, steps = figure.subplots(1, 2, sharey=True)
    count, output = len(means.answer), range(1, len(means.steps) + 1)
    for i, kind in enumerate(means.kinds):
        line = layers.plot(range(1, count + 1), [100 * a[i] for a in means.answer], label=kind)[0]
        by_question = [100 * a[i] for a in means.question]
        layers.plot(range(1, count + 1), by_question, linestyle=":", marker="", color=line.get_color())
        steps.plot(output, [100 * a[i] for a in means.steps], color=line.get_color(), marker=line.get_marker())
    layers.plot([], [], linestyle=":", color=GREY, marker="", label="dotted: from the question")
    layers.set(title="by layer", ylabel="attention from the answer, %", ylim=(0, 101))
    steps.set(title="by output token, mean over the layers")
    integer_axis(layers, "layer")
    integer_axis(steps, "output token")
    figure.legend(loc="outside right center", title="attention to")
    headline(figure, "Where the full model looks", _source(report).rpartition(";")[0])
