"""Copies of tiny checkpoints with something in them changed, and checkpoints of four tensors for what opens them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.loader import INDEX, SINGLE

NUMBERS = {"F32": np.float32, "F16": np.float16}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", "num_hidden_layers": 2},
    "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1},
}
Q_PROJ = "language_model.model.layers.0.self_attn.q_proj.weight"
WEIGHTS: dict[str, np.ndarray[Any, Any]] = {
    Q_PROJ: np.ones((4, 4), np.float16),
    "language_model.lm_head.weight": np.ones((8, 4), np.float16),
    "vision_tower.vision_model.embeddings.position_ids": np.arange(3),
    "multi_modal_projector.linear_1.weight": np.ones((4, 2), np.float32),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def make(folder: Path, config: object = CONFIG, weights: dict[str, np.ndarray[Any, Any]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    safetensors.numpy.save_file(WEIGHTS if weights is None else weights, folder / SINGLE)
    return folder


def make_sharded(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    make(folder).joinpath(SINGLE).unlink()
    halves = [dict(list(WEIGHTS.items())[:2]), dict(list(WEIGHTS.items())[2:])]
    for shard, half in zip(SHARDS, halves, strict=True):
        safetensors.numpy.save_file(half, folder / shard)
    real = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    put_index(folder, {"weight_map": real | (weight_map or {})})
    return folder


def put_index(folder: Path, index: object) -> None:
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))


def make_cache(cache: Path, shared: bool = False) -> Path:
    """A hub cache as huggingface_hub lays it out: snapshots link to blobs, blobs maybe to the cache's common store."""
    source = make_sharded(cache / "source")
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "blobs", cache / "blobs" / "ab"):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        blob = repo / "blobs" / f"{number:040x}"
        if shared:
            blob.symlink_to(f"../../blobs/ab/{number:064x}")
        shutil.move(path, (cache / "blobs" / "ab" / f"{number:064x}") if shared else blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def alter(folder: Path, target: Path, name: str, value: float) -> Path:
    """A copy of a float32 checkpoint with one value of the tensor of that canonical name replaced."""
    copy = Path(shutil.copytree(folder, target))
    info = open_checkpoint(str(copy)).tensors[name]
    content = bytearray(info.file.read_bytes())
    kind = NUMBERS[info.dtype]
    values = np.frombuffer(content, kind, info.nbytes // np.dtype(kind).itemsize, info.offset)
    values[len(values) // 2] = value  # type: ignore[index]
    info.file.write_bytes(content)
    return copy
