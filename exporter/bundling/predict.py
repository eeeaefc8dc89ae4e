"""Disk, memory and time of an export, said before it starts and measured after it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from vtx.exporter.checkpoint.config import ModelConfig, TextConfig
from vtx.exporter.graphs.decoder import layer_tensors
from vtx.exporter.weights.awq import OUTPUTS, ROWS
from vtx.exporter.weights.plan import WeightPlan
from vtx.exporter.weights.precision import EMBEDDING
from vtx.runtime.backends.memory import answering_memory, resident_bytes
from vtx.runtime.bundle.spec.manifest import KV_BYTES
from vtx.runtime.errors import ExportError
from vtx.runtime.report.golden import SEEN_ROWS, SHOWN_ROWS
from vtx.runtime.units import size

# What Python, PyTorch, transformers and onnx_ir take before any weight is touched.
EXPORT_BASE = 385 << 20
QUESTION_ROWS = 64  # of the golden prompt beside the image
LAYER_GRAPH = 12_000  # bytes of a layer, the decoder's or the tower's, in a dialect's graphs: 10 to 11 thousand
OTHER_FILES = 64_000  # bytes: the manifest, the configuration, headers, graphs without layers
PASSAGE_ROWS = 256  # of the prompt that the scales of int8 K and V are measured on, beside the image


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes. `linked` is the part of `disk` that is shared with the checkpoint by hard links where possible."""

    disk: int
    linked: int
    export_memory: int
    run_memory: int
    kv_full: int
    work: int


def small_files(config: ModelConfig, max_context: int, ks: int, dialects: int, texts: int) -> int:
    """Bytes beside the weights: `texts` of them tokenizer and template, graphs, tables of rope, and golden vectors."""
    text, vision = config.text, config.vision
    layers = text.layers + max(config.feature_layers)
    golden = 3 * vision.image**2 + SHOWN_ROWS * text.hidden + (1 + ks) * text.vocab
    return texts + LAYER_GRAPH * layers * dialects + 4 * max_context * text.head_dim + 4 * golden + OTHER_FILES


def predict(
    config: ModelConfig,
    plan: WeightPlan,
    max_context: int,
    kv_dtype: str,
    small: int,
    measured: Sequence[int] = (),
) -> Prediction:
    """What an export and a run on the CPU will need. `run_memory` is with a prompt of one image, K = none.

    `small`: bytes of the files beside the weights; `measured`: rows of each prompt whose activations are measured.
    """
    text = config.text
    slot = 2 * text.kv_heads * text.head_dim * KV_BYTES[kv_dtype]
    answering = answering_memory(
        layers=text.layers, hidden=text.hidden, heads=text.heads, kv_heads=text.kv_heads, head_dim=text.head_dim,
        vision_tokens=config.vision_tokens, max_context=max_context, kv_bytes=KV_BYTES[kv_dtype],
    )  # fmt: skip
    resident = sum(
        resident_bytes(tensor.dtype, tensor.shape, prod(tensor.scales.shape) if tensor.scales else 0)
        for name, tensor in plan.stored.items()
        if text.tied or name != EMBEDDING  # which stays in its file and is read a row at a time
    )
    disk = sum(file.size for file in plan.files) + small
    rows = config.vision_tokens + PASSAGE_ROWS if kv_dtype == "int8" else SEEN_ROWS + QUESTION_ROWS
    return Prediction(
        disk=disk,
        linked=sum(file.size for file in plan.files if file.whole),
        export_memory=EXPORT_BASE + max(_writing(plan), _checking(text, rows), _measuring(text, measured)),
        run_memory=resident + answering,
        kv_full=slot * text.layers,
        work=sum(file.work for file in plan.files),
    )


def _writing(plan: WeightPlan) -> int:
    """While weights are written: the largest tensor, mapped, and what becomes of it."""
    rewritten = [entry for file in plan.files if not file.whole for entry in file.entries]
    return max((entry.source.nbytes + entry.end - entry.place.offset for entry in rewritten), default=0)


def _checking(text: TextConfig, rows: int) -> int:
    """While the reference computes: the largest matrix of a layer, stored and as float32, and the rows in it."""
    matrix = text.hidden * max(text.ffn, text.heads * text.head_dim)
    return (4 + 2 + 4) * matrix + 4 * 4 * rows * text.ffn


def _measuring(text: TextConfig, rows: Sequence[int]) -> int:
    """While activations are measured: a layer as float32 and its largest matrix as stored, the rows, the search."""
    if not rows:
        return 0
    matrices = sum(prod(shape) for _, shape in layer_tensors(text, 1))
    widest = max(text.ffn, text.heads * text.head_dim, text.hidden)
    passing = 4 * max(rows) * (4 * text.ffn + 4 * text.hidden) + 4 * 2 * sum(rows) * text.hidden
    search = 4 * widest * (6 * OUTPUTS + 2 * ROWS)
    return 4 * matrices + 2 * text.hidden * widest + passing + search


def check_memory(prediction: Prediction, limit: int | None) -> None:
    """Raise ExportError when an export is expected to need more memory than `limit` bytes."""
    if limit is not None and prediction.export_memory > limit:
        raise ExportError(
            f"the export needs about {size(prediction.export_memory)} of memory, --max-memory allows {size(limit)}; "
            "raise it, or export on another machine"
        )


def check_disk(folder: Path, needed: int, *, what: str, cure: str) -> None:
    """Raise ExportError, naming `what` needs the room and the `cure`, when `folder` has not `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(f"{what} needs {size(needed)} of disk, {folder} has {size(free)} free; free some, {cure}")


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
