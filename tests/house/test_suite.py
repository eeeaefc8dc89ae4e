"""The suite itself: test files stand alone, one that hangs ends, counter-examples are shown, examples do not vary."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import quick as quick_run
from tests.support.budget import SHARE, too_large
from tests.support.old_onnxruntime import reasons
from tests.support.quick import HEADLINES, SHOWN_ELSEWHERE, is_slow, left_out, planted, repeated
from tests.support.scripts import script

ROOT = Path(__file__).parents[2]
HANGS = {
    "asleep": "import time; time.sleep(600)",
    "in a library that holds the interpreter": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "in a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


# An import of another test file, or of anything of tests but tests.support.
NOT_SHARED = re.compile(r"^ *(?:from \.|(?:from|import) tests\b(?!\.support\b)).*", re.MULTILINE)


def test_what_test_files_share_stands_in_support() -> None:
    """A program that a test runs in a process of its own may import that test's file."""
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in NOT_SHARED.findall(path.read_text(encoding="utf-8"))
        if f" {'.'.join(path.relative_to(ROOT).with_suffix('').parts)} " not in line
    ]
    assert not wrong, "move what they share to tests/support: " + "; ".join(sorted(wrong))
    for line in ("from tests.house import x", "    import tests.house", "from . import x", "from tests import house"):
        assert NOT_SHARED.search(line)
    assert not NOT_SHARED.search("from tests.support import x\nimport tests.support.tiny")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_counter_example_with_a_large_argument_is_shown(tmp_path: Path) -> None:
    done = run_tests(tmp_path, BIG, "--capture=no")
    assert done.returncode == 1
    assert "HypothesisWarning" not in done.stdout
    assert "assert 2 < 2" in done.stdout


def test_an_onnxruntime_is_old_by_its_release() -> None:
    releases = {"1.22.1": 3, "1.23.2": 3, "1.24.0": 1, "1.26.3": 1, "1.27.0": 0, "1.31.1": 0, "2.0": 0}
    assert {release: len(reasons(release)) for release in releases} == releases
    assert "Opset 24 is under development" not in reasons("1.24.0")


def test_a_file_above_its_share_of_the_processor_time_is_refused_by_name() -> None:
    others = {f"tests/test_{number}.py": 1.0 for number in range(95)}
    [line] = too_large({**others, "tests/test_large.py": 5.5})
    assert line.startswith("tests/test_large.py takes 6 s of processor time, 5.5% of the run; a file may take 5%: ")
    assert too_large({**others, "tests/test_large.py": SHARE * 99}) == []


MANY = """
import pytest

@pytest.fixture(scope="session")
def tiny_checkpoint():
    return None

@pytest.mark.parametrize("k", [None, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_with_a_model(tiny_checkpoint, device, k): ...

@pytest.mark.sampled(5)
@pytest.mark.parametrize("k", [None, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_that_is_sampled(tiny_checkpoint, device, k): ...

@pytest.mark.covering(2)
@pytest.mark.parametrize("k", [None, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_of_pairs(tiny_checkpoint, device, k): ...

@pytest.mark.parametrize("k", [None, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (5, 8))])
@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_partly_slow(tiny_checkpoint, device, k): ...

@pytest.mark.parametrize("k", [None, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "openvino"])
def test_without_a_model(device, k): ...

def test_of_the_family(model): ...
def test_that_others_show(model): ...
"""


