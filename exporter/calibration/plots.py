"""Calibration as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vtx.exporter.common.plots import draw

FLOOR = 1e-9  # a logarithmic axis has no zero


def draw_report(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write kl.png, accuracy.png and, where it was measured, attention.png into `folder`. Raises as `draw` does."""
    drawings = {
        "kl.png": _kl,
        "accuracy.png": _accuracy,
        **({"attention.png": _attention} if "attention" in report else {}),
    }
    for name, fill in drawings.items():
        draw(folder / name, partial(fill, report=report), width=8, height=4.5)
    return [folder / name for name in drawings]


def _band(axes: Any, ks: Sequence[int], intervals: Sequence[Mapping[str, float]], middle: str, label: str) -> None:
    values, low, high = ([max(interval[name], FLOOR) for interval in intervals] for name in (middle, "low", "high"))
    line = axes.plot(ks, values, marker="o", markersize=3, label=label)[0]
    axes.fill_between(ks, low, high, alpha=0.15, color=line.get_color())


def _finish(axes: Any, report: Mapping[str, Any]) -> None:
    if report["k"] is not None:
        axes.axvline(report["k"], color="black", linestyle="--", linewidth=1, label=f"chosen: K = {report['k']}")
    axes.set_xlabel("K: first layer without vision tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(
        f"{report['model']['name']}, {report['data']['items']} items of {report['data']['source']}", fontsize=9
    )


def _kl(figure: Any, report: Mapping[str, Any]) -> None:
    axes, points = figure.subplots(), report["curve"][1:]
    ks = [p["k"] for p in points]
    _band(axes, ks, [p["kl"] for p in points], "mean", "KL(withdrawn || full)")
    _band(axes, ks, [p["kl_reverse"] for p in points], "mean", "KL(full || withdrawn)")
    axes.axhline(report["eta"], color="grey", linestyle=":", label=f"eta = {report['eta']:g}")
    axes.set_yscale("log")
    axes.set_ylabel("mean KL of the next token, nats")
    _finish(axes, report)


def _accuracy(figure: Any, report: Mapping[str, Any]) -> None:
    axes, points = figure.subplots(), report["curve"]
    labels = {
        "top1": "next token as without withdrawal",
        "agree": "answer as without withdrawal",
        "right": "right answer",
    }
    for name, label in labels.items():
        if points[0][name]:
            percent = [{key: 100 * p[name][key] for key in ("share", "low", "high")} for p in points[1:]]
            _band(axes, [p["k"] for p in points[1:]], percent, "share", label)
    if points[0]["right"]:
        axes.axhline(100 * points[0]["right"]["share"], color="grey", linestyle=":", label="right answer, K = none")
    axes.set(ylabel="%", ylim=(None, 102))
    _finish(axes, report)


def _attention(figure: Any, report: Mapping[str, Any]) -> None:
    means = report["attention"]
    layers, steps = figure.subplots(1, 2)
    for i, kind in enumerate(means["kinds"]):
        line = layers.plot(range(1, len(means["answer"]) + 1), [100 * a[i] for a in means["answer"]], label=kind)[0]
        by_question = [100 * a[i] for a in means["question"]]
        layers.plot(range(1, len(by_question) + 1), by_question, linestyle=":", color=line.get_color())
        steps.plot(range(1, len(means["steps"]) + 1), [100 * a[i] for a in means["steps"]], marker=".", label=kind)
    layers.set(xlabel="layer (dotted: from the question's tokens)", ylabel="attention from the answer to ..., %")
    steps.set(xlabel="output token, mean over the layers")
    for axes in (layers, steps):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
