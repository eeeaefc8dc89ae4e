"""One TensorRT engine: read from disk, its contexts, and what is bound to them."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from vtx.runtime.backends.cuda import Buffer, Cuda
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError, DeviceError

Shape = tuple[int, ...]
log = logging.getLogger(__name__)
MAX_KERNELS = 1 << 29  # bytes
LOG = "VTX_TENSORRT_LOG"  # if set, every message of TensorRT goes to stderr


def make_logger(trt: Any) -> Any:
    """A logger for TensorRT, which calls it from several threads; `reason` gives its last errors, and forgets them."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._errors: list[str] = []
            self._lock = threading.Lock()
            self._shown = bool(os.environ.get(LOG))

        def log(self, severity: Any, message: str) -> None:
            if self._shown:
                print(f"TensorRT: {message}", file=sys.stderr)
            if severity <= self.ERROR:
                with self._lock:
                    self._errors = [*self._errors[:3], " ".join(message.split())[:300]]

        def reason(self) -> str:
            with self._lock:
                errors = self._errors
                self._errors = []
            return "".join(f": {error}" for error in errors)

    return Logger()


class KernelCache:
    """TensorRT-RTX's kernels for this GPU, which it compiles as it first runs them, kept in a file next to the engines.

    Engines are signed, and this file is not, so nothing is kept for a bundle that must be signed.
    """

    def __init__(self, bundle: Bundle, name: str) -> None:
        self._path = None if bundle.key else bundle.path(name)
        self._saved = b""
        if self._path is not None and bundle.files.exists(name):
            with suppress(BundleError):
                self._saved = bundle.files.read(name, MAX_KERNELS)
        self._cache: Any = None

    def configure(self, trt: Any, engine: Any, *, captures: bool) -> Any:
        """The configuration of a context of an engine; with `captures` TensorRT records its work into a CUDA graph."""
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._saved and not self._cache.deserialize(self._saved):
                log.info("%s is of another GPU, driver or release: kernels are compiled anew", self._path)
        config.set_runtime_cache(self._cache)
        # A token's sizes come back, so kernels are made for them; those of prompts differ each time.
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if captures else strategies.NONE
        if captures:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return config

    def save(self) -> None:
        """Write the kernels to the file if there are new ones and it can be written."""
        if self._cache is None or self._path is None:
            return
        kernels = bytes(self._cache.serialize())
        if kernels == self._saved or len(kernels) > MAX_KERNELS:
            return
        hidden = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            hidden.write_bytes(kernels)
            hidden.replace(self._path)
        except OSError as e:
            log.info("compiled kernels are not kept: %s", e)
            hidden.unlink(missing_ok=True)
        self._saved = kernels


class EngineFile(NamedTuple):
    """An engine's file in a bundle, open for reading; `cure`: what to do if TensorRT does not take it."""

    name: str
    opened: BinaryIO
    cure: str


class GraphEngine:
    """A deserialised engine; the open file is mapped, not read, so that no copy of it stays in memory."""

    def __init__(self, trt: Any, runtime: Any, file: EngineFile, cuda: Cuda, kernels: KernelCache | None) -> None:
        self._trt = trt
        self._cuda = cuda
        self.name = file.name
        self._kernels = kernels
        self.reason = runtime.logger.reason
        with mmap.mmap(file.opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise BundleError(f"TensorRT does not take {self.name}{self.reason()}; {file.cure}")
        profiles = range(self._engine.num_optimization_profiles)
        self.scratch = max(int(self._engine.get_device_memory_size_for_profile_v2(number)) for number in profiles)
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        is_input = trt.TensorIOMode.INPUT
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == is_input]
        self.outputs = [name for name in names if name not in self.inputs]
        self.tensors = frozenset(names)

    def context(self, profile: int, scratch: Buffer, *, captures: bool = False) -> Context:
        """A context of its own for one of the engine's profiles (-1: the last), on memory that others use in turn.

        `captures`: TensorRT-RTX records its work into a CUDA graph by itself.
        """
        profile %= self._engine.num_optimization_profiles
        if self._kernels is None:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        else:
            strategy = self._kernels.configure(self._trt, self._engine, captures=captures)
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise DeviceError(
                f"TensorRT makes no context for {self.name}{self.reason()}; end other programs on the GPU"
            )
        self._cuda.wait()
        context.set_device_memory(scratch.address, scratch.nbytes)
        return Context(self, context, self._cuda, records=not captures or self._kernels is None)


class Context:
    """One engine with one profile; shapes and addresses are set when they change.

    `records`: its work may be recorded into a CUDA graph by vtx; else TensorRT-RTX does that by itself.
    """

    def __init__(self, engine: GraphEngine, context: Any, cuda: Cuda, *, records: bool) -> None:
        self.engine = engine
        self.execution = context
        self._cuda = cuda
        self.records = records
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Shapes of the inputs that have free sizes, and the address of every tensor that is not bound yet.

        Of tensors that the engine has: TensorRT may leave out an input that nothing reads, as slots of a stage without
        attention.
        """
        for name, shape in shapes.items():
            if name in self.engine.tensors and self._shapes.get(name) != shape:
                if not self.execution.set_input_shape(name, shape):
                    raise DeviceError(
                        f"{self.engine.name} takes no {name} of shape {shape}{self.engine.reason()}; "
                        "build the engines again"
                    )
                self._shapes[name] = shape
        for name, address in addresses.items():
            if name in self.engine.tensors and self._addresses.get(name) != address:
                if not self.execution.set_tensor_address(name, address):
                    raise DeviceError(f"{self.engine.name} does not take the address of {name}{self.engine.reason()}")
                self._addresses[name] = address

    def shape(self, name: str) -> Shape:
        return tuple(self.execution.get_tensor_shape(name))

    def enqueue(self) -> None:
        if not self.execution.execute_async_v3(self._cuda.stream):
            raise DeviceError(f"TensorRT cannot run {self.engine.name}{self.engine.reason()}; run vtx-doctor")

    @property
    def capturable(self) -> bool:
        """True if its work can be recorded into a CUDA graph; releases that cannot tell can do it."""
        ask = getattr(self.execution, "is_stream_capturable", None)
        return ask is None or bool(ask(self._cuda.stream))
