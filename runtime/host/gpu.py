"""The NVIDIA GPU of this machine, asked of its driver without any other library."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

_DRIVERS = {"win32": "nvcuda.dll"}
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: `capability` as in (8, 9), `memory` in bytes, `cuda` the newest that its driver runs, as in (13, 0)."""

    name: str
    capability: tuple[int, int]
    memory: int
    cuda: tuple[int, int]

    @property
    def sm(self) -> str:
        return f"sm{self.capability[0]}{self.capability[1]}"


def find_gpu(library: Any = None) -> Gpu | None:
    """The first GPU, or None where there is no driver or no GPU. `library` stands in for the driver in tests."""
    try:
        cuda = library or ctypes.CDLL(_DRIVERS.get(sys.platform, "libcuda.so.1"))
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name, memory = ctypes.create_string_buffer(100), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = (_attribute(cuda, number, device) for number in _CAPABILITY)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    release = (version.value // 1000, version.value % 1000 // 10)
    return Gpu(name.value.decode(errors="replace"), (major, minor), memory.value, release)


def _attribute(cuda: Any, number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value
