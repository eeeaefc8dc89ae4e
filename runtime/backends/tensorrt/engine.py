"""One TensorRT engine: read from disk, its contexts, and what is bound to them."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from vtx.runtime.backends.tensorrt.cuda import Buffer, Cuda
from vtx.runtime.errors import BundleError, DeviceError

Shape = tuple[int, ...]
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
                errors, self._errors = self._errors, []
            return "".join(f": {error}" for error in errors)

    return Logger()


class GraphEngine:
    """A deserialised engine; the open file is mapped, not read, so that no copy of it stays in memory."""

    def __init__(self, trt: Any, runtime: Any, name: str, file: BinaryIO, cuda: Cuda, cure: str) -> None:
        self._trt, self._cuda, self.name = trt, cuda, name
        self.reason = runtime.logger.reason
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise BundleError(f"TensorRT does not take {name}{self.reason()}; {cure}")
        profiles = range(self._engine.num_optimization_profiles)
        self.scratch = max(int(self._engine.get_device_memory_size_for_profile_v2(number)) for number in profiles)
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        is_input = trt.TensorIOMode.INPUT
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == is_input]
        self.outputs = [name for name in names if name not in self.inputs]

    def context(self, profile: int, scratch: Buffer) -> Context:
        """A context of its own for one of the engine's profiles (-1: the last), on memory that others use in turn."""
        profile %= self._engine.num_optimization_profiles
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise DeviceError(
                f"TensorRT makes no context for {self.name}{self.reason()}; end other programs on the GPU"
            )
        self._cuda.wait()
        context.set_device_memory(scratch.address, scratch.nbytes)
        return Context(self, context, self._cuda)


class Context:
    """One engine with one profile; shapes and addresses are set when they change."""

    def __init__(self, engine: GraphEngine, context: Any, cuda: Cuda) -> None:
        self.engine, self.execution, self._cuda = engine, context, cuda
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Shapes of the inputs that have free sizes, and the address of every tensor that is not bound yet."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                if not self.execution.set_input_shape(name, shape):
                    raise DeviceError(
                        f"{self.engine.name} takes no {name} of shape {shape}{self.engine.reason()}; "
                        "build the engines again"
                    )
                self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
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
