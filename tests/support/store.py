"""Checkpoints and bundles that tests make and share, kept in `build` while the code that makes them stays the same."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/tests-made"
CODE = ("exporter", "tools", "runtime", "profiles", "tests/support")
LIBRARIES = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "openvino",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
LOCKS: list[int] = []  # file descriptors, open until the process ends


@cache
def digest_of_code() -> str:
    """A digest of all that decides what is made: sources, the versions of libraries, and where this checkout lies."""
    digest = hashlib.sha256(f"{ROOT} {sys.version} {os.uname()}".encode())
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f"{library} {version(library)}\n".encode())
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc" and "cpp" not in path.parts:
                digest.update(f"{path} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def open_store(root: Path = FOLDER, code: str | None = None) -> Path:
    """The folder of this code's, for as long as this process lives; those of other code are removed, if not in use."""
    code = digest_of_code() if code is None else code
    root.mkdir(parents=True, exist_ok=True)
    for other in root.iterdir():
        if other.is_dir() and other.name != code:
            _remove_unused(other, other)
    folder = root / code
    _remove_unused(folder / "unfinished", folder)  # of processes that ended before they published it
    LOCKS.append(_lock(folder, fcntl.LOCK_SH))
    (folder / "unfinished").mkdir(parents=True, exist_ok=True)
    return folder


def _lock(folder: Path, how: int) -> int:
    """A lock on the use of a folder, as long as this file is open; BlockingIOError if another one forbids it."""
    file = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    return file


def _remove_unused(folder: Path, store: Path) -> None:
    """Remove a folder of a store that no process uses."""
    with suppress(BlockingIOError):
        lock = _lock(store, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def new_folder(store: Path) -> Path:
    """An empty folder of the store, to be filled and then published."""
    return Path(mkdtemp(dir=store / "unfinished"))


def publish(folder: Path, target: Path) -> None:
    """Move a folder to `target`, unless another process was sooner with the same."""
    os.utime(folder)
    with suppress(OSError):
        folder.rename(target)
    shutil.rmtree(folder, ignore_errors=True)


@cache
def verified(folder: Path) -> Path:
    """The published folder; AssertionError if a file of it was written since."""
    published = folder.stat().st_mtime_ns
    later = [path.name for path in folder.rglob("*") if path.lstat().st_mtime_ns > published]
    assert not later, f"a test has changed {later} in {folder}: let it change a copy, and remove that folder"
    return folder
