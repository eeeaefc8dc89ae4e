"""A stand-in for onnxruntime with its CUDA provider: it computes on the CPU, over the memory of a stand-in GPU.

Memory that is bound must be the device's and alive when the graph runs, work goes to the stream of the caller, and what
the operators read on the host must be there. Arrays of the host that a graph takes or gives are copies of the GPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from tests.support.gpu_standin import Gpu, weights_read
from vtx.runtime.backends.ort.cuda import PROVIDER
from vtx.runtime.bundle.spec import names

HOST_INPUTS = (names.TOTAL_SLOTS,)  # that operators read there
UNSYNCHRONISED = "disable_synchronize_execution_providers"
STREAM = 7


class Ort:
    """The module; `options` are those of each session's provider, `binds` counts bindings of single tensors."""

    RunOptions = onnxruntime.RunOptions

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.binds = gpu, 0
        self.options: list[dict[str, str]] = []
        self.fails: Exception | None = None  # of the next run
        self.on_device: list[Any] = []  # values that were made there

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    @property
    def OrtValue(self) -> Any:
        return Value(self)

    def InferenceSession(self, path: str, options: Any, providers: list[Any], enable_fallback: int) -> Any:
        assert not enable_fallback
        (name, given), last = providers[0], providers[-1][0]
        assert last == "CPUExecutionProvider"
        if name == last:  # the CPU's backend
            return onnxruntime.InferenceSession(path, options, providers)
        assert name == PROVIDER
        assert given["user_compute_stream"] == str(STREAM)
        self.options.append(given)
        return Session(self, onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]), path)


class Value:
    """Values in the host's memory, wherever they are asked for."""

    def __init__(self, ort: Ort) -> None:
        self._ort = ort

    def ortvalue_from_numpy(self, array: Any, device: str = "cpu", number: int = 0) -> Any:
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        if device != "cpu":
            self._ort.on_device.append(value)
        return value


class Session:
    def __init__(self, ort: Ort, session: Any, path: str) -> None:
        self._ort, self._session, self._path = ort, session, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _move(self, copies: list[tuple[str, int]]) -> None:
        """Count what a run copies and reads."""
        self._ort.gpu.copies += copies
        self._ort.gpu.moved += [*copies, ("weights", weights_read(self._path))]

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def run(self, outputs: Any, feeds: Any) -> list[Any]:
        found: list[Any] = self._session.run(outputs, feeds)
        self._ort.gpu.calls["run on arrays"] += 1
        self._move([*(("in", array.nbytes) for array in feeds.values()), *(("out", array.nbytes) for array in found)])
        return found

    def io_binding(self) -> Binding:
        return Binding(self._ort, self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any = None) -> None:
        if self._ort.fails is not None:
            raise self._ort.fails
        gpu = self._ort.gpu
        gpu.calls["run"] += 1

        def run() -> None:
            for address, nbytes in binding.bound.values():
                gpu.holds(address, nbytes)
            self._session.run_with_iobinding(binding.binding)
            copied = [(side, value.numpy().nbytes) for (side, _), value in binding.of_host.items()]
            returned = binding.get_outputs() if binding.returns else []
            self._move(copied + [("out", value.numpy().nbytes) for value in returned])

        gpu.queue(run)
        if options is None or options.get_run_config_entry(UNSYNCHRONISED) != "1":
            gpu.cuStreamSynchronize(STREAM)


class Binding:
    def __init__(self, ort: Ort, binding: Any) -> None:
        self._ort, self.binding = ort, binding
        self.bound: dict[tuple[str, str], tuple[int, int]] = {}
        self.of_host: dict[tuple[str, str], Any] = {}  # values that are copied in and out
        self.returns = False  # arrays of onnxruntime's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self._ort.binds += 1
        if name not in HOST_INPUTS and not any(value is known for known in self._ort.on_device):
            self.of_host["in", name] = value
        self.binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.of_host["out", name] = value
        self.binding.bind_ortvalue_output(name, value)

    def bind_input(self, name: str, *where: Any) -> None:
        assert name != names.TOTAL_SLOTS, "GroupQueryAttention reads it on the host"
        self.binding.bind_input(name, *self._on_device("in", name, *where))

    def bind_output(self, name: str, *where: Any) -> None:
        if where == ("cpu",):  # an array of onnxruntime's own
            self.returns = True
            self.binding.bind_output(name, "cpu")
        else:
            self.binding.bind_output(name, *self._on_device("out", name, *where))

    def _on_device(
        self, side: str, name: str, device: str, number: int, dtype: Any, shape: Any, address: int
    ) -> tuple[Any, ...]:
        assert (device, number) == ("cuda", self._ort.gpu.number)
        self._ort.binds += 1
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._ort.gpu.holds(address, nbytes)
        self.bound[side, name] = address, nbytes
        return "cpu", 0, dtype, shape, address
