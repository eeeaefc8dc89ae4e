"""Weights as float32, some rows at a time: a checkpoint's, or a bundle's dequantised ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.weights.quantize import Scheme, dequantise
from vtx.exporter.weights.stored import StoredTensor
from vtx.runtime.bundle.safetensors import TensorInfo, open_tensor

CHUNK = 1 << 22  # elements widened at a time
EVERY = slice(None)
Rows = slice | NDArray[np.int64]


class WeightSource(Protocol):
    """The weights of a model, by canonical name."""

    def rows(self, name: str) -> int:
        """The number of rows of a weight."""
        ...

    def read(self, name: str, rows: Rows = EVERY) -> Tensor:
        """Some rows of a weight as float32, in memory of their own."""
        ...


class CheckpointWeights:
    """`WeightSource` as a checkpoint holds them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors

    def rows(self, name: str) -> int:
        return self._tensors[name].shape[0]

    def read(self, name: str, rows: Rows = EVERY) -> Tensor:
        info = self._tensors[name]
        return _widened(open_tensor(info)[rows], info.dtype)


class BundleWeights:
    """`WeightSource` as a bundle under construction stores them: rounded, and dequantised where they are quantised."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._folder, self._stored = folder, stored

    def rows(self, name: str) -> int:
        return self._stored[name].shape[0]

    def read(self, name: str, rows: Rows = EVERY) -> Tensor:
        where = self._stored[name]
        if where.scales is None:
            return _widened(self._open(where, where.dtype, where.shape)[rows], where.dtype)
        count, width = where.shape
        scheme = Scheme(4 if where.dtype == "I4" else 8, width // where.scales.shape[1])
        dtype = "U8" if where.dtype == "I4" else "I8"
        integers = self._open(where, dtype, (count, scheme.nbytes(width)))[rows]
        scales = self._open(where.scales, "F16", where.scales.shape)[rows]
        out = np.empty((len(integers), width), np.float32)
        step = max(1, CHUNK // width)
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            out[part] = dequantise(integers[part], scales[part], scheme)
        return torch.from_numpy(out)

    def _open(self, where: StoredTensor, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return open_tensor(TensorInfo("", dtype, shape, self._folder / where.file, where.offset, where.nbytes))


def _widened(stored: NDArray[Any], dtype: str) -> Tensor:
    out = torch.empty(stored.shape, dtype=torch.float32)
    step = max(1, CHUNK // max(1, int(np.prod(stored.shape[1:]))))
    for start in range(0, len(stored), step):
        part = torch.from_numpy(stored[start : start + step].copy())
        out[start : start + step] = part.view(torch.bfloat16) if dtype == "BF16" else part
    return out
