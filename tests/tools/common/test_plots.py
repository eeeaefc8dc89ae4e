"""Every plot says what it shows and of what, counts layers in integers, and hides no line behind another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from vtx.runtime.host.profiles import load_profile
from vtx.tools.bench.machine import Machine
from vtx.tools.bench.plots import draw_report as draw_bench
from vtx.tools.bench.report import BenchReport, Depth
from vtx.tools.bench.series import Series
from vtx.tools.calibration.choosing import Point
from vtx.tools.calibration.gates import FixedOutcome, FixedRival, GatesOutcome, Judgement, draw_judgement
from vtx.tools.calibration.plots import draw_report as draw_calibration
from vtx.tools.calibration.report import (
    CalibratedModel,
    CalibrationData,
    CalibrationReport,
    MeanAttention,
)
from vtx.tools.common.plots import draw, lines
from vtx.tools.data.intervals import MeanInterval, ShareInterval
from vtx.tools.estimate.plan import CostPlan, Workload, make_plan
from vtx.tools.estimate.plot import plot_plan
from vtx.tools.estimate.sizes import KNOWN

KS = range(2, 9)


def spread(value: float) -> Series:
    return Series(value, value, value, 0.9 * value, 1.2 * value, 5)


MACHINE = Machine("a processor", None, "3.11", "Linux", {})


def bench_report() -> BenchReport:
    depths = tuple(
        Depth(
            k, 0, full, {name: spread(10.0 * full) for name in ("first_token", "prefill", "second_question")}, (),
            1_000_000 * full, (), None, None, 0, 0, 0, None,
        )
        for k, full in ((None, 16), (9, 8))
    )  # fmt: skip
    model = {"name": "small", "precision": "int8", "device": "openvino", "compute": "f32"}
    workload = {"prompt_tokens": 636, "vision_tokens": 576, "threads": 2}
    return BenchReport(MACHINE, model, workload, False, 1.0, 1.0, None, None, depths)


def calibration_report() -> CalibrationReport:
    right = ShareInterval(1.0, 0.5, 1.0, 20)
    curve = tuple(
        Point(k, k, *[MeanInterval(0.5 ** (k or 99), 0.0, 1.0)] * 2, right, right, right) for k in (None, *KS)
    )
    shares = ((0.25,) * 4,) * 8
    return CalibrationReport(
        model=CalibratedModel("small", "", 8),
        data=CalibrationData("the drawn scenes", 20, ()),
        k=5,
        eta=0.003,
        min_kept=90,
        choices=(),
        curve=curve,
        attention=MeanAttention(("system", "vision", "question", "answer"), shares, shares, shares[:3]),
        samples=(),
    )


def gates_report() -> Judgement:
    gates = tuple(
        GatesOutcome(
            full_layers=4.5, agreement=0.9, accuracy=None, total_flops=1, threshold=threshold,
            agreement_interval=(0.8, 1), exits={"2": 3, "none": 2}, fixed_at_equal_cost=FixedRival("K = 5", 0.9),
            difference=0, difference_interval=(0, 0),
        )
        for threshold in (0.5, 0.9)
    )  # fmt: skip
    fixed = tuple(FixedOutcome(full_layers=n, agreement=1, accuracy=None, total_flops=1, k=n + 1) for n in range(1, 9))
    return Judgement(5, 8, gates, fixed, "")


def plan_report(profile: str | None) -> CostPlan:
    device = load_profile(profile) if profile else None
    return make_plan(KNOWN["llava-1.5-7b"], Workload(64, 576, 256), profile=device)


DRAWINGS: Mapping[str, Callable[[Path], Any]] = {
    "bench": lambda path: draw_bench(bench_report(), path),
    "calibration": lambda path: draw_calibration(calibration_report(), path.parent),
    "gates": lambda path: draw_judgement(gates_report(), path),
    "plan": lambda path: plot_plan(plan_report(None), path),
    "plan on a device": lambda path: plot_plan(plan_report("orin-nx-16"), path),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Figure]]]:
    """`drawn(name)`: the figures of that drawing, laid out as they are written."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, target: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, target, **options)

    @cache
    def make(name: str) -> list[Figure]:
        figures.clear()
        DRAWINGS[name](tmp_path_factory.mktemp("plots") / "plot.png")
        return list(figures)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield make


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
    assert load_profile("orin-nx-16").name in figure.get_suptitle()
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
