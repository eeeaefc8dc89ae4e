"""The one way to open a file of an untrusted checkpoint or bundle.

A link is followed only while it stays inside the folder, and only once: the file behind it is opened from the folder
downwards without following anything, so that a link swapped in meanwhile is refused. Pipes, devices and directories
are never waited for or read. Content is read once, and the bytes that are used are the ones that are checked.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vtx.runtime.errors import RequestError, VtxError

BLOCK = 1 << 22  # bytes that are hashed at a time
POINTER = b"version https://git-lfs.github.com/spec/"  # begins the file that git-lfs leaves until it fetches
# Absent on Windows, which cannot open by the descriptor of a directory and has no pipes in folders.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_BY_DESCRIPTOR = os.open in os.supports_dir_fd and bool(_NO_FOLLOW and _DIRECTORY)


class Identity(NamedTuple):
    """A file's identity: another file of the same name differs, and so does the file after a write."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint's or a bundle's directory. `kind` and `cure` are for messages; links may lead into `stores`."""

    path: Path
    kind: str
    error: type[VtxError]
    cure: str
    stores: tuple[Path, ...] = ()

    def exists(self, name: str) -> bool:
        """Return True if the name exists, even as a dangling link: opening it then names the problem."""
        with contextlib.suppress(ValueError):
            return os.path.lexists(self.path / name)
        return False

    def open(self, name: str, limit: int | None = None, *, links: bool = True) -> BinaryIO:
        """Open a regular file of at most `limit` bytes; with `links=False` no link is followed at all.

        Raises `error` for a file that is missing, too large, out of the folder, or of another kind.
        """
        try:
            root = Path(os.path.realpath(self.path, strict=True))
            if links:
                target = Path(os.path.realpath(self.path / name, strict=True))
                bases = (root, *map(Path, map(os.path.realpath, self.stores)))
                base = next((base for base in bases if target.is_relative_to(base)), None)
                if base is None:
                    raise self.error(
                        f"{name} is a link that leaves the {self.kind}, to {target}; if you trust it, use a copy of "
                        f"the {self.kind} with files in place of links: cp -rL {self.path} COPY"
                    )
                descriptor = _open_below(base, target.relative_to(base).parts)
            else:
                descriptor = _open_below(root, Path(name).parts)
        except (OSError, ValueError, RuntimeError) as cause:
            problem = f"cannot be read ({reason(cause)})"
            if isinstance(cause, FileNotFoundError):
                problem = f"is missing from the {self.kind} {self.path}"
            with contextlib.suppress(OSError, ValueError):
                if (self.path / name).is_symlink():
                    problem = f"is a dangling link, or a link that may not be followed ({reason(cause)})"
            raise self.error(f"{name} {problem}; {self.cure}") from cause
        return _regular(descriptor, name, limit, self.error)

    def read(self, name: str, limit: int, *, links: bool = True) -> bytes:
        """The whole content of a file of at most `limit` bytes. Raises `error` as `open` does."""
        with self.open(name, limit, links=links) as file:
            return read_all(file, name, self.error)


def open_named(path: Path, *, error: type[VtxError], limit: int | None = None) -> BinaryIO:
    """Open a regular file that the user named, in any folder; links are followed. Raises `error`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_WAIT | _FLAGS)
    except (OSError, ValueError) as cause:
        if os.path.isdir(path):  # Windows does not open directories
            raise error(f"{path} is a directory, a regular file is needed") from cause
        raise error(f"cannot read {path}: {reason(cause)}; check the path") from cause
    return _regular(descriptor, str(path), limit, error)


def read_named(path: Path, limit: int, *, error: type[VtxError]) -> bytes:
    """Read a file of at most `limit` bytes that the user named. Raises `error`."""
    with open_named(path, error=error, limit=limit) as file:
        return read_all(file, path.name, error)


def read_text_file(path: Path, limit: int) -> bytes:
    """The UTF-8 text in a file of at most `limit` bytes that the user named, without a byte order mark.

    Editors and shells of Windows write one. Raises RequestError.
    """
    return read_named(path, limit, error=RequestError).removeprefix(codecs.BOM_UTF8)


def read_all(file: BinaryIO, name: str, error: type[VtxError]) -> bytes:
    """The bytes of a file just opened, and not one more than it had then. Raises `error`."""
    size = os.fstat(file.fileno()).st_size
    try:
        content = file.read(size)
    except OSError as cause:
        raise error(f"{name} cannot be read ({reason(cause)}); check the disk") from cause
    if len(content) != size:
        raise error(f"{name} shrank from {size:,} to {len(content):,} bytes while it was read; try again")
    check_fetched(content, name, error)
    return content


def check_fetched(content: bytes, name: str, error: type[VtxError]) -> None:
    """Raise `error` if a file that begins with `content` is a placeholder of a file that git has not fetched."""
    if content.startswith(POINTER):
        raise error(f"{name} is a pointer of git-lfs, not the file itself; fetch it: git lfs pull")


def digest(file: BinaryIO, name: str, error: type[VtxError], progress: Callable[[int], None] = lambda _: None) -> str:
    """Hex SHA-256 of a file from its start on, read in blocks; `progress` gets the bytes of each. Raises `error`."""
    total = hashlib.sha256()
    try:
        file.seek(0)
        while block := file.read(BLOCK):
            total.update(block)
            progress(len(block))
        file.seek(0)
    except OSError as cause:
        raise error(f"{name} cannot be read ({reason(cause)}); check the disk") from cause
    return total.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file next to `path` to write to; once synced it replaces `path`, or is removed after an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def sync_file(path: Path) -> None:
    """Sync a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(cause: Exception) -> str:
    """The system's reason of a failure, without the path, which the message names already."""
    return str(getattr(cause, "strerror", None) or cause)


def _open_below(root: Path, parts: tuple[str, ...]) -> int:
    if not parts:
        raise IsADirectoryError(21, "Is a directory")
    if not _BY_DESCRIPTOR:  # open the path, which was resolved, and check that it still leads here
        path = root.joinpath(*parts)
        descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW | _FLAGS)
        if os.path.realpath(path) == str(path) and os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)
        raise OSError("it was replaced while it was opened")
    folder = os.open(root, os.O_RDONLY | _DIRECTORY | _FLAGS)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | _DIRECTORY | _NO_FOLLOW | _FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], os.O_RDONLY | _NO_FOLLOW | _NO_WAIT | _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)


def _regular(descriptor: int, name: str, limit: int | None, error: type[VtxError]) -> BinaryIO:
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
        problem = f"{name} is {kind}, a regular file is needed"
    elif limit is not None and status.st_size > limit:
        problem = f"{name} holds {status.st_size:,} bytes, the limit for such a file is {limit:,}"
    if problem:
        os.close(descriptor)
        raise error(problem)
    return os.fdopen(descriptor, "rb")
