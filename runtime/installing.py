"""The command that adds packages to the Python that runs vtx, the same for a wheel's file, an index and a clone."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import cache
from pathlib import Path


@cache
def pip_install() -> str:
    """The `pip install` of this Python: by name where a shell finds that pip, otherwise by the path of the Python."""
    command = shutil.which("pip")
    if command is not None and Path(command).parent == Path(sys.executable).parent:
        return "pip install"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {sys.executable}"
    return f"{sys.executable} -m pip install"


def install(extra: str, options: str = "") -> str:
    """The command that installs an extra's packages; to pip the installed vtx is `vtx-edge`, with or without index."""
    return f'{pip_install()} {options}"vtx-edge[{extra}]"'
