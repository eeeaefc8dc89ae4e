"""What a bundle takes in memory once it is loaded on a CPU: a forecast from the headers of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vtx.runtime.backends.engines import EXPANDED, Floats
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.precision import KV_DTYPES

# A scale is kept in float32 twice, beside and inside of the packed matrix, and with it the sum of its block.
SCALE_BYTES = 12
KERNEL_BLOCK = 64  # int8 matrices, with a scale a row, are computed in blocks of this size at most
SCALES = ".scales"
TABLE = "embed_tokens.weight"
HEAD = "head.weight"
TOWER = ("vision.", "projector.")  # graphs of fixed sizes: OpenVINO packs their floats in the type that it computes in
STAGES = "text.layers."
RUN_BASE = 110 << 20  # what Python, numpy and onnxruntime take before any weight
QUESTION_ROWS = 256  # of text that a forecast counts with
PREFILL_BUFFERS = 16  # of a prompt's rows by the hidden size, in float32, that a prefill takes


def resident_bytes(dtype: str, shape: tuple[int, ...], scales: int = 0, floats: Floats = EXPANDED) -> int:
    """Bytes of a weight in memory: `dtype` is safetensors' word or I4; `scales` of a quantised one are counted.

    Quantised matrices stay as they are; `floats` says what others take.
    """
    count = math.prod(shape)
    if not scales:
        return floats[dtype] * count
    blocks = max(scales, -(-count // KERNEL_BLOCK)) if dtype == "I8" else scales
    return (count if dtype == "I8" else count // 2) + SCALE_BYTES * blocks


def weights_in_memory(bundle: Bundle, floats: Floats = EXPANDED) -> int:
    """Bytes that all graphs of a bundle keep resident. The embedding table stays in its file unless it is the head."""
    tensors: dict[str, TensorInfo] = {}
    for name in bundle.manifest.files:
        if name.startswith("weights/"):
            tensors |= bundle.header(name).tensors
    tied = not any(name.endswith(HEAD) for name in tensors)
    return sum(_resident(info, tensors, floats) for name, info in tensors.items() if tied or not name.endswith(TABLE))


def answering_memory(
    *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, image_tokens: int, max_context: int,
    kv_bytes: int,
) -> int:  # fmt: skip
    """Bytes beside the weights while one image is asked about and all layers see it.

    They are K and V of `kv_bytes` a number, the scores of one layer's attention, and the rows in work.
    """
    rows = min(max_context, image_tokens + QUESTION_ROWS)
    kv = 2 * layers * kv_heads * head_dim * kv_bytes * rows
    return RUN_BASE + kv + 4 * rows * (heads * rows + PREFILL_BUFFERS * hidden)


def needed_memory(bundle: Bundle, floats: Floats = EXPANDED) -> int:
    """Bytes that a bundle needs to be loaded and asked about an image."""
    m = bundle.manifest
    return weights_in_memory(bundle, floats) + answering_memory(
        layers=m.model.layers, hidden=m.model.hidden, heads=m.model.heads, kv_heads=m.model.kv_heads,
        head_dim=m.model.head_dim, image_tokens=min(m.layout.max_tokens, m.max_context), max_context=m.max_context,
        kv_bytes=KV_DTYPES[m.kv_dtype].bytes,
    )  # fmt: skip


def _resident(info: TensorInfo, tensors: Mapping[str, TensorInfo], floats: Floats) -> int:
    if info.name.endswith(SCALES):
        return 0  # counted with its matrix
    scales = tensors.get(info.name + SCALES)
    if scales is None:
        return resident_bytes("F32" if info.name.startswith(TOWER) else info.dtype, info.shape, floats=floats)
    octets = math.prod(info.shape)
    count, dtype = (octets, "I8") if info.dtype == "I8" else (2 * octets, "I4")
    second = floats.get(dtype, 0) * count if info.name.startswith(STAGES) else 0
    return resident_bytes(dtype, (count,), math.prod(scales.shape), floats) + second
