from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtx.runtime.errors import CheckpointError, ImageError, RequestError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits are Linux's"),
    pytest.mark.usefixtures("children_started"),
]
SMALL = ChildLimits(memory=512 << 20, cpu_seconds=30, wall_seconds=300, file=1 << 20)  # its imports count, too
LARGE = replace(SMALL, file=64 << 20)


def run(kind: str, limits: ChildLimits = SMALL) -> object:
    return confine(ChildTask("tests.support.failing:fail", kind, limits), Subject("the file of a stranger"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("memory", "needs more than 537 MB of memory to read, the limit"),
        ("cpu", "takes more than 1 s of processor time to read, the limit"),
        ("file", "makes a file of more than 1.05 MB, the limit"),
        ("abort", r"crashes the process that reads it \(SIGABRT\)"),
        ("crash", r"crashes the process that reads it \(SIGSEGV\)"),
        ("nonsense", r"cannot be read \(its process answers nonsense\)"),
        ("long", "makes a file of more than 1.05 MB, the limit"),
        ("error", r"cannot be read \(ZeroDivisionError: by nothing\)"),
    ],
)
def test_each_limit_ends_as_one_line_that_names_it(kind: str, message: str) -> None:
    limits = replace(SMALL, cpu_seconds=1) if kind == "cpu" else SMALL
    with pytest.raises(CheckpointError, match=f"^the file of a stranger {message}.*; it is damaged") as error:
        run(kind, limits)
    assert "\n" not in str(error.value)


@pytest.mark.slow
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
        confine(ChildTask("tests.support.failing:fail", "abort"), Subject("the picture", ImageError))


def test_a_result_comes_back_and_prints_do_not_harm_it() -> None:
    assert run("fine") == "fine"
    assert run("print") == "quiet"


def test_items_arrive_before_the_result_each_with_its_payload() -> None:
    items: list[Any] = []
    value = confine(
        ChildTask("tests.support.failing:count", 3), Subject("it"), receive=lambda *item: items.append(item)
    )
    assert value == "end"
    assert items == [({"number": 1}, b"ab"), ({"number": 2}, b"aab"), ({"number": 3}, b"aaab")]


def test_what_the_receiver_raises_ends_the_child() -> None:
    def receive(item: dict[str, Any], _: bytearray) -> None:
        if item["number"] == 5:
            raise ImageError("enough")

    with pytest.raises(ImageError, match="enough"):
        confine(ChildTask("tests.support.failing:count", -1), Subject("it"), receive=receive)


def test_a_child_whose_result_nobody_wants_any_more_is_ended() -> None:
    stopping = threading.Event()
    threading.Timer(0.2, stopping.set).start()
    with pytest.raises(RequestError, match="it is no longer wanted"):
        confine(ChildTask("tests.support.failing:fail", "sleep"), Subject("it"), stopped=stopping.is_set)


@pytest.mark.slow
def test_threads_have_children_side_by_side() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [
            threads.submit(confine, ChildTask("tests.support.failing:fail", f"fine {number}"), Subject("it"))
            for number in range(8)
        ]
        assert [future.result() for future in found] == [f"fine {number}" for number in range(8)]


def test_the_child_loads_no_heavy_library() -> None:
    modules = confine(ChildTask("tests.support.failing:loaded", None, SMALL), Subject("nothing"))
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
