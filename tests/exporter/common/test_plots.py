"""Every plot says what it shows and of what, counts layers in integers, and hides no line behind another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from vtx.exporter.bench.plots import draw_comparison
from vtx.exporter.bench.plots import draw_report as draw_bench
from vtx.exporter.calibration.plots import draw_report as draw_calibration
from vtx.exporter.common.plots import draw, lines
from vtx.exporter.estimate.plan import Workload, find_profile, make_plan
from vtx.exporter.estimate.plot import plot_plan
from vtx.exporter.estimate.sizes import KNOWN
from vtx.exporter.gates.report import plot_report as draw_gates

KS = range(2, 9)


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": 0.9 * value, "max": 1.2 * value}


def interval(name: str, value: float) -> dict[str, float]:
    return {name: value, "low": 0.9 * value, "high": value}


def bench_report() -> dict[str, Any]:
    depths = [
        {"k": k, "full_layers": full, "kv_bytes": 1e6 * full,
         "ms": {name: spread(10.0 * full) for name in ("first_token", "prefill", "second_question")}}
        for k, full in ((None, 16), (9, 8))
    ]  # fmt: skip
    model = {"name": "small", "precision": "int8", "device": "openvino", "compute": "f32"}
    work = {"prompt_tokens": 636, "vision_tokens": 576, "threads": 2}
    return {"depths": depths, "model": model, "workload": work, "machine": {"cpu": "a processor"}}


def comparison_report() -> dict[str, Any]:
    methods = [
        {"kind": kind, "name": kind, "flops_ratio": 0.5, "ms": {"first_token": spread(9.0)}, "right": {"share": 0.9}}
        for kind in ("withdrawal", "pruning", "both")
    ]
    data = {"items": 5, "source": "the drawn scenes"}
    return {**bench_report(), "methods": methods, "families": {}, "score": "right", "data": data}


def calibration_report() -> dict[str, Any]:
    curve = [
        {"k": k, "kl": interval("mean", 0.5 ** (k or 99)), "kl_reverse": interval("mean", 0.5 ** (k or 99)),
         **{name: interval("share", 1.0) for name in ("top1", "agree", "right")}}
        for k in (None, *KS)
    ]  # fmt: skip
    shares = np.full((8, 4), 0.25).tolist()
    attention = {"kinds": ["system", "vision", "question", "answer"], "answer": shares, "question": shares}
    return {
        "k": 5, "eta": 0.003, "confidence": 0.95, "curve": curve, "attention": {**attention, "steps": shares[:3]},
        "model": {"name": "small", "layers": 8}, "data": {"items": 20, "source": "the drawn scenes"},
    }  # fmt: skip


def gates_report() -> dict[str, Any]:
    gates = [{"threshold": t, "full_layers": 4.5, "agreement": 0.9, "exits": {"2": 3, "none": 2}} for t in (0.5, 0.9)]
    return {"items": 5, "layers": 8, "gates": gates, "fixed": [{"full_layers": n, "agreement": 1} for n in range(1, 9)]}


def plan_report(profile: str | None) -> dict[str, Any]:
    device = find_profile(profile) if profile else None
    return make_plan(KNOWN["llava-1.5-7b"], Workload(64, 576, 256), profile=device).to_dict()


DRAWINGS: Mapping[str, Callable[[Path], Any]] = {
    "bench": lambda path: draw_bench(bench_report(), path),
    "comparison": lambda path: draw_comparison(comparison_report(), path),
    "calibration": lambda path: draw_calibration(calibration_report(), path.parent),
    "gates": lambda path: draw_gates(gates_report(), path),
    "plan": lambda path: plot_plan(plan_report(None), path),
    "plan on a device": lambda path: plot_plan(plan_report("orin-nx-16"), path),
}


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Figure]]:
    """`drawn(name)`: the figures of that drawing, laid out as they are written."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, target: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, target, **options)

    def make(name: str) -> list[Figure]:
        DRAWINGS[name](tmp_path / "plot.png")
        return figures

    monkeypatch.setattr(Figure, "savefig", keep)
    return make


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_plot_has_a_title_a_source_labels_and_a_legend(drawn: Callable[[str], list[Figure]], name: str) -> None:
    figures = drawn(name)
    assert len(figures) == (3 if name == "calibration" else 1)
    for figure in figures:
        assert figure.get_suptitle()
        assert figure.get_supxlabel()
        assert all(axes.get_xlabel() for axes in figure.axes)
        assert figure.axes[0].get_ylabel()
        assert figure.legends or any(axes.get_legend() for axes in figure.axes)


@pytest.mark.parametrize("name", ["calibration", "gates", "plan on a device"])
def test_layers_are_counted_in_integers(drawn: Callable[[str], list[Figure]], name: str) -> None:
    for figure in drawn(name):
        for axes in figure.axes:
            assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_the_plan_names_its_device_and_shows_its_latency(drawn: Callable[[str], list[Figure]]) -> None:
    [figure] = drawn("plan on a device")
    assert find_profile("orin-nx-16").name in figure.get_suptitle()
    assert [axes.get_title(loc="left") for axes in figure.axes][2] == "First token: tower and prompt"


def test_lines_that_coincide_are_drawn_over_wider_ones(tmp_path: Path) -> None:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        lines(axes, [1, 2], {name: [5, 5] for name in "abc"})
        widths = [line.get_linewidth() for line in axes.lines]
        assert widths == sorted(set(widths), reverse=True)
        assert len({line.get_color() for line in axes.lines}) == 3

    draw(tmp_path / "plot.png", fill)
    assert (tmp_path / "plot.png").exists()
