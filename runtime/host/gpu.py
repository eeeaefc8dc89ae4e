"""The NVIDIA GPUs of this machine, as their driver describes them; no other library is needed."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

_DRIVERS = {"win32": "nvcuda.dll"}
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: `capability` as in (8, 9), `memory` in bytes, `cuda` the newest its driver supports, as in (13, 0)."""

    name: str
    capability: tuple[int, int]
    memory: int
    cuda: tuple[int, int]

    @property
    def sm(self) -> str:
        """Its name as a target of `vtx-build`: sm89 for compute capability 8.9."""
        return f"sm{self.capability[0]}{self.capability[1]}"


def find_gpu(library: Any = None) -> Gpu | None:
    """The first GPU, or None where there is no driver or no GPU. `library` stands in for the driver in tests."""
    return next(iter(find_gpus(library)), None)


def find_gpus(library: Any = None) -> tuple[Gpu, ...]:
    """Every GPU that the driver shows to this process, in its order."""
    try:
        cuda = library or ctypes.CDLL(_DRIVERS.get(sys.platform, "libcuda.so.1"))
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(gpu for number in range(count.value) if (gpu := _gpu(cuda, number)))


def _gpu(cuda: Any, number: int) -> Gpu | None:
    device = ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), number):
        return None
    name, memory = ctypes.create_string_buffer(100), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = (_attribute(cuda, attribute, device) for attribute in _CAPABILITY)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    release = (version.value // 1000, version.value % 1000 // 10)
    return Gpu(name.value.decode(errors="replace"), (major, minor), memory.value, release)


def _attribute(cuda: Any, number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value