def collected(request: pytest.FixtureRequest, folder: Path, name: str) -> list[pytest.Item]:
    """The tests of `MANY` in a file of this name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MANY, encoding="utf-8")
    module = pytest.Module.from_parent(request.session, path=path, nodeid=name)
    return [item for item in request.session.genitems(module) if isinstance(item, pytest.Item)]


def test_of_cases_with_a_model_those_are_run_that_have_every_value(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VTX_SEQUENCES", raising=False)
    monkeypatch.setattr(quick_run, "ENGINES", ("tests/runtime/server/",))
    items = collected(request, tmp_path, "tests/runtime/server/test_any.py")
    run = [item for item in items if item not in repeated(items)]
    of_model = [item.callspec.params for item in run if item.name.startswith("test_with_a")]  # type: ignore[attr-defined]
    assert len(of_model) == 3
    assert {params["k"] for params in of_model} == {None, 3, 5}
    assert {params["device"] for params in of_model} == {"cpu", "openvino"}
    partly = Counter(is_slow(item) for item in run if item.name.startswith("test_partly"))  # type: ignore[arg-type]
    assert partly == {True: 2, False: 2}
    assert len(run) == 3 + 6 + 6 + 4 + 6 + 2
    quick = [item for item in run if not is_slow(item) and item not in left_out(run)]  # type: ignore[arg-type]
    assert len(quick) == 3 + 6 + 3 + 2 + 6 + 2, "pairs of values are left to the slow run"
    monkeypatch.setenv("VTX_SEQUENCES", "500")
    assert repeated(items) == []


def test_what_is_asked_on_every_engine_is_asked_on_one_but_in_files_about_engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VTX_CPUID_HIDDEN", raising=False)
    items = collected(request, tmp_path, "tests/runtime/server/test_any.py")

    def devices(test: str) -> set[object]:
        chosen = [item for item in items if item not in left_out(items) and item.name.startswith(test)]
        return {item.callspec.params["device"] for item in chosen}  # type: ignore[attr-defined]

    assert devices("test_with_a_model") == {"cpu"}
    assert devices("test_without_a_model") == {"cpu", "openvino"}
    monkeypatch.setattr(quick_run, "ENGINES", ("tests/runtime/server/test_any.py",))
    assert devices("test_with_a_model") == {"cpu", "openvino"}


def test_one_test_with_a_model_is_run_of_a_file_in_the_rooms_that_compute_the_most(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VTX_CPUID_HIDDEN", raising=False)
    monkeypatch.setitem(HEADLINES, "runtime/session/test_named", "test_of_the_family")
    for name, headline in (("test_named", "test_of_the_family"), ("test_first", "test_with_a_model")):
        items = collected(request, tmp_path, f"tests/runtime/session/{name}.py")
        chosen = [item.name.partition("[")[0] for item in items if item not in left_out(items)]
        assert set(chosen) == {"test_without_a_model", headline}
        assert chosen.count("test_without_a_model") == 6
    monkeypatch.setenv("VTX_CPUID_HIDDEN", "avx512f")  # as on a lesser processor
    assert "test_that_others_show" in {item.name for item in items if item not in left_out(items)}


def test_of_a_file_whose_truth_another_shows_no_test_with_a_model_is_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VTX_CPUID_HIDDEN", raising=False)
    monkeypatch.setitem(SHOWN_ELSEWHERE, "runtime/session/test_named", "runtime/session/test_contract")
    items = collected(request, tmp_path, "tests/runtime/session/test_named.py")
    chosen = {item.name.partition("[")[0] for item in items if item not in left_out(items)}
    assert chosen == {"test_without_a_model"}


def test_files_in_which_planted_faults_are_looked_for_are_left_as_they_are(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = next(file for file in sorted(planted()) if file.startswith("tests/runtime/session/"))
    items = collected(request, tmp_path, file)
    assert "test_that_others_show" in {item.name for item in items if item not in left_out(items)}


def test_the_headline_of_each_file_is_there() -> None:
    for file, name in HEADLINES.items():
        source = (ROOT / f"tests/{file}.py").read_text(encoding="utf-8")
        assert f"def {name}(" in source, (file, name)
    for file, shown in SHOWN_ELSEWHERE.items():
        assert (ROOT / f"tests/{file}.py").exists()
        assert (ROOT / f"tests/{shown}.py").exists()
        assert shown not in SHOWN_ELSEWHERE


def test_kinds_of_processors_that_hide_nothing_of_this_one_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    as_processor = script("as_processor")
    monkeypatch.setattr(as_processor, "obstacle", lambda _: None)
    monkeypatch.setattr(as_processor, "flags", lambda: {"avx2"} | as_processor.KINDS["avx512_vnni"])
    assert as_processor.possible_kinds() == ["avx2", "avx2_vnni", "avx512"]
