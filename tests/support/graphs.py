"""One graph by itself: built, written, and loaded by onnxruntime in the tests' own thread pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.exported import THREADS
from vtx.exporter.graphs.builder import Builder, Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.weights.stored import StoredTensor
from vtx.runtime.backends.ort.backend import share_threads


def session(
    folder: Path,
    build: Callable[[Builder], None],
    dialect: Dialect | None = None,
    weights: Mapping[str, StoredTensor] | None = None,
) -> Any:
    """An onnxruntime session of the graph that `build` makes in `folder`, where its weights lie."""
    import onnxruntime

    share_threads(onnxruntime, THREADS)
    builder = Builder("graph", weights or {}, folder, dialect or Ort())
    build(builder)
    builder.write(folder / "graph.onnx")
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(folder / "graph.onnx", options, providers=["CPUExecutionProvider"])
