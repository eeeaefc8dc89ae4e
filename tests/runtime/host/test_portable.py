"""What runs on a device needs no POSIX: checked, as far as another system shows, with its modules taken away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image

POSIX = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "readline", "curses")
CALLS = (
    "fork", "forkpty", "getuid", "geteuid", "getpgid", "setsid", "killpg", "wait4", "sched_getaffinity", "mkfifo",
    "posix_fadvise", "statvfs", "uname", "sysconf", "chown", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY",
)  # fmt: skip
COMMON = f"""
import sys, os, signal, time
import PIL.Image, click, jinja2, numpy, rich.console, tokenizers, onnxruntime, tempfile, subprocess, threading, ctypes
import importlib.metadata, platform, shutil, logging, concurrent.futures, asyncio
for name in {POSIX!r}:
    sys.modules[name] = None  # its import fails from here on
for name in {CALLS!r}:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGHUP", "alarm", "setitimer", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
"""
IMPORTS = """
import importlib, pkgutil
import vtx, vtx.runtime, vtx.cli
names = [module.name for module in pkgutil.walk_packages(vtx.runtime.__path__, "vtx.runtime.")]
assert len(names) > 80, names
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name.partition(".")[0] not in ("starlette", "uvicorn"):  # of the extra for vtx-serve, where it is missing
            raise
from vtx.runtime.host import device, gpu, machine
assert machine.cores() >= 1
machine.available_memory()
"""


def run(code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", COMMON + code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_of_the_runtime_is_imported_without_posix() -> None:
    run(IMPORTS)


@pytest.mark.slow
def test_commands_of_a_device_show_their_help_without_posix() -> None:
    for command in ("run", "chat", "inspect", "doctor"):
        assert "Usage" in run(f"import vtx.cli\nsys.argv = ['vtx-{command}', '--help']\nvtx.cli.{command}()")


ANSWER = """
import vtx
with vtx.load(sys.argv[1], device="cpu", threads=1) as model, model.open(sys.argv[2]) as image:
    print(len(image.ask("what is it?", options=vtx.Options(max_new_tokens=3)).token_ids))
"""


def test_a_bundle_answers_without_posix(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    export(tiny_checkpoint(Tiny(layers=2)), tmp_path / "bundle", (2,))
    random_image(1).save(tmp_path / "image.png")
    assert 1 <= int(run(ANSWER, str(tmp_path / "bundle"), str(tmp_path / "image.png"))) <= 3
