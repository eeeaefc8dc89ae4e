"""The staging directory of a bundle: a hidden sibling of the output directory, renamed to it when complete.

Exports to the same output directory lock each other out; the next export clears what a killed one left.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vtx.exporter.weights.journal import key_in
from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.bundle.seal import unseal
from vtx.runtime.errors import ExportError
from vtx.tools.common.files import locked, open_directory


class NeedsConsentError(ExportError):
    """A finished bundle is further from its checkpoint than users would expect; the same command may allow it."""


def check_target(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir() or not ((out / MANIFEST).is_file() or not any(out.iterdir())):
        raise ExportError(f"{out} exists and is not a bundle, so nothing replaces it; name another --out")
    if not force:
        raise ExportError(f"{out} exists already; --force replaces it, or name another --out")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ExportError(f"cannot create the directory {folder} ({e.strerror}); name another --out") from e


def set_back_after_killed(out: Path) -> None:
    """Restore the bundle that a killed export had moved away."""
    for old in out.parent.glob(f".{glob.escape(out.name)}.replaced-*"):
        set_back(old, out)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other exports from making or moving directories in `folder`, if the file system has locks."""
    descriptor = open_directory(folder)
    try:
        with suppress(OSError):
            locked(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder` while it is open; None if another process holds it."""
    try:
        descriptor = open_directory(folder)
    except OSError:
        return None
    with suppress(OSError):
        if locked(descriptor):
            return descriptor
    os.close(descriptor)
    return None


@contextmanager
def building(out: Path, key: str, say: Callable[[str], None]) -> Iterator[Path]:
    """A hidden sibling of `out` to build in: the one of an interrupted export with the same `key`, else a new one.

    An interruption and a NeedsConsentError leave it for the next export to `out`; other errors leave nothing.
    """
    folder = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    lock = None
    keep = False
    try:
        with alone_in(out.parent):
            folder, lock = _interrupted(out, key, say) or (folder, None)
            if lock is None:
                folder.mkdir()
                lock = _lock(folder)
        yield folder
    except (KeyboardInterrupt, SystemExit):
        keep = True
        if folder.is_dir():
            say(f"what is finished is kept in a hidden directory next to {out}; the same command resumes there")
        raise
    except NeedsConsentError:
        keep = True
        raise
    except OSError as e:
        raise ExportError(
            f"cannot write the bundle under {out.parent} ({e.strerror}); nothing was left behind; "
            "free some space there, or name another --out"
        ) from e
    finally:
        if not keep:
            _remove(folder)
        if lock is not None:
            os.close(lock)


def _interrupted(out: Path, key: str, say: Callable[[str], None]) -> tuple[Path, int] | None:
    """The directory of an interrupted export that can be resumed, and its lock; every other one is removed."""
    resumable: tuple[Path, int] | None = None
    for folder in sorted(out.parent.glob(f".{glob.escape(out.name)}.partial-*")):
        lock = _lock(folder)
        if lock is None:
            continue
        if resumable is None and key_in(folder) == key:
            (folder / MANIFEST).unlink(missing_ok=True)
            unseal(folder / MANIFEST)
            resumable = folder, lock
            continue
        if resumable is None:
            say("the interrupted export here had other options or another checkpoint; starting afresh")
        _remove(folder)
        os.close(lock)
    return resumable


def left_bytes(out: Path, names: Collection[str]) -> int:
    """Bytes on the disk of the files `names` that interrupted exports to `out` left, to be used or removed."""
    total = 0
    for folder in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        if (lock := _lock(folder)) is not None:  # else it is in use
            total += sum(512 * (folder / name).stat().st_blocks for name in names if (folder / name).is_file())
            os.close(lock)
    return total


def put_in_place(folder: Path, out: Path, force: bool) -> None:
    """Rename the complete bundle to `out`; the one it replaces goes afterwards, without `force` there is none."""
    old = out.with_name(f".{out.name}.replaced-{secrets.token_hex(4)}")
    try:
        if force and out.exists():
            out.rename(old)
        folder.rename(out)
    except OSError as e:
        if (out / MANIFEST).is_file():
            raise ExportError(f"another export made {out} meanwhile; --force replaces it, or name another --out") from e
        raise
    finally:
        set_back(old, out)
        if old.exists() and not out.exists():
            raise ExportError(
                f"the disk refuses to rename: the former bundle {out} is intact, and is now {old}; "
                "move it back, or export again, which restores it first"
            )


def set_back(old: Path, out: Path) -> None:
    """Rename the bundle `old` back to `out` if that is free, else remove it."""
    if (old / MANIFEST).is_file():
        with suppress(OSError):
            old.rename(out)
    if old.exists() and ((out / MANIFEST).is_file() or not (old / MANIFEST).is_file()):
        _remove(old)


def _remove(folder: Path) -> None:
    """Remove a directory, its manifest first: killed midway, it leaves nothing that looks whole."""
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
