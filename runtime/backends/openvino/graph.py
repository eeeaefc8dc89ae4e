"""One graph compiled by OpenVINO: its ports for `contract.check`, its runs, and failures that name it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.failures import closed_failure, run_failures
from vtx.runtime.bundle.spec import graphs
from vtx.runtime.vision.tokens import HiddenStates

ENGINE = "OpenVINO"
TYPES = {"f32": "float", "f16": "float16", "i64": "int64", "i32": "int32"}  # OpenVINO's and onnxruntime's


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output in the form that `contract.check` reads."""

    name: str
    type: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, port: Any, promised: Iterable[str]) -> Port:
        """A port may have other names too, of tensors that were folded into it."""
        name = next(iter(port.get_names().intersection(promised)), port.get_any_name())
        shape = tuple(None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
        kind = port.get_element_type().get_type_name()
        return cls(name, f"tensor({TYPES.get(kind, kind)})", shape)


@dataclass(frozen=True, slots=True)
class Ports:
    """A graph's inputs and outputs, listed as by an onnxruntime.InferenceSession."""

    model: Any
    promised: graphs.GraphIO

    def get_inputs(self) -> Sequence[Port]:
        return [Port.of(port, self.promised.inputs) for port in self.model.inputs]

    def get_outputs(self) -> Sequence[Port]:
        return [Port.of(port, self.promised.outputs) for port in self.model.outputs]


class OpenvinoGraph:
    """A compiled graph with one infer request. Calls from several threads wait for each other."""

    def __init__(self, name: str, compiled: Any, outputs: Iterable[str]) -> None:
        self.name, self._outputs = name, tuple(outputs)
        self._request: Any = compiled.create_infer_request()
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name."""
        with self._lock:
            if self._request is None:
                raise closed_failure(self.name)
            with run_failures(ENGINE, self.name):
                run_request(self._request, {name: np.ascontiguousarray(array) for name, array in inputs.items()})
            return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}

    def close(self) -> None:
        """Release the compiled graph with its weights and threads."""
        with self._lock:
            self._request = None


def run_request(request: Any, inputs: Mapping[str, NDArray[Any]] | None = None) -> None:
    """Run an infer request over host arrays, or over what is set, and wait for it.

    Not by `infer`: if memory runs out, OpenVINO 2026.4 returns from it without an error and with the outputs of the
    previous run. `wait` raises.
    """
    try:
        request.start_async(None if inputs is None else dict(inputs), share_inputs=True)
    finally:  # also if a signal comes between the two
        request.wait()


def run_row(request: Any, out: HiddenStates) -> None:
    """Run an infer request over what is set, whose hidden states go to `out` [1, hidden], on this very thread.

    To wake another one and wait for it takes a good part of a small model's token. If memory runs out, `infer`
    leaves `out` as it is: then it runs again, so that the failure is raised.
    """
    out[0, 0] = np.nan
    request.infer(None, share_outputs=True)
    if np.isnan(out[0, 0]):
        run_request(request)


@dataclass(slots=True)
class StageGraph:
    """A stage's compiled graph; each cache makes its own infer request over it. `compiled` is None once closed.

    `for_many`: the same stage with its weights in a form that is quicker for many tokens, if it has one, and
    `held` the memory that these weights came from.
    """

    name: str
    compiled: Any
    for_many: Any = None
    held: Sequence[NDArray[np.int8]] = ()

    def request(self) -> Any:
        compiled = self.compiled
        if compiled is None:
            raise closed_failure(self.name)
        return compiled.create_infer_request()

    def request_for_many(self) -> Any:
        """An infer request over the form for many tokens; None if there is none."""
        compiled = self.for_many
        return None if compiled is None else compiled.create_infer_request()

    def check_open(self) -> None:
        """Raise ModelClosedError if the model was closed."""
        if self.compiled is None:
            raise closed_failure(self.name)

    def close(self) -> None:
        self.compiled = self.for_many = None
