"""Failures of engines as errors of vtx: one line with the graph's name, the engine's reason, and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from vtx.runtime.errors import BundleError, DeviceError, ModelClosedError, VtxError
from vtx.runtime.host.machine import memory_in_words

MAX_REASON = 300  # characters of an engine's own message


def load_failure(engine: str, graph: str, error: Exception) -> VtxError:
    if _lacks_memory(error):
        return DeviceError(
            f"not enough memory to load {graph} ({memory_in_words()}); vtx-inspect shows the bundle's size; end other "
            "programs, raise the limit, or export with a smaller --precision, e.g. int4"
        )
    return BundleError(f"{engine} cannot load {graph}: {reason_of(error)}; export the bundle again")


@contextmanager
def run_failures(engine: str, graph: str) -> Iterator[None]:
    """Turn exceptions of an engine that binds to or runs a graph into errors of vtx."""
    try:
        yield
    except VtxError:
        raise
    except Exception as e:
        raise run_failure(engine, graph, e) from e


def run_failure(engine: str, graph: str, error: Exception) -> VtxError:
    """The error of an engine that fails in a graph."""
    if _lacks_memory(error):
        return DeviceError(
            f"not enough memory to run {graph} ({memory_in_words()}); end other programs, ask about fewer images or "
            "with a shorter question, or export with a smaller --precision"
        )
    return DeviceError(f"{engine} failed in {graph}: {reason_of(error)}; check the bundle with vtx-doctor")


def cache_failure(capacity: int) -> VtxError:
    """The error of a stage's cache of `capacity` slots for which there is no memory."""
    return DeviceError(
        f"not enough memory for a KV cache of {capacity} slots ({memory_in_words()}); end other programs, or export "
        "with a smaller --max-context"
    )


class ClosedGraph:
    """In place of a graph's session once its backend was closed: any use raises ModelClosedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, _: str) -> NoReturn:
        raise closed_failure(self._name)


def closed_failure(graph: str) -> VtxError:
    return ModelClosedError(f"{graph} cannot run: the model is closed; load it again with vtx.load")


def _lacks_memory(error: Exception) -> bool:
    """Engines report memory by text, each in its own words: bad_alloc, "Failed to allocate", "could not allocate".

    onnxruntime also reports outputs of a wrong size by their allocation, as INVALID_ARGUMENT.
    """
    text = str(error).lower()
    spoken = ("alloc" in text or "out of memory" in text) and "invalid_argument" not in text
    return isinstance(error, MemoryError) or spoken


def reason_of(error: Exception) -> str:
    """One line; OpenVINO's messages begin with source locations and end with the reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON else f"...{text[-MAX_REASON:]}"
