"""Pictures of results: matplotlib is loaded here, late, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtx.exporter.common.files import replacing
from vtx.runtime.errors import DeviceError, RequestError

DPI = 110


def draw(path: Path, fill: Callable[[Any], None], width: float = 10, height: float = 4) -> None:
    """Let `fill` draw on a figure of `width` x `height` inches and write it as the ending of `path` says.

    What stands at `path` is replaced only by a whole picture.

    Raises:
        DeviceError: matplotlib is missing.
        RequestError: the file cannot be written, or its ending is no format.

    """
    figure = figures()(figsize=(width, height), layout="constrained")
    fill(figure)
    try:
        with replacing(path) as partial:
            figure.savefig(partial, dpi=DPI, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as e:
        raise RequestError(f"cannot write the plot {path} ({e}); name another place, ending in .png or .svg") from e


def figures() -> Any:
    """The class of matplotlib's figures, or DeviceError with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise DeviceError('plots need matplotlib; pip install "vtx-edge[plot]"') from e
    return Figure
