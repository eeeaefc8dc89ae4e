"""Calibration as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vtx.exporter.common.plots import GREY, draw, headline, integer_axis, lines, percent_axis

FLOOR = 1e-9  # a logarithmic axis has no zero


def draw_report(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write kl.png, accuracy.png and, where it was measured, attention.png into `folder`. Raises as `draw` does."""
    drawings = {
        "kl.png": _kl,
        "accuracy.png": _accuracy,
        **({"attention.png": _attention} if "attention" in report else {}),
    }
    for name, fill in drawings.items():
        draw(folder / name, partial(fill, report=report), width=12 if fill is _attention else 9)
    return [folder / name for name in drawings]


def _band(axes: Any, ks: Sequence[int], curves: Mapping[str, Sequence[Mapping[str, float]]], middle: str) -> None:
    """A line through the middles of each curve, and the interval around it."""
    values = {
        label: {name: [max(interval[name], FLOOR) for interval in intervals] for name in (middle, "low", "high")}
        for label, intervals in curves.items()
    }
    colors = lines(axes, ks, {label: value[middle] for label, value in values.items()})
    for label, value in values.items():
        axes.fill_between(ks, value["low"], value["high"], alpha=0.15, color=colors[label], linewidth=0)


def _finish(figure: Any, axes: Any, report: Mapping[str, Any], title: str) -> None:
    if report["k"] is not None:
        axes.axvline(report["k"], color="black", linestyle="--", linewidth=1, label=f"chosen: K = {report['k']}")
    integer_axis(axes, "K: the first layer without image tokens")
    axes.legend()
    headline(figure, title, _source(report))


def _source(report: Mapping[str, Any]) -> str:
    model, data = report["model"], report["data"]
    return (
        f"{model['name']}, {model['layers']} layers; {data['items']} items of {data['source']}; computed in float32 on "
        f"the CPU; bands: {report['confidence']:.0%} intervals"
    )


def _kl(figure: Any, report: Mapping[str, Any]) -> None:
    axes, points = figure.subplots(), report["curve"][1:]
    curves = {
        "KL(withdrawn || full)": [p["kl"] for p in points],
        "KL(full || withdrawn)": [p["kl_reverse"] for p in points],
    }
    _band(axes, [p["k"] for p in points], curves, "mean")
    axes.axhline(report["eta"], color=GREY, linestyle=":", label=f"eta = {report['eta']:g}")
    axes.set(yscale="log", ylabel="mean KL of the next token, nats")
    _finish(figure, axes, report, "How far withdrawal at K moves the next token")


def _accuracy(figure: Any, report: Mapping[str, Any]) -> None:
    axes, (none, *points) = figure.subplots(), report["curve"]
    labels = {
        "right answer": "right",
        "answer as without withdrawal": "agree",
        "next token as without withdrawal": "top1",
    }
    curves = {
        label: [{key: 100 * p[name][key] for key in ("share", "low", "high")} for p in points]
        for label, name in labels.items()
        if none[name]
    }
    _band(axes, [p["k"] for p in points], curves, "share")
    if none["right"]:
        share = 100 * none["right"]["share"]
        axes.axhline(share, color=GREY, linestyle=":", label=f"right without withdrawal: {share:.1f}%")
    percent_axis(axes, "share of the items, %", min(p["low"] for curve in curves.values() for p in curve))
    _finish(figure, axes, report, "Answers by K")


def _attention(figure: Any, report: Mapping[str, Any]) -> None:
    means = report["attention"]
    layers, steps = figure.subplots(1, 2, sharey=True)
    count, output = len(means["answer"]), range(1, len(means["steps"]) + 1)
    for i, kind in enumerate(means["kinds"]):
        line = layers.plot(range(1, count + 1), [100 * a[i] for a in means["answer"]], label=kind)[0]
        by_question = [100 * a[i] for a in means["question"]]
        layers.plot(range(1, count + 1), by_question, linestyle=":", marker="", color=line.get_color())
        steps.plot(output, [100 * a[i] for a in means["steps"]], color=line.get_color(), marker=line.get_marker())
    layers.plot([], [], linestyle=":", color=GREY, marker="", label="dotted: from the question")
    layers.set(title="by layer", ylabel="attention from the answer, %", ylim=(0, 101))
    steps.set(title="by output token, mean over the layers")
    integer_axis(layers, "layer")
    integer_axis(steps, "output token")
    figure.legend(loc="outside right center", title="attention to")
    headline(figure, "Where the full model looks", _source(report).rpartition(";")[0])
