"""Child processes are started by a real Python, or by a frozen program that knows how to be one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vtx.runtime.errors import DeviceError
from vtx.runtime.host import interpreter
from vtx.runtime.host.confined import ChildTask, Subject, confine


@pytest.mark.usefixtures("children_started")
@pytest.mark.parametrize("executable", ["/usr/sbin/kiosk", "", None])
def test_a_program_that_is_no_python_starts_no_copy_of_itself(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(DeviceError, match=r"is not a Python, .*; run it with python, or freeze it with PyInstaller"):
        confine(ChildTask("json:loads", "1"), Subject("a number"))


@pytest.mark.usefixtures("children_started")
def test_a_frozen_program_without_the_hook_starts_no_copy_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DeviceError, match="is not a Python"):
        confine(ChildTask("json:loads", "1"), Subject("a number"))


def test_a_frozen_program_with_the_hook_runs_the_child_and_nothing_else() -> None:
    """The hook's call at the start of a stand-in for the program."""
    code = "from vtx.runtime.host.interpreter import serve_child; serve_child(); print('the program')"
    limits = {"memory": 4 << 30, "cpu_seconds": 60, "wall_seconds": 60, "file": 1 << 20}
    task = {"target": "json:loads", "request": "[1]", "limits": limits, "libraries": [], "reads": []}
    command = [sys.executable, "-c", code]
    child = subprocess.run(
        [*command, interpreter.SWITCH, "[]", json.dumps(task)], capture_output=True, check=True, input=b""
    )
    assert child.stdout.endswith(b'{"value": [1]}')
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"the program\n"


def test_a_program_that_has_called_the_hook_is_its_children_s_program() -> None:
    code = (
        "import sys; from vtx.runtime.host.interpreter import SWITCH, child_command, serve_child; serve_child(); "
        "print(child_command() == [sys.executable, SWITCH])"
    )
    assert subprocess.run([sys.executable, "-c", code, "clip.mp4"], capture_output=True, check=True).stdout == b"True\n"
