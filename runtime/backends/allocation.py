"""How memory is taken and given back, so that no more of it is resident than what is used."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
_MAP_NORESERVE = 0x4000  # Python names it from 3.11 on
_MADV_DONTNEED = 4


def zeros_in_small_pages(shape: tuple[int, ...], dtype: np.dtype[Any], *, reserved: bool = True) -> NDArray[Any]:
    """Zeros that take memory where they are written, page by page of the smallest size.

    A cache [..., heads, capacity, head_dim] that is filled in part has its rows in as many places as it has heads.
    In pages of 2 MiB, which numpy asks Linux for, all of it would become resident. Where it is not `reserved`, it may
    be larger than the memory of the machine.

    Raises:
        MemoryError: the address space or the system's limit is exhausted.

    """
    if sys.platform != "linux":
        return np.zeros(shape, dtype)
    count = math.prod(shape)
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserved else _MAP_NORESERVE)
        memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=flags)
    except OSError as e:
        raise MemoryError(f"no memory for an array of {shape}") from e
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def forget(array: NDArray[Any]) -> None:
    """Give back the memory of a contiguous part of such zeros, but for pages that it shares with its neighbours.

    What it held is zeros afterwards, or as it was.
    """
    if sys.platform != "linux":
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if size > 0:
        advise(first, size, _MADV_DONTNEED)  # where it is refused, nothing but memory is lost


@contextmanager
def returning_memory(*, at_once: bool = True) -> Iterator[None]:
    """What is freed meanwhile, on any thread, goes back to the system, where the C library is glibc.

    Held by several, it lasts until the last of them is done. Loading frees each weight after it is packed. The
    allocator would keep most of that, and the process would be twice as large as what it holds. Where it need not go
    back `at_once` it does so at the end: the system then has to find and clear fewer pages.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallopt"):
        yield
        return
    assert library is not None
    _returning.begin(library, at_once=at_once)
    try:
        yield
    finally:
        _returning.end(library)


@dataclass(slots=True)
class _Returning:
    """How many hold `returning_memory`, whose settings are the process's."""

    held: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, library: ctypes.CDLL, *, at_once: bool) -> None:
        with self.lock:
            self.held += 1
            if at_once:
                library.mallopt(_M_MMAP_THRESHOLD, 1 << 20)

    def end(self, library: ctypes.CDLL) -> None:
        with self.lock:
            self.held -= 1
            if self.held:
                return
            library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own adjustment ends
            library.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        library.malloc_trim(0)


_returning = _Returning()
