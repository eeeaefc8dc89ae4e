"""The NVIDIA GPUs of this machine, as their driver describes them; no other library is needed."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

_DRIVERS = {"win32": "nvcuda.dll"}
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_MINOR = 76


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


def open_driver() -> Any:
    """The driver's library. Raises OSError: there is none."""
    return ctypes.CDLL(_DRIVERS.get(sys.platform, "libcuda.so.1"))


def find_gpu(number: int = 0, library: Any = None) -> Gpu | None:
    """The GPU of this number, from 0, or None if there is no driver or no such GPU."""
    gpus = find_gpus(library)
    return gpus[number] if number < len(gpus) else None


def find_gpus(library: Any = None) -> tuple[Gpu, ...]:
    """Every GPU that the driver shows to this process, in its order. `library` replaces the driver in tests."""
    try:
        cuda = library or open_driver()
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    release = (version.value // 1000, version.value % 1000 // 10)
    gpus = []
    for number in range(count.value):
        device = ctypes.c_int()
        memory = ctypes.c_size_t()
        major = ctypes.c_int()
        minor = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), number):
            continue
        name = ctypes.create_string_buffer(100)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        gpus.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value), memory.value, release))
    return tuple(gpus)
