"""The program that child processes run: this Python, or a frozen program whose PyInstaller hook makes it one."""

from __future__ import annotations

import json
import os
import re
import sys

from vtx.runtime.errors import DeviceError

SWITCH = "--vtx-confined-child"
# Isolated, so that neither the working directory nor an environment variable says what is imported.
_START = (
    "import json, sys; path, task = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from vtx.runtime.host.confined_child import main; main(task)"
)
_PYTHON = re.compile("python|pypy", re.IGNORECASE)
_hooked = False  # this frozen program has called `serve_child`


def python() -> str:
    """The path of this Python. Raises DeviceError in a program that is none: started as one, it would run itself."""
    name = os.path.basename(sys.executable or "")
    if getattr(sys, "frozen", False) or "__compiled__" in globals() or not _PYTHON.match(name):
        raise DeviceError(
            f"{name or 'this program'} is not a Python, so it cannot start a child process of vtx; run it with python, "
            "or freeze it with PyInstaller, which finds the hook that comes with vtx"
        )
    return sys.executable


def child_command() -> list[str]:
    """The beginning of a confined child's command; its path and task follow. Raises DeviceError, as `python`."""
    return [sys.executable, SWITCH] if _hooked else [python(), "-I", "-c", _START]


def serve_child() -> None:
    """Run the confined child, and nothing else, if this frozen program was started as one: at its very start."""
    global _hooked
    if sys.argv[1:2] == [SWITCH]:
        from vtx.runtime.host.confined_child import main

        main(json.loads(sys.argv[3]))
        sys.exit()
    _hooked = True


def hook_folders() -> list[str]:
    """The folder of PyInstaller's hook, which PyInstaller asks for by the entry point `pyinstaller40`."""
    return [os.path.join(os.path.dirname(__file__), "pyinstaller")]
