"""A disk that fills, or fails: from the n-th on, reads, writes, fsyncs or renames of this process raise an OSError."""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

OPERATIONS = ("read", "write", "fsync", "rename")


class Disk:
    """Counts operations on files below `folder`; from the `first`-th of `operation` on, or `once`, they fail."""

    def __init__(
        self, folder: str, operation: str = "", first: int = 0, code: int = errno.ENOSPC, *, once: bool = False
    ) -> None:
        self.folder, self.operation, self.first, self.code = folder, operation, first, code
        self.last = first if once else 1 << 62
        self.counts = dict.fromkeys(OPERATIONS, 0)

    def does(self, operation: str) -> None:
        self.counts[operation] += 1
        if operation == self.operation and self.first <= self.counts[operation] <= self.last:
            raise OSError(self.code, os.strerror(self.code))


@contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """All files that Python opens below the disk's folder, `os.fsync` and renames go through `disk`."""

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            disk.does("write")
            return super().write(content)

        def readinto(self, buffer: Any) -> int:
            disk.does("read")
            return super().readinto(buffer)

        def readall(self) -> bytes:
            disk.does("read")
            return super().readall()

        def read(self, size: int | None = -1, /) -> bytes:
            disk.does("read")
            return super().read(size)

    real_open = io.open

    def open_(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if not str(path).startswith(disk.folder):
            return real_open(file, mode, buffering, *rest, **more)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter if set(mode) & set("wxa") else None
        buffered: Any = (kind or io.BufferedReader)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8", write_through=bool(kind))

    def fdopen(descriptor: int, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return open_(descriptor, mode, *rest, **more)

    def counted(operation: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            disk.does(operation)
            real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", open_)
        patch.setattr(builtins, "open", open_)
        patch.setattr(os, "fdopen", fdopen)
        patch.setattr(os, "fsync", counted("fsync", os.fsync))
        patch.setattr(os, "rename", counted("rename", os.rename))
        patch.setattr(os, "replace", counted("rename", os.replace))
        if sys.version_info < (3, 11):  # whose paths hold functions of their own
            accessor: Any = vars(pathlib)["_NormalAccessor"]
            patch.setattr(accessor, "open", staticmethod(open_))
            patch.setattr(accessor, "rename", staticmethod(os.rename))
            patch.setattr(accessor, "replace", staticmethod(os.replace))
        yield disk
