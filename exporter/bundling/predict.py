"""Disk and memory of an export, predicted before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

from vtx.exporter.bundling.options import QUESTION_TOKENS, ExportOptions
from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.weights.plan import WeightPlan
from vtx.exporter.weights.scaling import TOKENS, TRIED
from vtx.exporter.weights.writing import COMPUTED, THREADS
from vtx.runtime.backends.engines import ENGINES, floats_in_memory
from vtx.runtime.backends.memory import RUN_BASE, answering_memory, prompt_tokens, resident_bytes
from vtx.runtime.bundle.spec.stored import EMBEDDING, HEAD, Precisions
from vtx.runtime.errors import ExportError
from vtx.runtime.host.machine import cpu_flags
from vtx.runtime.precision import KV_DTYPES, PRECISIONS
from vtx.runtime.report.golden import DECODED_TOKENS, FEATURE_TOKENS, golden_image
from vtx.runtime.units import size
from vtx.tools.model.decoder import PER_LAYER
from vtx.tools.model.towers.joined.convnext import STEM

EXPORT_BASE = 385 << 20  # bytes: Python, PyTorch, transformers and onnx_ir, before any weight is touched
GPU_LIBRARIES = 325 << 20  # bytes more of a PyTorch that is built for GPUs, whether or not there is one
LAYER_GRAPH = 12_000  # bytes of a layer, the decoder's or the tower's, in a dialect's graphs: 10 to 11 thousand
OTHER_FILES = 64_000  # bytes: the manifest, the configuration, headers, graphs without layers
MATRIX_BYTES = 4 + 2 + 4  # of each number of a matrix that the reference multiplies: stored, as float32, and packed
FED_BACK = 2 + 4 * 4 + 1  # of each weight rounded with feedback: stored, as float32, scaled, its loss, its magnitude
PASSAGE_TOKENS = 256  # of the prompt that the scales of int8 K and V are measured on, without the image


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes. `linked` is the part of `disk` that is shared with the checkpoint by hard links if possible.

    `scratch` is taken on the disk too until the export ends. `engine`: the one that `run_memory` is for, a device on
    the CPU. Tokenizers are not counted.
    """

    disk: int
    linked: int
    export_memory: int
    run_memory: int
    kv_full: int
    work: int
    engine: str
    scratch: int


def small_files(config: ModelConfig, max_context: int, ks: int, layers: int, texts: int) -> int:
    """Bytes of the files other than weights: graphs, tables of rope, golden vectors, and `texts` bytes of tokenizer,
    template, gates and constants of graphs. `layers` are the layers of the decoder and the towers, counted once for
    each dialect.
    """
    text = config.text
    vision = config.vision
    pixels = vision.image**2
    if vision.native or vision.naflex:  # the golden picture keeps its size, whatever the largest is
        pixels = config.layout.count(*golden_image().size) * (vision.patch * vision.shuffle) ** 2
    golden = 3 * pixels + FEATURE_TOKENS * text.hidden + (1 + ks) * text.vocab
    return texts + LAYER_GRAPH * layers + 4 * max_context * text.head_dim + 4 * golden + OTHER_FILES


def predict(
    config: ModelConfig,
    plan: WeightPlan,
    max_context: int,
    precisions: Precisions,
    small: int,
    options: ExportOptions,
) -> Prediction:
    """Disk and memory of an export, and of a run by the engine that a CPU takes; `small`: bytes of other files."""
    text = config.text
    kv_dtype = precisions.kv_dtype
    measured = options.measured_tokens(config)
    engine = engine_on_cpu(precisions.decoder, text.hidden, options)
    floats = floats_in_memory(engine, "f32", cpu_flags())
    engine_base = max(cost.base for cost in ENGINES[engine].costs.values())
    slot = 2 * text.kv_heads * text.head_dim * KV_DTYPES[kv_dtype].bytes
    prompt = prompt_tokens(config.layout.max_tokens, max_context)
    answering = answering_memory(text, engine, tokens=prompt, kv_bytes=KV_DTYPES[kv_dtype].bytes)
    resident = _resident(plan, floats)
    # Weights are written in chunks, which takes less than the base. While the reference computes: a layer's largest
    # matrix, and its hidden states.
    golden = config.layout.count(*golden_image().size)
    tokens = golden + PASSAGE_TOKENS if KV_DTYPES[kv_dtype].scaled else DECODED_TOKENS + QUESTION_TOKENS
    ffn = max(text.mlp_values, *(text.ffn_of(layer) for layer in text.every))
    checking = MATRIX_BYTES * _largest_read(text) + 4 * 4 * tokens * ffn
    measuring = measuring_memory(text, measured, precisions.decoder) if measured else 0
    return Prediction(
        disk=sum(file.size for file in plan.files) + small,
        linked=sum(file.size for file in plan.files if file.whole),
        export_memory=export_base() + max(checking, seeing_memory(config), measuring),
        run_memory=resident + answering + engine_base - RUN_BASE,
        kv_full=slot * text.attending,
        work=sum(file.work for file in plan.files),
        engine=engine,
        scratch=2 * _inputs(text, measured) if measured and PRECISIONS[precisions.decoder].bits == 4 else 0,
    )


