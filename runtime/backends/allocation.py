"""Memory that is resident only as far as it is used, and returned to the system when it is freed."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_M_TRIM_THRESHOLD = -1
_MAP_NORESERVE = 0x4000  # Python names it from 3.11 on
_MADV_DONTNEED = 4


def zeros_in_small_pages(shape: tuple[int, ...], dtype: np.dtype[Any], *, reserved: bool = True) -> NDArray[Any]:
    """Zeros that become resident when they are written, in pages of the smallest size.

    A cache [..., heads, capacity, head_dim] that is filled in part is written in one place for each head. In pages of 2
    MiB, which numpy asks Linux for, all of it would become resident. Unless `reserved`, it may be larger than the
    memory of the machine. Raises MemoryError: the address space or the system's limit is exhausted.
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
    """Return the memory of a contiguous part of such zeros, but for pages that it shares with its neighbours.

    Afterwards the part holds zeros, or what it held before.
    """
    if sys.platform == "linux":
        first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            drop_pages(first, size)


def drop_pages(address: int, size: int) -> None:
    """Let Linux take back the pages at an address; if it refuses, nothing but memory is lost."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    advise(address, size, _MADV_DONTNEED)


_users = 0  # of `returning_memory`, whose settings are the process's
_lock = threading.Lock()


@contextmanager
def returning_memory(*, at_once: bool = True) -> Iterator[None]:
    """Return memory that is freed within, on any thread, to the system, if the C library is glibc.

    If several use it, it lasts until the last of them is done. Loading frees each weight after it is packed. The
    allocator would keep most of that, and the process would be twice as large as what it holds. Unless `at_once`,
    memory is returned at the end: the system then has to find and clear fewer pages.
    """
    global _users
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt"):
        yield
        return
    with _lock:
        _users += 1
        if at_once:
            library.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            last = not _users
            if last:
                library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own adjustment ends
                library.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        if last:
            library.malloc_trim(0)


def return_freed_memory() -> None:
    """Return what was freed to the system, if the C library is glibc, whose allocator keeps much of it."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
