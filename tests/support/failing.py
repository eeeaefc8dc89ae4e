"""Functions that go wrong in a confined child, or tell about it: their module imports next to nothing."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from vtx.runtime.host.confined_child import LENGTHS


def loaded(_: Any) -> list[str]:
    """The top-level modules that the child holds."""
    return sorted({name.partition(".")[0] for name in sys.modules})


def fail(kind: str) -> Any:
    """Go wrong in one way."""
    if kind == "memory":
        return len(bytearray(8 << 30))
    if kind == "cpu":
        while True:
            pass
    if kind == "sleep":
        time.sleep(600)
    if kind == "file":
        return "x" * (32 << 20)
    if kind == "print":
        print("noise")
        os.write(1, b"noise")
        return "quiet"
    if kind == "abort":
        os.abort()
    if kind == "crash":
        ctypes.string_at(0)
    if kind in ("nonsense", "long"):
        header = b"[" * 5000 if kind == "nonsense" else b""
        for file in range(3, 20):  # one of them is the answer
            with suppress(OSError):
                os.write(file, LENGTHS.pack(len(header), 0 if header else 1 << 60) + header)
        time.sleep(600)
    if kind == "error":
        raise ZeroDivisionError("by nothing")
    return kind


def count(to: int) -> Generator[tuple[dict[str, int], list[bytes]], None, str]:
    """Items, each with a payload of its number of bytes; "end" once all are taken. Below 0: items for ever."""
    number = 0
    while number != to:
        number += 1
        yield {"number": number}, [b"a" * number, b"b"]
    return "end"
