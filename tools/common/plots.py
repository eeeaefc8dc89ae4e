"""The look of all plots, and writing them. matplotlib is imported here only, and late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from vtx.runtime.bundle.files import replacing
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import install

DPI = 144
# Okabe and Ito's colours, told apart by people with any colour vision; without the yellow, which fades on white
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
LOOK: dict[str, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.grid": True, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlelocation": "left", "axes.titlesize": 11, "font.size": 10,
    "grid.color": "#E4E4E4", "legend.fontsize": 9, "legend.frameon": True, "legend.framealpha": 0.9,
    "legend.edgecolor": "none", "lines.linewidth": 1.8, "lines.markersize": 5,
    "svg.hashsalt": "vtx",  # the same picture twice is the same file
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": "black", "ytick.labelcolor": "black",
}  # fmt: skip


def draw(path: Path, fill: Callable[[Any], None], width: float = 10, height: float = 4.5) -> None:
    """Let `fill` draw a figure in inches into `path`, replaced only once complete. Raises DeviceError, RequestError."""
    make = figures()
    from cycler import cycler
    from matplotlib import rc_context

    settings: dict[Any, Any] = {**LOOK, "axes.prop_cycle": cycler(color=COLORS, marker=MARKERS)}
    with rc_context(settings):
        figure = make(figsize=(width, height), layout="constrained")
        fill(figure)
        try:
            with replacing(path) as partial:
                figure.savefig(partial, dpi=DPI, format=path.suffix[1:] or "png")
        except (OSError, ValueError) as e:
            raise RequestError(f"cannot write the plot {path} ({e}); name another file, ending in .png or .svg") from e


def figures() -> Any:
    """The class of matplotlib's figures, or DeviceError with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise DeviceError(f"plots need matplotlib; {install('plot')}") from e
    return Figure


def headline(figure: Any, title: str, source: str) -> None:
    """A title above a figure, and its model, device and data below, in as many lines as its width asks for."""
    wide, narrow = (int(letters * figure.get_figwidth()) for letters in (7.5, 13))  # letters of an inch
    figure.suptitle(fill(title, wide), x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(fill(source, narrow), x=0.01, ha="left", fontsize=9, color=GREY)


def integer_axis(axes: Any, label: str) -> None:
    """An x axis that counts: layers, K, tokens."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def lines(axes: Any, x: Sequence[float], series: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """One line per label, the first the widest, so that coinciding lines stay visible; returns their colours."""
    colors = {}
    step = min(1.0, 2.5 / max(1, len(series) - 1))
    for above, (label, y) in zip(reversed(range(len(series))), series.items(), strict=True):
        line = axes.plot(x, y, label=label, linewidth=1.5 + 2 * step * above, markersize=4 + 2.5 * step * above)[0]
        colors[label] = line.get_color()
    return colors


def percent_axis(axes: Any, label: str, least: float) -> None:
    """A y axis of percentages that begins at a whole ten below `least` and ends a little above 100."""
    axes.set(ylabel=label, ylim=(min(10 * (least // 10), 90) - 1, 102))