def _resident(plan: WeightPlan, floats: Mapping[str, int]) -> int:
    """Bytes of the weights in memory, `floats` as an engine holds them.

    A table that is not the head stays in its file, read a row at a time, and so does the one of inputs to layers.
    """
    total = 0
    for name, tensor in plan.stored.items():
        if name == PER_LAYER or (name == EMBEDDING and HEAD in plan.stored):
            continue
        scales = prod(tensor.scales.shape) if tensor.scales else 0
        total += resident_bytes(tensor.dtype, tensor.shape, scales, floats)
        if tensor.zeros:
            total += tensor.zeros.nbytes
    return total


def _largest_read(text: TextConfig) -> int:
    """Numbers of the largest weight of a layer that the reference reads at a time: of experts, of one of them."""
    tensors = (tensor for layer in text.every for tensor in text.layer_tensors(layer))
    mixture = text.mixture
    return max(prod(shape if mixture is None else mixture.part(name, shape, 1)) for name, shape in tensors)


def measuring_memory(text: TextConfig, measured: Sequence[int], precision: str) -> int:
    """Memory in addition to the base while activations of prompts of `measured` tokens decide the rounding: bytes.

    They are hidden states and sampled inputs, with a layer as float32 and its largest matrix as stored, or then the
    search; in int4 later the feedback of the widest matrix: its factor, and the inputs that it is made of or the rows
    that are rounded.
    """
    largest = max(sum(prod(shape) for _, shape in text.layer_tensors(layer + 1)) for layer in range(text.layers))
    ffn = max(text.ffn_of(layer + 1) for layer in range(text.layers))
    widest = max(ffn, text.heads * text.head_dim, text.hidden)
    inputs = _inputs(text, measured) // text.layers
    passing = 4 * largest + 2 * text.hidden * widest + 4 * max(measured) * (4 * ffn + 4 * text.hidden)
    searching = 4 * widest * (6 * TRIED + 2 * TOKENS) + 2 * inputs
    measuring = max(passing, searching) + 4 * inputs + 4 * 2 * sum(measured) * text.hidden
    if PRECISIONS[precision].bits != 4:
        return measuring
    rows = min(COMPUTED, _largest_read(text))
    twice = 4 * 2 * min(TOKENS, sum(measured)) * widest
    return max(measuring, 4 * widest**2 + max(twice, THREADS * FED_BACK * rows))


def _inputs(text: TextConfig, measured: Sequence[int]) -> int:
    """The numbers of the sampled inputs of all layers, of prompts of `measured` tokens."""
    ffn = max(text.ffn_of(layer + 1) for layer in range(text.layers))
    return min(TOKENS, sum(measured)) * text.layers * (2 * text.hidden + text.heads * text.head_dim + ffn)


def engine_on_cpu(precision: str, hidden: int, options: ExportOptions) -> str:
    """The engine that `auto` takes for such a decoder on the CPU of this machine."""
    openvino = ENGINES["openvino"]
    there = openvino.dialect in options.dialects and find_spec(openvino.modules[0]) is not None
    return "openvino" if there and hidden >= PRECISIONS[precision].openvino_hidden else "cpu"


def seeing_memory(config: ModelConfig) -> int:
    """Memory in addition to the base while the reference's tower sees the golden picture: bytes.

    They are the tower's largest matrix, its tables of positions, and the hidden states of a block; of a convolutional
    tower the maps of the first stage's channels.
    """
    v = config.vision
    picture = golden_image().size
    matrices = [0]
    tables = 0
    for name, shape in vision_tensors(config):
        if "pos_embed" in name or "position_embedding" in name:
            tables += prod(shape)
        else:
            matrices.append(prod(shape))
    free_size = v.native or v.naflex
    patches = config.layout.count(*picture) * v.square**2 if free_size else config.layout.passes(*picture) * v.grid**2
    states = patches * 4 * (v.ffn + v.hidden)
    if v.towers:  # Pix2Struct's and SAM's states, or the maps of ConvNeXt's first stage
        places = [tower.grid**2 * 4 * (tower.ffn + tower.hidden) for tower in v.towers if not tower.stage_blocks]
        places += [(tower.image // STEM) ** 2 * tower.stage_widths[0] * 10 for tower in v.towers if tower.stage_blocks]
        states = max(places)
    if v.stage_blocks:
        states = 3 * v.stage_widths[0] * (v.image // 2) ** 2
    return MATRIX_BYTES * max(matrices) + 4 * tables + 4 * states


def export_base() -> int:
    """Memory of a process that exports before any weight is touched, with the PyTorch that is installed."""
    import torch

    return EXPORT_BASE + (GPU_LIBRARIES if torch.version.cuda or torch.version.hip else 0)


def check_memory(prediction: Prediction, limit: int | None) -> None:
    if limit is not None and prediction.export_memory > limit:
        raise ExportError(
            f"the export needs about {size(prediction.export_memory)} of memory, --max-memory allows {size(limit)}; "
            "raise it, or export on another machine"
        )


def check_disk(folder: Path, needed: int, *, purpose: str, fix: str) -> None:
    """Raise ExportError, which names the `purpose` and the `fix`, when `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"{purpose} needs {size(needed)} of disk, {folder} has {size(free)} free; free some space, {fix}"
        )
