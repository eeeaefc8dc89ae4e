"""Stand-ins for TensorRT and CUDA's driver, for machines without a GPU: they watch every call, and compute.

The device's memory is this process's, by real addresses. A stream is a queue: nothing runs before something waits for
it. An engine's file names the ONNX graph it was built from, which onnxruntime runs on the CPU. What would be undefined
on a GPU is an assertion here: memory that is not there any more, sizes outside the profile, tensors without an address,
new slots within those that are read, a value set twice.
"""

from __future__ import annotations

import ctypes
import json
import os
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from tests.support.bundles import IGNORE
from tests.support.exported import THREADS
from tests.support.json_files import write_json
from vtx.runtime.backends.driver import PitchedRows
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.bundle import Bundle, sha256
from vtx.tools.tensorrt import build as engines
from vtx.tools.tensorrt.build import build_engines, plan_engines
from vtx.tools.tensorrt.child import BuildRequest, BuiltEngine
from vtx.tools.tensorrt.graph import load_graph
from vtx.tools.tensorrt.releases import RTX, Release
from vtx.tools.tensorrt.targets import TARGETS

Work = Callable[[], None]
ALIGNMENT = 256
ANY_DEVICE = ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain")
TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
UNREAD = ("total_slots", "position_ids", "cos", "sin")  # inputs of a stage without attention
SCRATCH = 4096
CONTEXT = 512  # bytes that an execution context holds beside its working memory
VERSION = "1.7.1"
RTX_17 = Release(RTX, (1, 7))


