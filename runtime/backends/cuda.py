"""The few calls of the CUDA runtime that vtx makes: memory, copies, one stream, graphs. Errors become DeviceErrors.

And pools of memory that go from one conversation to the next.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.installing import install
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import Ids

ALIGNMENT = 256  # bytes, of every address bound to TensorRT (NvInferRuntime.h, setTensorAddress)
_OUT_OF_MEMORY, _DRIVER_TOO_OLD, _NO_DEVICE = 2, 35, 100
# Errors after which every further call in the process fails: the device is gone, or its context is.
_GONE = {214, 219, 700, 709, 710, 715, 716, 717, 718, 719, 999}
_CURES = {
    _DRIVER_TOO_OLD: "its NVIDIA driver is missing or older than the CUDA that vtx uses; install a newer driver, or an "
    'older release: pip install "cuda-python<13", on JetPack 6 "cuda-python<12.7"',
    _NO_DEVICE: "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
}


def aligned(nbytes: int) -> int:
    """Bytes from one address that TensorRT takes to the next one behind `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def load_cuda() -> Any:
    """The module `cuda.bindings.runtime`, or DeviceError with the command that installs it."""
    try:
        from cuda.bindings import runtime
    except ImportError as e:
        raise DeviceError(f"cuda-python is not installed; {install('rtx')} (or [tensorrt], [gpu])") from e
    return runtime


class Buffer:
    """Device memory that is freed with this object, or after the work that was queued before, which may use it."""

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
        self._queued = False  # work that nothing has waited for, or that is being recorded
        self._after: list[tuple[str, Any]] = []  # to be freed once there is none
        with self:
            self._stream = int(self.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))
        weakref.finalize(self, _free_last, runtime, number, self._stream, self._after)

    @property
    def stream(self) -> int:
        """The stream, for a call that queues work on it."""
        self._queued = True
        return self._stream

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
        if int(error) == _OUT_OF_MEMORY and self._after:
            self.wait()
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
        """Free memory or a graph by that call; if work is queued, which may use it, once something has waited for it.

        The garbage collector calls this too, at any time and in any thread, so it waits for nothing itself: not for
        the GPU, and not for the thread that uses it.
        """
        if self._queued:
            self._after.append((call, handle))
        else:
            getattr(self._rt, call)(handle)  # an error here is that of an earlier call, or of a device that is gone

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory.

        A GPU that shares the host's memory (Jetson, DGX Spark) reports the page cache as used; the system gives it back
        to a program that needs it.
        """
        free, total = map(int, self.call("cudaMemGetInfo"))
        shared = int(self.call("cudaDeviceGetAttribute", self._rt.cudaDeviceAttr.cudaDevAttrIntegrated, self.number))
        available = available_memory() if shared else None
        if available is not None:
            free = min(total, max(free, available))
        return free, total

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
        if not height:  # of a stage without K and V
            return
        kind = self._kinds.cudaMemcpyDeviceToDevice
        self.call("cudaMemcpy2DAsync", to, to_pitch, source, pitch, width, height, kind, self.stream)

    def wait(self) -> None:
        """Wait for all work that is queued, and free what was released meanwhile."""
        self.call("cudaStreamSynchronize", self._stream)
        self._free_released()

    def _free_released(self) -> None:
        self._queued = False
        while self._after:
            self.release(*self._after.pop())

    def record(self, work: Callable[[], None]) -> Graph | None:
        """The work that `work` queues, as a graph and not run; None if the driver or TensorRT cannot record it."""
        mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        queued = self._queued
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
            if not queued:  # what is recorded is not
                self._free_released()

    def _copy(self, to: int, source: int, nbytes: int, kind: Any) -> None:
        self.call("cudaMemcpyAsync", to, source, nbytes, kind, self.stream)

    def _check(self, name: str, error: Any) -> None:
        if int(error):
            cure = _CURES.get(int(error), "run it again; run vtx-doctor if it fails again")
            if int(error) in _GONE:
                cure = "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg"
            raise DeviceError(f"the GPU fails at {name} ({getattr(error, 'name', error)}): {cure}")


def _free_last(runtime: Any, number: int, stream: int, after: list[tuple[str, Any]]) -> None:
    """Free what was released while work was queued, if nothing has waited for that and nothing is left that could."""
    if not after:
        return
    _, current = runtime.cudaGetDevice()
    runtime.cudaSetDevice(number)
    runtime.cudaStreamSynchronize(stream)
    for call, handle in after:
        getattr(runtime, call)(handle)
    runtime.cudaSetDevice(current)


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """K/V of some slots, packed as in their cache, on the device."""

    buffer: Buffer
    count: int


def runs(slots: Ids) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots: (index among `slots`, first slot, number of slots)."""
    if not len(slots):
        return []
    starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, int(slots[a]), b - a) for a, b in pairwise(starts)]


class StageMemory(Protocol):
    """A stage's device memory of one conversation: K and V for `capacity` slots, and what is bound to them."""

    capacity: int

    def clear(self) -> None:
        """Make it as good as new."""


Memory = TypeVar("Memory", bound=StageMemory)


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory of each stage, by its first layer, that no cache has now. The next conversation's caches take it.

    Other memory that goes from one to the next has keys of its own.
    """

    cuda: Cuda
    unused: dict[Hashable, list[Any]] = field(default_factory=dict)

    def borrow(self, stage: Hashable, capacity: int, make: Callable[[int], Memory]) -> Memory:
        """Memory of at least `capacity` slots for a stage's cache: of a cache that is gone, else new.

        All unused memory is freed if the device has too little for new one.
        """
        unused = self.unused.setdefault(stage, [])
        fitting = [memory for memory in unused if memory.capacity >= capacity]
        if fitting:
            memory: Memory = min(fitting, key=lambda memory: memory.capacity)
            unused.remove(memory)
            memory.clear()
        else:
            try:
                memory = make(capacity)
            except DeviceError:
                if not any(self.unused.values()):
                    raise
                self.cuda.wait()  # queued work may still read it
                for kept in self.unused.values():
                    kept.clear()
                memory = make(capacity)
        return memory

    def give_back(self, stage: Hashable, memory: StageMemory) -> None:
        """Have the next cache take it; work that is queued may still use it, as later work is queued behind it."""
        self.unused.setdefault(stage, []).append(memory)

    def give_back_with(self, cache: object, stage: Hashable, held: list[Any]) -> None:
        """Have the memory in `held` come back when the cache is gone.

        So the next image allocates nothing, and finds its CUDA graph recorded.
        """
        weakref.finalize(cache, self.unused.setdefault(stage, []).extend, held).atexit = False


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
