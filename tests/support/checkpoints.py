"""Copies of tiny checkpoints with something in them changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from vtx.exporter.checkpoint.assembly import open_checkpoint

NUMBERS = {"F32": np.float32, "F16": np.float16}


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
