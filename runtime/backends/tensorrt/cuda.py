"""The few calls of the CUDA runtime that vtx makes: memory, copies, one stream, graphs. Errors become DeviceErrors."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vtx.runtime.errors import DeviceError
from vtx.runtime.units import size

_OUT_OF_MEMORY, _DRIVER_TOO_OLD, _NO_DEVICE = 2, 35, 100
_CURES = {
    _DRIVER_TOO_OLD: "its NVIDIA driver is missing or older than the CUDA that vtx uses; install a newer driver",
    _NO_DEVICE: "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
}


def load_cuda() -> Any:
    """The module `cuda.bindings.runtime`, or DeviceError with the command that installs it."""
    try:
        from cuda.bindings import runtime
    except ImportError as e:
        raise DeviceError('cuda-python is not installed; pip install "vtx-edge[rtx]" (or [tensorrt])') from e
    return runtime


class Buffer:
    """Device memory that is freed with this object."""

    def __init__(self, cuda: Cuda, nbytes: int, purpose: str) -> None:
        self.nbytes = nbytes
        self.address = cuda.malloc(nbytes, purpose)
        self.free = weakref.finalize(self, cuda.release, "cudaFree", self.address)


class Cuda:
    """One GPU and one stream on it, through `cuda.bindings.runtime` or a test's replacement.

    `with cuda:` makes this thread the only one that uses them, and the GPU the thread's current device until its end;
    an application or another library may use another one.
    """

    def __init__(self, runtime: Any, number: int = 0) -> None:
        self._rt, self.number = runtime, number
        self._kinds = runtime.cudaMemcpyKind
        self._lock = threading.RLock()
        self._outside: list[int] = []  # the devices that were current at each entry
        self._recording = False
        self._after: list[tuple[str, Any]] = []  # to be freed once nothing is recorded
        with self:
            self.stream = int(self.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            current = self.number if self._outside else int(self.call("cudaGetDevice"))
            if current != self.number:
                self.call("cudaSetDevice", self.number)
        except BaseException:
            self._lock.release()
            raise
        self._outside.append(current)

    def __exit__(self, *_: object) -> None:
        try:
            if (before := self._outside.pop()) != self.number:
                self.call("cudaSetDevice", before)
        finally:
            self._lock.release()

    def call(self, name: str, *args: Any) -> Any:
        """The values that a call gives after its error: none, one, or a tuple."""
        error, *values = getattr(self._rt, name)(*args)
        self._check(name, error)
        return values[0] if len(values) == 1 else tuple(values)

    def malloc(self, nbytes: int, purpose: str) -> int:
        """The address of `nbytes` bytes; a DeviceError with the number of free ones if there are not enough."""
        error, address = self._rt.cudaMalloc(nbytes)
        if int(error) == _OUT_OF_MEMORY:
            free, total = self.memory()
            raise DeviceError(
                f"{purpose} needs {size(nbytes)} of device memory, {size(free)} of {size(total)} is free; "
                "end other programs on the GPU, export with a smaller --precision or --max-context, or use --device cpu"
            )
        self._check("cudaMalloc", error)
        return int(address)

    def release(self, call: str, handle: Any) -> None:
        """Free memory or a graph by that call; while work is recorded, which that would spoil, right after it."""
        if self._recording:
            self._after.append((call, handle))
        else:
            self.call(call, handle)

    def memory(self) -> tuple[int, int]:
        free, total = self.call("cudaMemGetInfo")
        return int(free), int(total)

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A zeroed host array that the device reads and writes by itself."""
        like = np.zeros(shape, dtype)
        address = int(self.call("cudaHostAlloc", max(like.nbytes, 1), self._rt.cudaHostAllocDefault))
        memory = (ctypes.c_byte * like.nbytes).from_address(address)
        array: NDArray[Any] = np.frombuffer(memoryview(memory), like.dtype).reshape(shape)
        array[...] = 0
        weakref.finalize(memory, self.release, "cudaFreeHost", address)
        return array

    def zero(self, buffer: Buffer) -> None:
        self.call("cudaMemsetAsync", buffer.address, 0, buffer.nbytes, self.stream)

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        self._copy(address, array.ctypes.data, array.nbytes, self._kinds.cudaMemcpyHostToDevice)

    def copy_out(self, array: NDArray[Any], address: int) -> None:
        self._copy(array.ctypes.data, address, array.nbytes, self._kinds.cudaMemcpyDeviceToHost)

    def copy_rows(self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int) -> None:
        """Queue a copy of `height` rows of `width` bytes on the device, `pitch` bytes apart."""
        kind = self._kinds.cudaMemcpyDeviceToDevice
        self.call("cudaMemcpy2DAsync", to, to_pitch, source, pitch, width, height, kind, self.stream)

    def wait(self) -> None:
        self.call("cudaStreamSynchronize", self.stream)

    def record(self, work: Callable[[], None]) -> Graph | None:
        """The work that `work` queues, as a graph and not run; None if the driver or TensorRT cannot record it."""
        self._recording = True
        mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        try:
            self.call("cudaStreamBeginCapture", self.stream, mode)
            try:
                work()
            finally:
                recorded = self.call("cudaStreamEndCapture", self.stream)
            return Graph(self, recorded)
        except DeviceError:
            self._rt.cudaGetLastError()  # or the next call would report it
            return None
        finally:
            self._recording = False
            while self._after:
                self.call(*self._after.pop())

    def _copy(self, to: int, source: int, nbytes: int, kind: Any) -> None:
        self.call("cudaMemcpyAsync", to, source, nbytes, kind, self.stream)

    def _check(self, name: str, error: Any) -> None:
        if int(error):
            cure = _CURES.get(int(error), "run it again; run vtx-doctor if it fails again")
            raise DeviceError(f"the GPU fails at {name} ({getattr(error, 'name', error)}): {cure}")


class Graph:
    """Recorded work, launched as a whole."""

    def __init__(self, cuda: Cuda, recorded: Any) -> None:
        self._cuda = cuda
        try:
            self._run = cuda.call("cudaGraphInstantiate", recorded, 0)
        finally:
            cuda.call("cudaGraphDestroy", recorded)
        weakref.finalize(self, cuda.release, "cudaGraphExecDestroy", self._run)

    def launch(self) -> None:
        self._cuda.call("cudaGraphLaunch", self._run, self._cuda.stream)
