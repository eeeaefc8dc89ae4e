"""Messages about a missing extra name the pip that belongs to this Python."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vtx.runtime.installing import install, pip_install


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    pip_install.cache_clear()
    yield
    pip_install.cache_clear()


def environment(folder: Path) -> Path:
    """An environment's folder of programs, with a pip."""
    folder.mkdir()
    for name in ("pip", "python"):
        (folder / name).touch(mode=0o755)
    return folder


def test_pip_is_named_alone_where_a_shell_finds_that_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = environment(tmp_path / "ours"), environment(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join((str(ours), str(other))))
    assert install("serve") == 'pip install "vtx-edge[serve]"'


def test_another_environment_s_pip_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = environment(tmp_path / "ours"), environment(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join((str(other), str(ours))))
    assert install("gpu", "-U ") == f'{ours}/python -m pip install -U "vtx-edge[gpu]"'


def test_an_environment_without_pip_gets_the_line_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install("sign") == f'uv pip install --python {tmp_path}/python "vtx-edge[sign]"'
