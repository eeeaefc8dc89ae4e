from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vtx.exporter.checkpoint.confined import ChildLimits, confine
from vtx.runtime.errors import CheckpointError, ImageError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits are Linux's"),
    pytest.mark.usefixtures("children_started"),
]
SMALL = ChildLimits(memory=512 << 20, cpu_seconds=30, wall_seconds=300, file=1 << 20)  # its imports count, too
LARGE = replace(SMALL, file=64 << 20)


def run(kind: str, limits: ChildLimits = SMALL) -> object:
    return confine("tests.support.confined:fail", kind, subject="the file of a stranger", limits=limits)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("memory", "needs more than 537 MB of memory to read, the limit"),
        ("cpu", "takes more than 1 s of processor time to read, the limit"),
        ("file", "makes a file of more than 1.05 MB, the limit"),
        ("abort", r"crashes the process that reads it \(SIGABRT\)"),
        ("error", r"cannot be read \(ZeroDivisionError: by nothing\)"),
    ],
)
def test_each_limit_ends_as_one_line_that_names_it(kind: str, message: str) -> None:
    limits = replace(SMALL, cpu_seconds=1) if kind == "cpu" else SMALL
    with pytest.raises(CheckpointError, match=f"^the file of a stranger {message}.*; it is damaged") as error:
        run(kind, limits)
    assert "\n" not in str(error.value)


def test_a_lower_limit_of_the_shell_holds_and_is_named_beside_the_cure() -> None:
    lower = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20)); "
    code = f"{lower}from {__name__} import LARGE, run; print(run('fine', LARGE), flush=True); run('file', LARGE)"
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=False)
    assert done.stdout == "fine\n"
    assert "makes a file of more than 8.39 MB, the limit; raise the limits of this shell (see ulimit -a)" in done.stderr


def test_a_child_that_waits_is_ended_at_the_deadline() -> None:
    with pytest.raises(CheckpointError, match="takes more than 1 s to read, the limit"):
        run("sleep", ChildLimits(wall_seconds=1))


def test_the_error_is_the_one_the_caller_names() -> None:
    with pytest.raises(ImageError, match="the picture crashes"):
        confine("tests.support.confined:fail", "abort", subject="the picture", error=ImageError)


def test_a_result_comes_back_and_prints_do_not_harm_it() -> None:
    assert run("fine") == "fine"
    assert run("print") == "quiet"


def test_the_child_loads_no_heavy_library() -> None:
    modules = confine("tests.support.confined:loaded", None, subject="nothing", limits=SMALL)
    assert isinstance(modules, list)
    assert not {"torch", "onnx", "onnxruntime", "PIL", "transformers"} & set(modules)


def test_the_working_directory_gives_the_child_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    assert run("fine") == "fine"
    assert not (tmp_path / "ran").exists()
    assert os.getcwd() == str(tmp_path)
