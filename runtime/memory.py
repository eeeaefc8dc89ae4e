"""What weights take in memory once onnxruntime's CPU provider has loaded them, which is not what they take on disk."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vtx.runtime.bundle import Bundle
from vtx.runtime.errors import BundleError
from vtx.runtime.safetensors import TensorInfo, read_header

# A scale is kept in float32 twice, beside and inside of the packed matrix, and with it the sum of its block.
SCALE_BYTES = 12
KERNEL_BLOCK = 64  # int8 matrices, with a scale a row, are computed in blocks of this size at most
SCALES = ".scales"
TABLE = "embed_tokens.weight"
HEAD = "head.weight"
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def resident_bytes(dtype: str, shape: tuple[int, ...], scales: int = 0) -> int:
    """Bytes of a weight in memory: `dtype` is safetensors' word or I4; `scales` of a quantised one are counted.

    The provider computes in float32 and expands narrower floats to it; quantised matrices stay as they are.
    """
    count = math.prod(shape)
    if not scales:
        return 4 * count
    blocks = max(scales, -(-count // KERNEL_BLOCK)) if dtype == "I8" else scales
    return (count if dtype == "I8" else count // 2) + SCALE_BYTES * blocks


def weights_in_memory(bundle: Bundle) -> int:
    """Bytes that all graphs of a bundle keep resident. The embedding table stays in its file unless it is the head."""
    tensors: dict[str, TensorInfo] = {}
    for name in bundle.manifest.files:
        if name.startswith("weights/"):
            tensors |= read_header(bundle.path(name), error=BundleError).tensors
    tied = not any(name.endswith(HEAD) for name in tensors)
    return sum(_resident(info, tensors) for name, info in tensors.items() if tied or not name.endswith(TABLE))


def _resident(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> int:
    if info.name.endswith(SCALES):
        return 0  # counted with its matrix
    scales = tensors.get(info.name + SCALES)
    if scales is None:
        return resident_bytes(info.dtype, info.shape)
    octets = math.prod(info.shape)
    count, dtype = (octets, "I8") if info.dtype == "I8" else (2 * octets, "I4")
    return resident_bytes(dtype, (count,), math.prod(scales.shape))


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
