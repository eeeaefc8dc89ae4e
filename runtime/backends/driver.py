"""NVIDIA's driver by ctypes: the calls that vtx makes of it. No release of CUDA is needed beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from functools import partial
from typing import Any, NamedTuple

from vtx.runtime.errors import DeviceError
from vtx.runtime.host.gpu import open_driver

_RESULTS = {POINTER(kind): kind for kind in (c_void_p, c_int, c_size_t, c_char_p)}  # by the type of the parameter
_OUT = POINTER(c_void_p)
# The parameters of each call (cuda.h of CUDA 11.4 or later); those that are pointers to a type are results.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (c_void_p,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD8Async": (c_void_p, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _OUT),
    "cuGraphInstantiateWithFlags": (_OUT, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _CopySide(ctypes.Structure):
    """One side of a copy of rows: half of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_void_p),
        ("array", c_void_p),
        ("pitch", c_size_t),
    )


class _RowCopy(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (("source", _CopySide), ("to", _CopySide), ("width", c_size_t), ("height", c_size_t))


class PitchedRows(NamedTuple):
    """Rows on the device, `pitch` bytes apart."""

    address: int
    pitch: int


class Driver:
    """The driver's calls as methods of their names: they take numbers, and return the error and the results."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, parameters in _CALLS.items():
            getattr(library, name).argtypes = parameters

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        values = iter(args)
        results = list[Any]()
        arguments = list[Any]()
        for kind in _CALLS[name]:
            if kind in _RESULTS:
                results.append(_RESULTS[kind]())
                arguments.append(ctypes.byref(results[-1]))
            else:
                arguments.append(next(values))
        error = int(getattr(self._library, name)(*arguments))
        return error, *(result.value or 0 for result in results)

    def copy_rows(self, to: PitchedRows, source: PitchedRows, size: tuple[int, int], stream: int) -> tuple[Any, ...]:
        """Queue a copy of rows on the device; `size`: their bytes, and their number."""
        first = _CopySide(type=_ON_DEVICE, device=source.address, pitch=source.pitch)
        second = _CopySide(type=_ON_DEVICE, device=to.address, pitch=to.pitch)
        rows = _RowCopy(first, second, *size)  # which the driver reads before it returns
        return self._call("cuMemcpy2DAsync_v2", ctypes.addressof(rows), stream)


def load_driver() -> Driver:
    """The driver of this machine, ready for calls, or DeviceError with the reason and the fix."""
    try:
        driver = Driver(open_driver())
    except OSError as e:
        raise DeviceError(
            "NVIDIA's driver is not installed, or a container does not pass it through (docker run --gpus all)"
        ) from e
    except AttributeError as e:
        raise DeviceError(f"NVIDIA's driver is too old ({e}); install release 535 or newer") from e
    driver.cuInit(0)  # its error is that of the first call, too
    return driver
