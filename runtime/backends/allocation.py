"""How memory is taken and given back, so that no more of it is resident than what is used."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def zeros_in_small_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that take memory where they are written, page by page of the smallest size.

    A cache [..., heads, capacity, head_dim] that is filled in part has its rows in as many places as it has heads.
    In pages of 2 MiB, which numpy asks Linux for, all of it would become resident.

    Raises:
        MemoryError: the address space or the system's limit is exhausted.

    """
    if sys.platform != "linux":
        return np.zeros(shape, dtype)
    count = math.prod(shape)
    try:
        memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"no memory for an array of {shape}") from e
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


@contextmanager
def returning_memory() -> Iterator[None]:
    """What is freed meanwhile goes back to the system at once, where the C library is glibc.

    Loading frees each weight after it is packed. The allocator would keep most of that, and the process would be
    twice as large as what it holds.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallopt"):
        yield
        return
    assert library is not None
    library.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own adjustment ends
        library.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        library.malloc_trim(0)
