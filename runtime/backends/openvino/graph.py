"""One graph compiled by OpenVINO: its ports for `contract.check`, its runs, and failures that name it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.backends.contract import Port
from vtx.runtime.backends.failures import closed_failure, run_failures
from vtx.runtime.backends.openvino.narrow import releasing_pages
from vtx.runtime.backends.openvino.states import StateTensors
from vtx.runtime.vision.tokens import HiddenStates

ENGINE = "OpenVINO"
TYPES = {"f32": "float", "f16": "float16", "i64": "int64", "i32": "int32"}  # OpenVINO's and onnxruntime's


def ports(values: Iterable[Any], promised: Iterable[str]) -> Iterator[Port]:
    """A graph's inputs or outputs; they may have other names too, of tensors that were folded into them."""
    for value in values:
        name = next(iter(value.get_names().intersection(promised)), value.get_any_name())
        shape = [None if size.is_dynamic else size.get_length() for size in value.get_partial_shape()]
        kind = value.get_element_type().get_type_name()
        yield name, f"tensor({TYPES.get(kind, kind)})", shape


class OpenvinoGraph:
    """A compiled graph with one infer request. Calls from several threads wait for each other.

    `model` is what it was compiled from. The engine packs the weights of a graph of free sizes in its first run, which
    leaves no pages of their files resident.
    """

    def __init__(self, name: str, compiled: Any, outputs: Iterable[str], model: Any = None) -> None:
        self.name = name
        self._outputs = tuple(outputs)
        self._unpacked = model
        self._request: Any = compiled.create_infer_request()
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        with self._lock:
            if self._request is None:
                raise closed_failure(self.name)
            with releasing_pages(self._unpacked), run_failures(ENGINE, self.name):
                run_request(self._request, {name: np.ascontiguousarray(array) for name, array in inputs.items()})
            self._unpacked = None
            return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}

    def close(self) -> None:
        with self._lock:
            self._request = self._unpacked = None


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
    `held` the memory that these weights came from. `states`: the tensors of its states.
    """

    name: str
    compiled: Any
    for_many: Any = None
    held: Sequence[NDArray[np.int8]] = ()
    states: StateTensors = field(default_factory=StateTensors)

    def request(self) -> Any:
        compiled = self.compiled
        if compiled is None:
            raise closed_failure(self.name)
        return compiled.create_infer_request()

    def check_open(self) -> None:
        if self.compiled is None:
            raise closed_failure(self.name)

    def close(self) -> None:
        self.compiled = self.for_many = None