class Error(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


class Memory(dict[int, Any]):
    """Allocations by their addresses; a question to a model asks thousands of times in which one bytes lie."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: list[int] = []  # sorted
        self.nbytes = 0

    def __setitem__(self, address: int, allocation: Any) -> None:
        super().__setitem__(address, allocation)
        insort(self._addresses, address)
        self.nbytes += len(allocation)

    def __delitem__(self, address: int) -> None:
        self.nbytes -= len(self[address])
        super().__delitem__(address)
        self._addresses.remove(address)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in one allocation."""
        number = bisect_right(self._addresses, address)
        if not number:
            return False
        start = self._addresses[number - 1]
        return address + nbytes <= start + len(self[start])


class Gpu:
    """`Driver` as vtx uses it. `total` bytes of device memory; `calls` counts what was called."""

    def __init__(self, total: int = 1 << 32, number: int = 0) -> None:
        self.total, self.number = total, number
        self.driver = 580
        self.page_cache = 0  # bytes of it in the memory that an integrated GPU shares with the host
        self.current = number  # the device that the next call is for, -1: none
        self.refused: str | None = None  # a call that fails while work is recorded
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, int] = {}  # that calls give
        self.lost = 0  # the error of every call, once the device has fallen away
        self.device = Memory()
        self.host = Memory()
        self.contexts = WeakSet[Context]()  # each holds memory of TensorRT's own
        self.graphs: dict[int, list[Work]] = {}
        self.copies: list[tuple[str, int]] = []  # "in" or "out", and the bytes, of each copy between host and device
        self.moved: list[tuple[str, int]] = []  # the same as work runs, recorded or not, "within" the device, "weights"
        self._queue: list[Work] = []
        self._recording: list[Work] | None = None

    def __getattribute__(self, name: str) -> Any:
        if name != "cuGetErrorName" and ((name.startswith("cu") and name[2].isupper()) or name == "copy_rows"):
            object.__getattribute__(self, "calls")[name] += 1
            if name not in ANY_DEVICE:
                assert self.current == self.number, f"{name} for device {self.current}"
            given = object.__getattribute__(self, "lost") or object.__getattribute__(self, "errors").get(name)
            if given:
                return lambda *_: (Error(given), 0)
        return object.__getattribute__(self, name)

    @property
    def used(self) -> int:
        return self.device.nbytes + CONTEXT * len(self.contexts)

    def holds(self, address: int, nbytes: int) -> None:
        """Fail unless these bytes lie in one living allocation of the device."""
        assert self.device.holds(address, nbytes), f"{nbytes} bytes at {address} are not device memory"

    @property
    def recording(self) -> bool:
        return self._recording is not None

    @property
    def busy(self) -> bool:
        """True if work is queued that nothing has waited for."""
        return bool(self._queue)

    def queue(self, work: Work) -> None:
        (self._queue if self._recording is None else self._recording).append(work)

    # --- the device ---

    def cuGetErrorName(self, error: int) -> tuple[Error, bytes]:
        return Error.CUDA_SUCCESS, Error(error).name.encode()

    def cuDevicePrimaryCtxRetain(self, number: int) -> tuple[Error, int]:
        return Error.CUDA_SUCCESS, number + 1

    def cuCtxGetCurrent(self) -> tuple[Error, int]:
        return Error.CUDA_SUCCESS, self.current + 1

    def cuCtxSetCurrent(self, context: int) -> tuple[Error]:
        self.current = context - 1
        return (Error.CUDA_SUCCESS,)

    # --- memory ---

    def cuMemAlloc_v2(self, nbytes: int) -> tuple[Error, int]:
        assert self._recording is None, "an allocation spoils a recording"
        if self.used + nbytes > self.total:
            return Error.CUDA_ERROR_OUT_OF_MEMORY, 0
        room = bytearray(b"\xff" * (nbytes + ALIGNMENT))  # NaN, in both float types
        whole = ctypes.c_char.from_buffer(room)
        skipped = -ctypes.addressof(whole) % ALIGNMENT
        memory = (ctypes.c_char * nbytes).from_buffer(room, skipped)
        self.device[ctypes.addressof(memory)] = memory
        return Error.CUDA_SUCCESS, ctypes.addressof(memory)

    def cuMemFree_v2(self, address: int) -> tuple[Error]:
        assert not self._queue, "memory is freed while work is queued"
        assert self._recording is None, "freeing memory spoils a recording"
        del self.device[address]
        return (Error.CUDA_SUCCESS,)

    def cuMemGetInfo_v2(self) -> tuple[Error, int, int]:
        return Error.CUDA_SUCCESS, self.total - self.used - self.page_cache, self.total

    def cuDeviceGetAttribute(self, attribute: int, number: int) -> tuple[Error, int]:
        assert (attribute, number) == (18, self.number)  # CU_DEVICE_ATTRIBUTE_INTEGRATED
        return Error.CUDA_SUCCESS, int(self.page_cache > 0)

    def cuMemHostAlloc(self, nbytes: int, _: int) -> tuple[Error, int]:
        memory = ctypes.create_string_buffer(nbytes)
        self.host[ctypes.addressof(memory)] = memory
        return Error.CUDA_SUCCESS, ctypes.addressof(memory)

    def cuMemFreeHost(self, address: int) -> tuple[Error]:
        assert not self._queue
        del self.host[address]
        return (Error.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> tuple[Error]:
        self.holds(address, nbytes)
        self.queue(lambda: void(ctypes.memset(address, value, nbytes)))
        return (Error.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync_v2(self, to: int, source: int, nbytes: int, stream: int) -> tuple[Error]:
        """Pageable memory is read when the work runs, as by a GPU that reads the host's pages itself."""
        self.holds(to, nbytes)
        assert not self.recording or self.host.holds(source, 1), "pageable memory in a graph: it will be gone"
        return self._copy("in", to, source, nbytes)

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, nbytes: int, stream: int) -> tuple[Error]:
        self.holds(source, nbytes)
        return self._copy("out", to, source, nbytes)

    def _copy(self, side: str, to: int, source: int, nbytes: int) -> tuple[Error]:
        self.calls["copies"] += 1
        self.copies.append((side, nbytes))

        def copy() -> None:
            ctypes.memmove(to, source, nbytes)
            self.moved.append((side, nbytes))

        self.queue(copy)
        return (Error.CUDA_SUCCESS,)

    def copy_rows(self, to: PitchedRows, source: PitchedRows, size: tuple[int, int], stream: int) -> tuple[Error]:
        width, height = size
        assert width <= min(to.pitch, source.pitch)
        for rows in (to, source):
            self.holds(rows.address, (height - 1) * rows.pitch + width)

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(to.address + row * to.pitch, source.address + row * source.pitch, width)
            self.moved.append(("within", height * width))

        self.queue(copy)
        return (Error.CUDA_SUCCESS,)

    # --- the stream, and graphs of recorded work ---

    def cuStreamCreate(self, flags: int) -> tuple[Error, int]:
        return Error.CUDA_SUCCESS, 7

    def cuStreamSynchronize(self, stream: int) -> tuple[Error]:
        assert stream == 7
        assert self._recording is None, "a wait inside a recording"
        while self._queue:
            self._queue.pop(0)()
        return (Error.CUDA_SUCCESS,)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> tuple[Error]:
        assert self._recording is None
        if self.refused == "cuStreamBeginCapture_v2":
            return (Error.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,)
        self._recording = []
        return (Error.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Error, Any]:
        recorded, self._recording = self._recording, None
        if self.refused in ("execute", "cuStreamEndCapture"):
            return Error.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 0
        return Error.CUDA_SUCCESS, recorded

    def cuGraphInstantiateWithFlags(self, recorded: list[Work], flags: int) -> tuple[Error, int]:
        assert recorded, "an empty graph"
        if self.refused == "cuGraphInstantiateWithFlags":
            return Error.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 0
        number = len(self.graphs) + 1
        self.graphs[number] = list(recorded)
        return Error.CUDA_SUCCESS, number

    def cuGraphDestroy(self, recorded: Any) -> tuple[Error]:
        return (Error.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, number: int) -> tuple[Error]:
        self.graphs[number] = []
        return (Error.CUDA_SUCCESS,)

    def cuGraphLaunch(self, number: int, stream: int) -> tuple[Error]:
        assert self.graphs[number], "a graph that is gone"
        for work in self.graphs[number]:
            self.queue(work)
        return (Error.CUDA_SUCCESS,)


def void(_: Any) -> None: ...


def write_engine(request: BuildRequest, watch: Any) -> BuiltEngine:
    """In place of the builder: an engine that names its graph and its profiles."""
    content = {"graph": os.fspath(request.graph.resolve()), "profiles": request.profiles}
    write_json(request.engine, content)
    return BuiltEngine(request.engine.stat().st_size, sha256(request.engine), 0.0, 0)


def build_all(
    folder: Path, target: str = "sm89", release: Release = RTX_17, dialect: str = "trt", version: str = VERSION
) -> None:
    """Engines that name their graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "build", write_engine)
        plan = plan_engines(Bundle.open(folder), TARGETS[target], release, version, dialect)
        list(build_engines(plan, IGNORE))


class Mode(IntEnum):
    INPUT = 0
    OUTPUT = 1


class Logger:
    ERROR = 1

    def __init__(self) -> None: ...


def module(gpu: Gpu, version: str = "1.7.1", flavour: str = RTX) -> Any:
    """The stand-in for the module tensorrt_rtx, or tensorrt, on a stand-in GPU."""

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, content: Any) -> Engine | None:
            try:
                told = json.loads(bytes(content))
            except ValueError:
                self.logger.log(1, "Serialization assertion\nstdArchiveReader failed")
                return None
            return (Engine if flavour == RTX else PlainEngine)(gpu, told, self.logger)

    return SimpleNamespace(
        __version__=version,
        ILogger=Logger,
        Runtime=Runtime,
        TensorIOMode=Mode,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
        CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager", NONE="none"),
    )


class Kernels:
    """TensorRT-RTX's cache of compiled kernels: names of graphs."""

    def __init__(self, gpu: Gpu) -> None:
        self._machine, self.compiled = [gpu.number, gpu.driver], set[str]()

    def deserialize(self, content: bytes) -> bool:
        try:
            found = json.loads(content)
        except ValueError:
            return False
        same = found["machine"] == self._machine
        self.compiled |= set(found["compiled"]) if same else set()
        return bool(same)

    def serialize(self) -> bytes:
        return json.dumps({"machine": self._machine, "compiled": sorted(self.compiled)}).encode()


class RuntimeConfig:
    """TensorRT-RTX's configuration of contexts."""

    strategy = ""
    cuda_graph_strategy = "disabled"
    dynamic_shapes_kernel_specialization_strategy = "lazy"
    kernels: Kernels

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Kernels:
        return Kernels(self._gpu)

    def set_runtime_cache(self, kernels: Kernels) -> bool:
        self.kernels = kernels
        return True


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """What changes if a graph or its weights do."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return [(name, status.st_mtime_ns, status.st_size) for name, status in files]


@lru_cache(maxsize=128)
def _session(graph: str, *files: tuple[str, int, int]) -> Any:
    """A session of the graph, made once while its files stay as they are: sessions keep nothing between runs."""
    import onnxruntime

    options = session_options(onnxruntime, THREADS)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=128)
def weights_read(graph: str) -> int:
    """Bytes of weights that a run of the graph in that file reads; of an embedding a row, which counts as none."""
    return 0 if Path(graph).name.startswith("embed") else load_graph(Path(graph)).weights


class PlainEngine:
    """The graph that the engine's file names, run by onnxruntime."""

    def __init__(self, gpu: Gpu, told: dict[str, Any], logger: Any) -> None:
        self.gpu, self.profiles, self.logger, self.graph = gpu, told["profiles"], logger, told["graph"]
        self.session = _session(self.graph, *_files(Path(self.graph).parent))
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.unread = {}
        if "state" in self.inputs and not any(name.startswith("past_") for name in self.inputs):
            # TensorRT leaves out inputs that nothing reads: those for attention, of a stage of states alone
            self.unread = {name: self.inputs.pop(name) for name in UNREAD}
        self._names = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self._names), len(self.profiles)

    def get_tensor_name(self, number: int) -> str:
        return self._names[number]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH * (profile + 1)

    def create_execution_context(self, strategy: str) -> Context | None:
        assert strategy == "user"
        self.gpu.calls["createExecutionContext"] += 1
        if self.gpu.used + CONTEXT > self.gpu.total:
            self.logger.log(1, "cannot allocate the memory of a context")
            return None
        context = Context(self)
        self.gpu.contexts.add(context)
        return context


