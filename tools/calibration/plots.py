"""Calibration as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vtx.tools.calibration.choosing import Point
from vtx.tools.calibration.report import CalibrationReport
from vtx.tools.common.plots import GREY, draw, headline, integer_axis, lines, percent_axis
from vtx.tools.data.intervals import MeanInterval

FLOOR = 1e-9  # a logarithmic axis has no zero


def draw_report(report: CalibrationReport, folder: Path) -> list[Path]:
    """Write kl.png, accuracy.png and, if attention was measured, attention.png into `folder`. Raises as `draw` does."""
    drawings = [("kl.png", _kl, 9), ("accuracy.png", _accuracy, 9)]
    if report.attention is not None:
        drawings.append(("attention.png", _attention, 12))
    for name, fill, width in drawings:
        draw(folder / name, partial(fill, report=report), width=width)
    return [folder / name for name, *_ in drawings]


Band = Sequence[tuple[float, float, float]]  # the low end, the middle and the high end of an interval for each K


def _plot_bands(axes: Any, points: Sequence[Point], bands: Mapping[str, Band]) -> None:
    ks = [point.k for point in points if point.k is not None]
    colors = lines(axes, ks, {label: [middle for _, middle, _ in band] for label, band in bands.items()})
    for label, band in bands.items():
        low = [i[0] for i in band]
        high = [i[2] for i in band]
        axes.fill_between(ks, low, high, alpha=0.15, color=colors[label], linewidth=0)


def _finish(figure: Any, axes: Any, report: CalibrationReport, title: str) -> None:
    if report.k is not None:
        axes.axvline(report.k, color="black", linestyle="--", linewidth=1, label=f"chosen: K = {report.k}")
    integer_axis(axes, "K: the first layer without image tokens")
    axes.legend()
    headline(figure, title, _source(report))


def _source(report: CalibrationReport) -> str:
    model = report.model
    data = report.data
    by = f"by its engine: {model.engine}" if model.engine else "in float32 on the CPU"
    return (
        f"{model.name}, {model.layers} layers; {data.items} items of {data.source}; computed {by}; "
        f"bands: {report.confidence:.0%} intervals"
    )


def _kl(figure: Any, report: CalibrationReport) -> None:
    axes = figure.subplots()
    points = report.curve[1:]
    bands = {
        "KL(withdrawn || full)": [_nats(p.kl) for p in points],
        "KL(full || withdrawn)": [_nats(p.kl_reverse) for p in points],
    }
    _plot_bands(axes, points, bands)
    axes.axhline(report.eta, color=GREY, linestyle=":", label=f"eta = {report.eta:g}")
    axes.set(yscale="log", ylabel="mean KL of the next token, nats")
    _finish(figure, axes, report, "How far withdrawal at K moves the next token")


def _nats(interval: MeanInterval) -> tuple[float, float, float]:
    return max(interval.low, FLOOR), max(interval.mean, FLOOR), max(interval.high, FLOOR)


def _accuracy(figure: Any, report: CalibrationReport) -> None:
    axes = figure.subplots()
    none, *points = report.curve
    shares = {
        "right answer": [p.right for p in points],
        "answer as without withdrawal": [p.agree for p in points],
        "next token as without withdrawal": [p.top1 for p in points],
    }
    bands = {
        label: [(100 * s.low, 100 * s.share, 100 * s.high) for s in values if s]
        for label, values in shares.items()
        if all(values)
    }
    _plot_bands(axes, points, bands)
    if none.right:
        share = 100 * none.right.share
        axes.axhline(share, color=GREY, linestyle=":", label=f"right without withdrawal: {share:.1f}%")
    percent_axis(axes, "share of the items, %", min(low for band in bands.values() for low, *_ in band))
    _finish(figure, axes, report, "Answers by K")


def _attention(figure: Any, report: CalibrationReport) -> None:
    means = report.attention
    assert means is not None
    layers, steps = figure.subplots(1, 2, sharey=True)
    count = len(means.answer)
    output = range(1, len(means.steps) + 1)
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
