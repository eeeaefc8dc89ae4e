"""One GPU through its driver: memory, copies, one stream, graphs. Errors become DeviceErrors.

And pools of memory that go from one conversation to the next.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vtx.runtime.backends.driver import PitchedRows
from vtx.runtime.errors import DeviceError
from vtx.runtime.host.machine import available_memory
from vtx.runtime.units import size
from vtx.runtime.vision.tokens import Ids

ALIGNMENT = 256  # bytes, of every address bound to TensorRT (NvInferRuntime.h, setTensorAddress)
_OUT_OF_MEMORY = 2
_NO_DEVICE = 100
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
# Errors after which every further call in the process fails: the device is gone, or its context is.
_GONE = {214, 219, 700, 709, 710, 715, 716, 717, 718, 719, 999}
_CURES = {_NO_DEVICE: "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES"}


def aligned(nbytes: int) -> int:
    """Bytes from one address that TensorRT takes to the next one behind `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Buffer:
    """Device memory that is freed with this object, or after the work that was queued before, which may use it."""

    def __init__(self, cuda: Cuda, nbytes: int, purpose: str) -> None:
        self.nbytes = nbytes
        self.address = cuda.malloc(nbytes, purpose)
        self.free = weakref.finalize(self, cuda.release, "cuMemFree_v2", self.address)


class Cuda:
    """One GPU and one stream on it, through its driver or a test's replacement.

    `with cuda:` makes this thread the only one that uses them, and the GPU's primary context, which is that of CUDA's
    runtime in TensorRT and onnxruntime, the thread's current one until its end; an application may use another one.
    """

    def __init__(self, driver: Any, number: int = 0) -> None:
        self._driver = driver
        self.number = number
        self._lock = threading.RLock()
        self._outside: list[int] = []  # the contexts that were current at each entry
        self._queued = False  # work that nothing has waited for, or that is being recorded
        self._after: list[tuple[str, Any]] = []  # to be freed once there is none
        self._sources: list[Any] = []  # arrays that queued copies may not have read yet
        self._context = int(self.call("cuDevicePrimaryCtxRetain", number))  # until the process ends, as the runtime
        with self:
            self._stream = int(self.call("cuStreamCreate", _NON_BLOCKING))
        weakref.finalize(self, _free_last, driver, self._context, self._stream, self._after)

    @property
    def stream(self) -> int:
        """The stream, for a call that queues work on it."""
        self._queued = True
        return self._stream

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            current = self._context if self._outside else int(self.call("cuCtxGetCurrent"))
            if current != self._context:
                self.call("cuCtxSetCurrent", self._context)
        except BaseException:
            self._lock.release()
            raise
        self._outside.append(current)

    def __exit__(self, *_: object) -> None:
        try:
            if (before := self._outside.pop()) != self._context:
                self.call("cuCtxSetCurrent", before)
        finally:
            self._lock.release()

    def call(self, name: str, *args: Any) -> Any:
        """The values that a call gives after its error: none, one, or a tuple."""
        error, *values = getattr(self._driver, name)(*args)
        self._check(name, error)
        return values[0] if len(values) == 1 else tuple(values)

    def malloc(self, nbytes: int, purpose: str) -> int:
        """The address of `nbytes` bytes; a DeviceError with the number of free ones if there are not enough."""
        error, address = self._driver.cuMemAlloc_v2(nbytes)
        if int(error) == _OUT_OF_MEMORY and self._after:
            self.wait()
            error, address = self._driver.cuMemAlloc_v2(nbytes)
        if int(error) == _OUT_OF_MEMORY:
            free, total = self.memory()
            raise DeviceError(
                f"{purpose} needs {size(nbytes)} of device memory, {size(free)} of {size(total)} is free; "
                "end other programs on the GPU, export with a smaller --precision or --max-context, or use --device cpu"
            )
        self._check("cuMemAlloc_v2", error)
        return int(address)

    def release(self, call: str, handle: Any) -> None:
        """Free memory or a graph by that call; if work is queued, which may use it, once something has waited for it.

        The garbage collector calls this too, at any time and in any thread, so it waits for nothing itself: not for
        the GPU, and not for the thread that uses it.
        """
        if self._queued:
            self._after.append((call, handle))
        else:
            _free(self._driver, self._context, [(call, handle)])

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory.

        A GPU that shares the host's memory (Jetson, DGX Spark) reports the page cache as used; the system gives it back
        to a program that needs it.
        """
        free, total = map(int, self.call("cuMemGetInfo_v2"))
        shared = int(self.call("cuDeviceGetAttribute", _INTEGRATED, self.number))
        available = available_memory() if shared else None
        if available is not None:
            free = min(total, max(free, available))
        return free, total

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A zeroed host array that the device reads and writes by itself."""
        like = np.zeros(shape, dtype)
        address = int(self.call("cuMemHostAlloc", max(like.nbytes, 1), 0))
        memory = (ctypes.c_byte * like.nbytes).from_address(address)
        array: NDArray[Any] = np.frombuffer(memoryview(memory), like.dtype).reshape(shape)
        array[...] = 0
        weakref.finalize(memory, self.release, "cuMemFreeHost", address)
        return array

    def zero(self, buffer: Buffer) -> None:
        self.call("cuMemsetD8Async", buffer.address, 0, buffer.nbytes, self.stream)

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        """Queue a copy from the host.

        A GPU that reads the host's pages itself (Thor, DGX Spark) does so when the work runs, so the array stays until
        something has waited for that.
        """
        self._sources.append(array)
        self.call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, self.stream)

    def copy_out(self, array: NDArray[Any], address: int) -> None:
        self.call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, self.stream)

    def copy_rows(self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int) -> None:
        """Queue a copy of `height` rows of `width` bytes on the device, `pitch` bytes apart."""
        if not height:  # of a stage without K and V
            return
        self.call("copy_rows", PitchedRows(to, to_pitch), PitchedRows(source, pitch), (width, height), self.stream)

    def wait(self) -> None:
        """Wait for all work that is queued, and free what was released meanwhile."""
        self.call("cuStreamSynchronize", self._stream)
        self._free_released()

    def _free_released(self) -> None:
        self._queued = False
        self._sources.clear()
        while self._after:
            self.release(*self._after.pop())

    def record(self, work: Callable[[], None]) -> Graph | None:
        """The work that `work` queues, as a graph and not run; None if the driver or TensorRT cannot record it."""
        queued = self._queued
        collects = gc.isenabled()
        gc.disable()  # TensorRT's contexts free memory as they go, which voids a recording
        try:
            self.call("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
            try:
                work()
            finally:
                recorded = self.call("cuStreamEndCapture", self._stream)
            return Graph(self, recorded)
        except DeviceError:
            return None
        finally:
            if collects:
                gc.enable()
            if not queued:  # what is recorded is not
                self._free_released()

    def _check(self, name: str, error: Any) -> None:
        if int(error):
            cure = _CURES.get(int(error), "run it again; run vtx-doctor if it fails again")
            if int(error) in _GONE:
                cure = "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg"
            _, title = self._driver.cuGetErrorName(error)
            reason = title.decode() if title else error
            raise DeviceError(f"the GPU fails at {name} ({reason}): {cure}")


def _free(driver: Any, context: int, handles: list[tuple[str, Any]]) -> None:
    """Free handles by their calls in the context that they are of, whichever the thread has.

    An error is that of an earlier call, or of a device that is gone.
    """
    _, current = driver.cuCtxGetCurrent()
    driver.cuCtxSetCurrent(context)
    for call, handle in handles:
        getattr(driver, call)(handle)
    driver.cuCtxSetCurrent(current)


def _free_last(driver: Any, context: int, stream: int, after: list[tuple[str, Any]]) -> None:
    """Free what was released while work was queued, if nothing has waited for that and nothing is left that could."""
    if after:
        _free(driver, context, [("cuStreamSynchronize", stream), *after])


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
        """Memory of `capacity` slots, or up to twice as many, for a stage's cache: of a cache that is gone, else new.

        A token reads all slots, so a short conversation does not get the memory of a long one. All unused memory is
        freed if the device has too little for new one.
        """
        unused = self.unused.setdefault(stage, [])
        fitting = [memory for memory in unused if capacity <= memory.capacity <= 2 * capacity]
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
                for buffers in self.unused.values():
                    buffers.clear()
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
            self._run = cuda.call("cuGraphInstantiateWithFlags", recorded, 0)
        finally:
            cuda.call("cuGraphDestroy", recorded)
        weakref.finalize(self, cuda.release, "cuGraphExecDestroy", self._run)

    def launch(self) -> None:
        self._cuda.call("cuGraphLaunch", self._run, self._cuda.stream)