class Engine(PlainEngine):
    """The same of TensorRT-RTX."""

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig(self.gpu)

    def create_execution_context(self, config: Any) -> Context | None:
        context = super().create_execution_context(config.strategy)
        if context is not None:
            context.kernels, context.captures = config.kernels, config.cuda_graph_strategy == "whole"
            specialised = "eager" if context.captures else "none"
            assert config.dynamic_shapes_kernel_specialization_strategy == specialised
        return context


class Context:
    """Shapes and addresses of one execution context, and its run."""

    kernels: Kernels | None = None
    captures = False

    def __init__(self, engine: PlainEngine) -> None:
        self.engine, self.gpu = engine, engine.gpu
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert self.profile is None, "the profile is set twice"
        self.profile = profile
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert self.profile is not None
        assert nbytes >= self.engine.get_device_memory_size_for_profile_v2(self.profile)
        self.gpu.holds(address, nbytes)
        self.scratch = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.shapes.get(name) != shape, f"the shape of {name} is set twice"
        assert name in self.engine.inputs
        bounds = self.engine.profiles[self.profile].get(name)
        if bounds is not None:
            low, _, high = bounds
            if not all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True)):
                return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert self.addresses.get(name) != address, f"{name} is bound twice"
        assert address % ALIGNMENT == 0, f"{name} is not aligned"
        self.addresses[name] = address
        return name in self.engine.inputs or name in self.engine.outputs

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch, "no working memory"
        assert not (self.captures and self.gpu.recording), "TensorRT-RTX records this by itself"
        if self.kernels is not None and self.engine.graph not in self.kernels.compiled:
            self.gpu.calls["compile"] += 1
            self.kernels.compiled.add(self.engine.graph)
        self.gpu.calls["enqueue"] += 1
        self.gpu.calls["captured enqueue"] += self.captures
        assert self.gpu.current == self.gpu.number, f"TensorRT runs on device {self.gpu.current}"
        if self.gpu.refused == "execute" and self.gpu.recording:
            self.engine.logger.log(1, "this kernel cannot be captured")
            return False
        assert set(self.addresses) == {*self.engine.inputs, *self.engine.outputs}, "a tensor has no address"
        shapes, addresses = {name: self._shape(name) for name in self.engine.inputs}, dict(self.addresses)
        for name, shape in shapes.items():
            nbytes = int(np.prod(shape)) * self._type(name)().itemsize
            self.gpu.holds(addresses[name], nbytes)
            if name.startswith("past_"):
                for present in (name for name in self.engine.outputs if name.startswith("present_")):
                    apart = not 0 <= addresses[present] - addresses[name] < nbytes
                    assert apart, f"{present} is written into what {name} reads"
        self.gpu.queue(lambda: self.run(shapes, addresses))
        return True

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        feeds = {name: view(addresses[name], shape, self._type(name)).copy() for name, shape in shapes.items()}
        for name, value in self.engine.unread.items():
            feeds[name] = np.zeros([size if isinstance(size, int) else 1 for size in value.shape], TYPES[value.type])
        found = dict(zip(self.engine.outputs, self.engine.session.run(None, feeds), strict=True))
        self.gpu.moved.append(("weights", weights_read(self.engine.graph)))
        regions = []
        for name, array in found.items():
            self.gpu.holds(addresses[name], array.nbytes)
            view(addresses[name], array.shape, array.dtype.type)[...] = array
            regions.append((addresses[name], addresses[name] + array.nbytes))
        for (_, end), (start, _) in zip(sorted(regions), sorted(regions)[1:], strict=False):
            assert end <= start, "two outputs overlap"

    def _shape(self, name: str) -> tuple[int, ...]:
        """As set, or as it stands in the graph; a free size of a table is what the profile says."""
        if name in self.shapes:
            return self.shapes[name]
        fixed = tuple(self.engine.inputs[name].shape)
        assert all(isinstance(size, int) for size in fixed), f"the shape of {name} is not set"
        return fixed

    def _type(self, name: str) -> Any:
        return TYPES[(self.engine.inputs.get(name) or self.engine.outputs[name]).type]


def view(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Device memory as an array."""
    nbytes = int(np.prod(shape)) * dtype().itemsize
    memory = (ctypes.c_byte * nbytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
