"""A command's process: it looks for no garbage while it loads, and ends at once with all that it wrote."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from vtx.runtime.process import without_collections

COMMAND = """
import atexit, sys
import click
from vtx.runtime.errors import VtxError
from vtx.runtime.terminal.console import command

class Kept:
    def __del__(self):
        print("taken apart")

@command(epilog="", leaves=True)
def answer():
    atexit.register(print, "done at the end")
    global kept
    kept = Kept()
    print("answer")
    if LATE:
        raise VtxError("too late")

answer([])
"""


@pytest.mark.parametrize(
    ("late", "code", "written"), [(False, 0, ["answer", "done at the end"]), (True, 1, ["answer", "done at the end"])]
)
def test_a_command_ends_with_what_it_wrote_and_what_was_to_be_done_at_its_end(
    late: bool, code: int, written: list[str]
) -> None:
    source = COMMAND.replace("LATE", str(late))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (code, written)
    assert ("taken apart" in done.stdout) == late, "after an answer nothing is taken apart, which takes time"
    assert ("too late" in done.stderr) == late


def test_garbage_is_looked_for_again_after_a_load() -> None:
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled(), "left as it was"
    assert gc.isenabled()
