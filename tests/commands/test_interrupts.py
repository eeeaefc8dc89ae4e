"""Ctrl-C at any time, from the first import on: one line and exit code 130."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vtx.runtime import interrupts

ROOT = Path(__file__).parents[2]
SCRIPTS = dict(re.findall(r'^(vtx[\w-]*) = "vtx\.start:(\w+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M))
# The system interrupts the process when a module of this name is looked for.
BEGINNING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Interrupting())
sys.argv = {argv!r}
from vtx.start import {function}
{function}()
"""


def interrupted(argv: list[str], module: str, sent: str = "SIGINT", **more: str) -> subprocess.CompletedProcess[str]:
    script = BEGINNING.format(module=module, signal=sent, argv=argv, function=SCRIPTS[argv[0]])
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | more, timeout=120)


@pytest.mark.sampled(27)
@pytest.mark.parametrize("module", ["vtx.cli", "click", "vtx.runtime.terminal.console"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_ends_with_one_line_while_it_is_imported(name: str, module: str) -> None:
    done = interrupted([name, "--help"], module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: interrupted\n")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("argv", "module"),
    [
        (["vtx-run", "--text-only", "?"], "numpy"),
        (["vtx-plan", "--model", "vila-7b"], "vtx.tools.estimate.plan"),
        (["vtx-plan", "--model", "vila-7b"], "rich.table"),  # in the middle of the output
        (["vtx", "plan", "--model", "vila-7b"], "vtx.commands.plan"),
        (["vtx-export", "--out", "bundle"], "numpy"),
        (["vtx-export", "--out", "bundle"], "torch"),
        (["vtx-export", "--out", "bundle"], "transformers"),
    ],
)
def test_libraries_that_a_command_imports_end_it_with_one_line(argv: list[str], module: str, tmp_path: Path) -> None:
    done = interrupted(argv, module, XDG_STATE_HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 130, done.stderr
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert lines[-1].endswith(": interrupted")
    assert sum(line.endswith("interrupted") for line in lines) == 1


def test_an_interrupt_that_python_drops_ends_the_command_all_the_same() -> None:
    script = (
        "import sys, weakref; sys.argv[0] = 'vtx-run'\n"
        "from vtx.runtime.interrupts import Interruptible, leave_at_interrupt\n"
        "import os, signal\n"
        "class Thing: pass\n"
        "leave_at_interrupt()\n"
        "with Interruptible():\n"
        "    thing = Thing()\n"
        "    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "    del thing\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "vtx-run: interrupted\n"


def test_a_command_that_is_started_to_ignore_interrupts_ignores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts.leave_at_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_application_keeps_its_own_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.Interruptible():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before
