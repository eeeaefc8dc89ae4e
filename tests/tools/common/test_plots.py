"""Every plot says what it shows and of what, counts layers in integers, and hides no line behind another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

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

KS = range(2, 9)


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


DRAWINGS: Mapping[str, Callable[[Path], Any]] = {
    "calibration": lambda path: draw_calibration(calibration_report(), path.parent),
    "gates": lambda path: draw_judgement(gates_report(), path),
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


@pytest.mark.sampled
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


@pytest.mark.parametrize("name", DRAWINGS)
def test_layers_are_counted_in_integers(drawn: Callable[[str], list[Figure]], name: str) -> None:
    for figure in drawn(name):
        for axes in figure.axes:
            assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_lines_that_coincide_are_drawn_over_wider_ones(tmp_path: Path) -> None:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        lines(axes, [1, 2], {name: [5, 5] for name in "abc"})
        widths = [line.get_linewidth() for line in axes.lines]
        assert widths == sorted(set(widths), reverse=True)
        assert len({line.get_color() for line in axes.lines}) == 3

    draw(tmp_path / "plot.png", fill)
    assert (tmp_path / "plot.png").exists()
