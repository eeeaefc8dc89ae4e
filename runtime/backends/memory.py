"""The memory of a bundle that is loaded on a CPU, predicted from the headers of its weights, and the use of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from vtx.runtime.backends.engines import ENGINES, EXPANDED, Floats, floats_in_memory
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import TensorInfo
from vtx.runtime.bundle.spec.stored import SCALES, ZEROS
from vtx.runtime.host.machine import available_memory, cpu_flags
from vtx.runtime.precision import KV_DTYPES, STORED

# A scale is kept in float32 twice, next to and inside the packed matrix, and with it the sum of its block.
SCALE_BYTES = 12
KERNEL_BLOCK = 64  # int8 matrices, with a scale a row, are computed in blocks of this size at most
TABLE = "embed_tokens.weight"
LAYER_TABLE = "embed_tokens_per_layer.weight"
HEAD = "head.weight"
TOWER = ("vision.", "projector.")  # graphs of fixed sizes: OpenVINO packs their floats in the type that it computes in
STAGES = "text.layers."
RUN_BASE = 110 << 20  # of Python, numpy and onnxruntime before any weight
# Of a tokenizer at its peak, measured of those of Gemma 3 (520 MB), Qwen2.5 and Qwen3 (133, 167), Llama 3.1 and LFM2
TOKEN_BYTES = 500  # a token of its vocabulary
TEXT_BYTES = 10  # a byte of its tokenizer.json
QUESTION_ROWS = 256  # tokens of text in a prediction
PREFILL_BUFFERS = 16  # of [prompt tokens, hidden or all heads] float32 in a prefill, measured on both CPU engines
MASKS = 3  # of [prompt tokens, prompt tokens] float32 where attention has a mask, measured on both
SMALL_BYTES = 64 << 20  # of all weights: these fit in parallel anywhere
SPARE = 2  # times what a bundle needs must be free: onnxruntime holds the weights of each graph twice while it packs
T = TypeVar("T")


def resident_bytes(dtype: str, shape: tuple[int, ...], scales: int = 0, floats: Floats = EXPANDED) -> int:
    """Bytes of a weight in memory: `dtype` is safetensors' name or I4; `scales` of a quantised one are counted.

    Quantised matrices stay as they are; `floats` holds the bytes of others.
    """
    count = math.prod(shape)
    if not scales:
        return floats[dtype] * count
    bits = STORED[dtype].bits or 8
    blocks = max(scales, -(-count // KERNEL_BLOCK)) if bits == 8 else scales
    return count * bits // 8 + SCALE_BYTES * blocks


def weights_in_memory(bundle: Bundle, floats: Floats = EXPANDED) -> int:
    """Bytes that all graphs of a bundle keep resident.

    The embedding table stays in its file unless it is the head, and so does the one of inputs to layers.
    """
    tensors: dict[str, TensorInfo] = {}
    m = bundle.manifest
    for name in m.files:
        if name.startswith("weights/"):
            tensors |= bundle.header(name).tensors
    tied = not any(name.endswith(HEAD) for name in tensors)
    total = 0
    for name, info in tensors.items():
        if name.endswith((SCALES, ZEROS, LAYER_TABLE)) or (name.endswith(TABLE) and not tied):
            continue  # scales and zero points are counted with their matrix
        scales = tensors.get(name + SCALES)
        if scales is None:
            total += resident_bytes("F32" if name.startswith(TOWER) else info.dtype, info.shape, floats=floats)
            continue
        stored = "I8" if info.dtype == "I8" else "I4"  # two to a byte of U8
        count = math.prod(info.shape) * (8 // (STORED[stored].bits or 8))
        total += resident_bytes(stored, (count,), math.prod(scales.shape), floats)
        total += tensors[name + ZEROS].nbytes if name + ZEROS in tensors else 0
        total += floats.get(stored, 0) * count if name.startswith(STAGES) else 0
    return total


class DecoderShape(Protocol):
    """The sizes of a decoder; `attending`: its layers with K and V."""

    @property
    def attending(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def sliding(self) -> object | None: ...
    @property
    def shared(self) -> int | None: ...
    @property
    def two_way(self) -> str | None: ...


def answering_memory(decoder: DecoderShape, engine: str, *, tokens: int, kv_bytes: int) -> int:
    """Bytes in addition to the weights while `engine` answers a prompt of that many tokens, which all layers see.

    They are K and V of `kv_bytes` a number, a prefill's buffers, and where an engine holds them the masks and scores of
    one layer's attention.
    """
    kv = 2 * decoder.attending * decoder.kv_heads * decoder.head_dim * kv_bytes * tokens
    widest = max(decoder.hidden, decoder.heads * decoder.head_dim)
    fused = ENGINES[engine].fused
    masks = 0 if decoder.sliding is None or fused else MASKS
    if decoder.shared is not None or decoder.two_way is not None:
        masks = MASKS if fused else MASKS * decoder.heads
    return RUN_BASE + kv + 4 * tokens * (masks * tokens + PREFILL_BUFFERS * widest)


def prompt_tokens(image_tokens: int, max_context: int) -> int:
    """The tokens of a question about an image of that many, as a prediction counts them."""
    return min(max_context, image_tokens + QUESTION_ROWS)


def tokenizer_memory(nbytes: int, vocab: int) -> int:
    """Bytes that a tokenizer of this vocabulary takes, whose tokenizer.json has `nbytes`."""
    return TOKEN_BYTES * vocab + TEXT_BYTES * nbytes


def needed_memory(bundle: Bundle, engine: str = "cpu", compute: str = "f32", image_tokens: int | None = None) -> int:
    """Bytes that a bundle takes on an engine while it answers about one image, of its largest unless told the size."""
    m = bundle.manifest
    tokenizer = tokenizer_memory(m.files[m.tokenizer].bytes, m.model.vocab)
    weights = weights_in_memory(bundle, floats_in_memory(engine, compute, cpu_flags()))
    largest = m.layout.max_tokens if image_tokens is None else image_tokens
    return tokenizer + weights + prompt_memory(bundle, engine, largest)


def prompt_memory(bundle: Bundle, engine: str, image_tokens: int) -> int:
    """Bytes of a question about an image of that many tokens, in addition to weights and tokenizer."""
    m = bundle.manifest
    tokens = prompt_tokens(image_tokens, m.max_context)
    return answering_memory(m.model, engine, tokens=tokens, kv_bytes=KV_DTYPES[m.kv_dtype].bytes)


def is_roomy(bundle: Bundle, engine: str, compute: str = "f32") -> bool:
    """True if a load may use memory to be quicker: it makes graphs in parallel, and keeps what onnxruntime freed."""
    weights = sum(file.bytes for name, file in bundle.manifest.files.items() if name.startswith("weights/"))
    if weights <= SMALL_BYTES:
        return True
    free = available_memory()
    return free is not None and free >= SPARE * needed_memory(bundle, engine, compute)


def load_each(loads: Sequence[Callable[[], T]], threads: int, sizes: Sequence[int]) -> list[T]:
    """The results of the calls, in their order; `threads` run at a time, the largest of `sizes` first.

    So the last of them is a short one, for which few threads wait, and what the largest takes beside its weights while
    it is packed is free again when the others come. The first error is raised once all calls that began have ended; the
    others do not begin.
    """
    order = sorted(range(len(loads)), key=lambda i: -sizes[i])
    if threads == 1 or len(loads) < 2:
        loaded = {i: loads[i]() for i in order}
        return [loaded[i] for i in range(len(loads))]
    with ThreadPoolExecutor(threads, "vtx-load") as pool:
        futures = {i: pool.submit(loads[i]) for i in order}
        try:
            return [futures[i].result() for i in range(len(loads))]
        finally:
            pool.shutdown(cancel_futures=True)
