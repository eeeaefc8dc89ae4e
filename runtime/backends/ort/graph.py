"""One graph loaded by onnxruntime: its runs, and failures that name it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from vtx.runtime.backends import contract
from vtx.runtime.backends.allocation import returning_memory
from vtx.runtime.backends.failures import ClosedGraph, load_failure, run_failure
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec import graphs
from vtx.runtime.errors import DeviceError, VtxError

ENGINE = "onnxruntime"


@dataclass(frozen=True, slots=True)
class OrtLoader:
    """Loads graphs of a bundle with the same options on the same providers.

    `roomy`: memory freed while packing is returned after each graph, or after all, and not at once: it takes less time.
    """

    ort: Any
    bundle: Bundle
    options: Any
    providers: Mapping[str, Mapping[str, str]]
    roomy: bool = False

    def load(self, name: str, promised: graphs.GraphIO) -> OrtGraph:
        """The graph in the file `name`, checked against its contract. Raises DeviceError, BundleError."""
        with self.bundle.graph_path(name) as path:
            try:
                with returning_memory(at_once=not self.roomy):
                    session = self.ort.InferenceSession(
                        os.fspath(path), self.options, list(self.providers.items()), enable_fallback=0
                    )
            except Exception as e:
                raise load_failure(ENGINE, name, e) from e
        if (first := next(iter(self.providers))) not in session.get_providers():  # older releases go on without it
            raise DeviceError(f"{ENGINE} loaded {name} without its {first}; vtx-doctor has the reason")
        contract.check(name, *ports(session), promised)
        return OrtGraph(name, session, list(promised.outputs))


def ports(session: Any) -> tuple[list[contract.Port], list[contract.Port]]:
    """The inputs and the outputs of an onnxruntime.InferenceSession."""
    inputs, outputs = (
        [(x.name, x.type, x.shape) for x in side] for side in (session.get_inputs(), session.get_outputs())
    )
    return inputs, outputs


class OrtGraph:
    """A loaded graph with these outputs, its onnxruntime.InferenceSession. Safe to share between threads."""

    def __init__(self, name: str, session: Any, outputs: Sequence[str]) -> None:
        self.name = name
        self.session = session
        self._outputs = outputs

    def is_free(self, name: str, axis: int) -> bool:
        """Return True if an input may have any size along an axis."""
        return any(port.name == name and not isinstance(port.shape[axis], int) for port in self.session.get_inputs())

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs by name."""
        try:
            return dict(zip(self._outputs, self.session.run(self._outputs, dict(inputs)), strict=True))
        except VtxError:
            raise
        except Exception as e:
            raise run_failure(ENGINE, self.name, e) from e

    def run_bound(self, binding: Any, options: Any = None) -> None:
        """Run over an onnxruntime.IOBinding of this session, with onnxruntime.RunOptions."""
        try:
            self.session.run_with_iobinding(binding, options)
        except VtxError:
            raise
        except Exception as e:
            raise run_failure(ENGINE, self.name, e) from e

    def close(self) -> None:
        """Release the session with its weights and threads."""
        self.session = ClosedGraph(self.name)
