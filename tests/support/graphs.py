"""One graph by itself: built, written, and loaded by onnxruntime in as many threads as other tests take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.exported import THREADS
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.builder import Builder, Dialect
from vtx.exporter.graphs.dialects.ort import Ort
from vtx.exporter.weights.plan import StoredTensor
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.spec.model_spec import RopeSpec

TEXT = TextConfig(
    family="llama", layers=1, hidden=48, ffn=64, heads=6, kv_heads=2, head_dim=8, vocab=32, eps=1e-5,
    activation="silu", qkv_bias=False, o_bias=False, mlp_bias=False, tied=False,
    rope=RopeSpec("default", 1e4, (1.0,) * 4), max_positions=64,
)  # fmt: skip


def session(
    folder: Path,
    build: Callable[[Builder], None],
    dialect: Dialect | None = None,
    weights: Mapping[str, StoredTensor] | None = None,
) -> Any:
    """An onnxruntime session of the graph that `build` makes in `folder`, where its weights lie."""
    import onnxruntime

    builder = Builder("graph", weights or {}, folder, dialect or Ort())
    build(builder)
    builder.write(folder / "graph.onnx")
    options = session_options(onnxruntime, THREADS)
    return onnxruntime.InferenceSession(folder / "graph.onnx", options, providers=["CPUExecutionProvider"])
