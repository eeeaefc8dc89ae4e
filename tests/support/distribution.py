"""The wheel as a release is made, and commands that must succeed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("commands", "exporter", "profiles", "runtime", "src", "tools")
FILES = ("LICENSE", "README.md", "cli.py", "pyproject.toml")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """The standard output of a command that must end with `code`."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


def build_wheel(work: Path) -> Path:
    """The wheel, built from the sdist, and that from a copy of the tree with its links."""
    tree = work / "tree"
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    sdist = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    source = tree / run(sys.executable, "-c", sdist, cwd=tree).splitlines()[-1]
    pip_wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", work)
    run(sys.executable, *pip_wheel, source, cwd=work)
    [made] = work.glob("*.whl")
    return made
