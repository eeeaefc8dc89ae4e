"""Disk, memory and time of an export, said before it starts and measured after it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from vtx.exporter.hf.config import ModelConfig
from vtx.exporter.precision import EMBEDDING
from vtx.exporter.weights import WeightPlan
from vtx.runtime.errors import ExportError
from vtx.runtime.manifest import KV_BYTES
from vtx.runtime.memory import resident_bytes
from vtx.runtime.units import size

# What Python, PyTorch, transformers and onnx_ir take before any weight is touched, and what the runtime takes.
EXPORT_BASE = 450 << 20
RUN_BASE = 110 << 20
SMALL_FILES = 8 << 20  # tokenizer, graphs, golden vectors, rope tables


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes. `linked` is the part of `disk` that is shared with the checkpoint by hard links where possible."""

    disk: int
    linked: int
    export_memory: int
    run_memory: int
    kv_full: int
    work: int


def predict(config: ModelConfig, plan: WeightPlan, max_context: int, kv_dtype: str) -> Prediction:
    """What an export and a run on the CPU will need. `run_memory` is with a prompt of one image, K = none."""
    text = config.text
    slot = 2 * text.kv_heads * text.head_dim * KV_BYTES[kv_dtype]
    prompt = min(max_context, config.vision_tokens + 256)
    kv = slot * text.layers * prompt
    embedding = text.vocab * text.hidden
    resident = sum(
        resident_bytes(tensor.dtype, tensor.shape, prod(tensor.scales.shape) if tensor.scales else 0)
        for name, tensor in plan.stored.items()
        if text.tied or name != EMBEDDING  # which stays in its file and is read a row at a time
    )
    largest_layer = 4 * max(embedding, text.hidden * text.ffn * 3 + 4 * text.hidden * text.heads * text.head_dim)
    disk = sum(file.size for file in plan.files) + SMALL_FILES
    return Prediction(
        disk=disk,
        linked=sum(file.size for file in plan.files if file.whole),
        export_memory=EXPORT_BASE + largest_layer + 4 * 6 * prompt * text.ffn,
        run_memory=RUN_BASE + resident + kv,
        kv_full=slot * text.layers,
        work=sum(file.work for file in plan.files),
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
