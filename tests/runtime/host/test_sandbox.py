"""What code inside a confined child may no longer do, whatever brought it there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import attempts
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine, confinement

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's"),
    pytest.mark.usefixtures("children_started"),
]
SMALL = ChildLimits(memory=1 << 30, cpu_seconds=30, wall_seconds=300, file=1 << 20)


@pytest.fixture(scope="module")
def held() -> list[str]:
    return list(confinement())


def tried(name: str, request: Any = None, **task: Any) -> str:
    """What becomes of an attempt in the child: "done", or the error's name."""
    given = {"attempt": name, "request": request}
    return str(confine(ChildTask("tests.support.attempts:attempt", given, SMALL, **task), Subject("it")))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["socket", "unix socket", "exec", "fork", "spawn", "signal", "limits of the parent", "thread"]
)
def test_the_child_has_no_network_and_no_other_process(held: list[str], name: str) -> None:
    if "seccomp" not in held:
        pytest.skip("this kernel has no seccomp filters")
    assert attempts.attempt({"attempt": name, "request": None}) == "done"  # out here it can be done
    assert tried(name, os.getpid()) == ("done" if name == "thread" else "PermissionError")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["write", "append", "truncate", "create", "directory", "remove", "rename", "mode"])
def test_the_child_changes_no_file(held: list[str], tmp_path: Path, name: str) -> None:
    if not {*held} & {"seccomp", "landlock"}:
        pytest.skip("this kernel has neither seccomp filters nor Landlock")
    file = tmp_path / "file"
    file.write_text("as it was")
    before = file.stat()
    assert tried(name, str(file), reads=[tmp_path]) == "PermissionError"
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_text() == "as it was"
    assert file.stat().st_mode == before.st_mode
    assert attempts.attempt({"attempt": name, "request": str(file)}) == "done"


def test_the_child_reads_what_was_named_and_no_other_file(held: list[str], tmp_path: Path) -> None:
    if "landlock" not in held:
        pytest.skip("this kernel has no Landlock")
    for name in ("named", "secret"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    named = [tmp_path / "named"]
    assert tried("read", str(tmp_path / "named"), reads=named) == "done"
    assert tried("read", str(tmp_path / "secret"), reads=named) == "PermissionError"
    assert tried("read", str(tmp_path / "link"), reads=named) == "PermissionError"
    assert tried("read", f"/proc/{os.getpid()}/environ", reads=named) == "PermissionError"


def test_the_child_does_not_see_the_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTX_API_KEY", "secret")
    names = confine(ChildTask("tests.support.attempts:environment", None, SMALL), Subject("nothing"))
    assert "PATH" in names
    assert "VTX_API_KEY" not in names


def test_a_new_call_of_the_kernel_is_refused(held: list[str]) -> None:
    """io_uring opens files and sockets past every filter of these calls."""
    if "seccomp" not in held:
        pytest.skip("this kernel has no seccomp filters")
    assert tried("io_uring") == "ENOSYS"
    assert tried("openat2", __file__) == "ENOSYS"
