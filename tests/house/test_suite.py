"""The suite itself: a test that hangs ends, a counter-example is shown, and examples are the same each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.old_onnxruntime import reasons

ROOT = Path(__file__).parents[2]
HANGS = {
    "asleep": "import time; time.sleep(600)",
    "in a library that holds the interpreter": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "in a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


def run_tests(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Pytest with the settings of this repository, on a test file of this source."""
    path = folder / "test_made_up.py"
    path.write_text(source, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        "-p",
        "no:cacheprovider",
        *options,
        path,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("how", HANGS)
def test_a_test_that_hangs_fails_by_name_and_the_others_run(tmp_path: Path, how: str) -> None:
    source = f"def test_hangs():\n    {HANGS[how]}\n\n\ndef test_works():\n    pass\n"
    done = run_tests(tmp_path, source, "--numprocesses", "1", "-o", "faulthandler_timeout=1")
    assert done.returncode == 1
    assert "crashed while running 'test_made_up.py::test_hangs'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "in test_hangs" in done.stderr + done.stdout, "the stack is not told"


def test_every_test_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


BIG = """
from hypothesis import given, settings
from hypothesis import strategies as st

@settings(database=None)
@given(st.integers(0, 3).map(lambda n: (n, "x" * 40_000)))
def test_big(drawn):
    with open("seen", "a") as seen:
        seen.write(f"{drawn[0]} ")
    assert drawn[0] < 2
"""


def test_a_counter_example_with_a_large_argument_is_shown(tmp_path: Path) -> None:
    done = run_tests(tmp_path, BIG, "--capture=no")
    assert done.returncode == 1
    assert "HypothesisWarning" not in done.stdout
    assert "assert 2 < 2" in done.stdout


def test_an_onnxruntime_is_old_by_its_release() -> None:
    releases = {"1.22.1": 3, "1.23.2": 3, "1.24.0": 1, "1.26.3": 1, "1.27.0": 0, "1.31.1": 0, "2.0": 0}
    assert {release: len(reasons(release)) for release in releases} == releases
    assert "Opset 24 is under development" not in reasons("1.24.0")
