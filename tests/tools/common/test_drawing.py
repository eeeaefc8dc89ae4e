"""Pictures: written whole or not at all, and a missing library is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vtx.runtime.errors import DeviceError, RequestError
from vtx.tools.common.plots import draw


def line(figure: Any) -> None:
    figure.subplots().plot([1, 2], [3, 4])


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")])
def test_a_picture_has_the_format_of_its_ending_and_nothing_else_is_left(
    tmp_path: Path, name: str, start: bytes
) -> None:
    draw(tmp_path / name, line)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a.nosuch", "none/a.png"])
def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=f"cannot write the plot .*{name}"):
        draw(tmp_path / name, line)
    assert not list(tmp_path.iterdir())


def test_a_drawing_that_fails_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def full(_: Any, target: Path, **__: Any) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "a.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(RequestError, match="No space left"):
        draw(tmp_path / "a.png", line)
    assert (tmp_path / "a.png").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[plot\]"'):
        draw(tmp_path / "a.png", line)
