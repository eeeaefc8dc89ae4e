"""Plant small faults one at a time in a copy of this repository, and see which of them its tests find.

    python scripts/planted.py            every fault of planted.toml
    python scripts/planted.py watch fit  those of some rooms

A fault counts as found if one of the tests named beside it, which `make test` runs too, fails. Before the first one all
named tests must pass. Ends with 1 if fewer than `LEAST` of the faults are found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TREE = ROOT / "build/planted"
LEAST = 0.95
CPP = "runtime/cpp/"
# Of pytest: no test failed, some did; whatever else is neither, but for a run that ended by a signal or its limit.
PASSED, NO_RESULT = 0, (2, 3, 4, 5)


def read_faults(rooms: list[str]) -> list[dict[str, Any]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    faults: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["fault"]
    return [fault for fault in faults if not rooms or fault["room"] in rooms]


def copy_tree() -> None:
    """The files of this checkout that git knows, its environment, and nothing that was built."""
    build = TREE / "build"
    for entry in TREE.iterdir() if TREE.exists() else ():
        if entry == build:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    TREE.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = TREE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (TREE / ".venv").symlink_to((ROOT / ".venv").resolve())


def run(*command: str) -> tuple[int, str]:
    """The exit code and the end of the output of a command in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(TREE / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, (done.stdout + done.stderr)[-4000:]


def build() -> None:
    code, told = run("make", "--no-print-directory", "--assume-old", ".venv/.ready", "cpp")
    if code:
        raise SystemExit(f"planted: libvtx cannot be built:\n{told}")


def tested(tests: list[str]) -> tuple[int, str]:
    options = ("-x", "-q", "-m", "not slow", "-o", "faulthandler_timeout=240")
    return run(".venv/bin/python", "-m", "pytest", *options, *tests)


def finder(fault: dict[str, Any]) -> str | None:
    """The test that fails with a fault, or None. Leaves the file as it was."""
    path = TREE / fault["file"]
    sound = path.read_text("utf-8")
    if sound.count(fault["old"]) != 1:
        raise SystemExit(f"planted: {fault['file']} has {sound.count(fault['old'])} times: {fault['old']}")
    path.write_text(sound.replace(fault["old"], fault["new"]), "utf-8")
    try:
        if fault["file"].startswith(CPP):
            build()
        code, told = tested(fault["tests"])
    finally:
        path.write_text(sound, "utf-8")
    if code in NO_RESULT:
        raise SystemExit(f"planted: the tests of {fault['file']} could not be run:\n{told}")
    failed = re.search(r"^(?:FAILED|ERROR) \S+/(\S+)", told, re.MULTILINE)
    return None if code == PASSED else failed[1] if failed else "a test that ended the run"


def main() -> None:
    faults = read_faults(sys.argv[1:])
    copy_tree()
    if any(test.startswith("tests/runtime/cpp") for fault in faults for test in fault["tests"]):
        build()
    code, told = tested(sorted({test for fault in faults for test in fault["tests"]}))
    if code != PASSED:
        raise SystemExit(f"planted: tests fail without a fault:\n{told}")
    missed = 0
    for number, fault in enumerate(faults, 1):
        test = finder(fault)
        missed += test is None
        result = "MISSED" if test is None else f"found by {test}"
        print(f"{number}. {fault['room']}: {fault['what']} ({fault['file']}): {result}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    raise SystemExit(missed > (1 - LEAST) * len(faults))


if __name__ == "__main__":
    main()
