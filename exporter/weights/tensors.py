"""Weights as float32, some rows at a time: a checkpoint's, or a bundle's, dequantised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.weights.plan import StoredTensor
from vtx.exporter.weights.quantize import Floats, dequantise
from vtx.runtime.bundle.safetensors import EVERY, RowIndex, TensorInfo, read_bits, widen_bf16
from vtx.runtime.bundle.spec.stored import Scheme

CHUNK = 1 << 22  # elements widened at a time


class WeightSource(Protocol):
    """The weights of a model, by canonical name."""

    def holds(self, name: str) -> bool: ...

    def rows(self, name: str) -> int: ...

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor: ...


class CheckpointWeights:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._checkpoint = checkpoint

    def holds(self, name: str) -> bool:
        return name in self._tensors

    def rows(self, name: str) -> int:
        return self._tensors[name].shape[0]

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor:
        weight = _widened(self._tensors[name], rows)
        factor = self._checkpoint.factor(name)
        shift = self._checkpoint.shift(name)
        weight = weight if factor == 1 else weight.mul_(factor)
        return weight if not shift else weight.add_(shift)


class BundleWeights:
    """`WeightSource` of a bundle under construction: rounded, and dequantised if quantised."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._folder = folder
        self._stored = stored

    def holds(self, name: str) -> bool:
        return name in self._stored

    def rows(self, name: str) -> int:
        return self._stored[name].shape[0]

    def read(self, name: str, rows: RowIndex = EVERY) -> Tensor:
        stored = self._stored[name]
        if stored.scales is None:
            return _widened(self._info(stored, stored.dtype, stored.shape), rows)
        count, width = stored.shape
        scheme = Scheme(stored.dtype, width // stored.scales.shape[1])
        integers_at = self._info(stored, scheme.held, (count, scheme.nbytes(width)))
        scales_at = self._info(stored.scales, stored.scales.dtype, stored.scales.shape)
        zeros_at = self._info(stored.zeros, stored.zeros.dtype, stored.zeros.shape) if stored.zeros else None

        def values(part: RowIndex) -> Floats:
            zeros = read_bits(zeros_at, part) if zeros_at else None
            return dequantise(read_bits(integers_at, part), read_bits(scales_at, part), zeros, scheme)

        wanted = _parts(rows, count, max(1, CHUNK // width))
        return _stacked(map(values, wanted), (_count(rows, count), width))

    def _info(self, stored: StoredTensor, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo("", dtype, shape, self._folder / stored.file, stored.offset, stored.nbytes)


def _widened(info: TensorInfo, rows: RowIndex) -> Tensor:
    if not info.shape:  # one number
        return _widened(replace(info, shape=(1,)), rows).reshape(())
    step = max(1, CHUNK // max(1, prod(info.shape[1:])))
    bits = (read_bits(info, part) for part in _parts(rows, info.shape[0], step))
    parts = (widen_bf16(part) for part in bits) if info.dtype == "BF16" else bits
    return _stacked(parts, (_count(rows, info.shape[0]), *info.shape[1:]))


def _parts(rows: RowIndex, count: int, step: int) -> Iterator[RowIndex]:
    if isinstance(rows, slice):
        first, last, _ = rows.indices(count)
        yield from (slice(start, min(start + step, last)) for start in range(first, last, step))
    else:
        yield from (rows[start : start + step] for start in range(0, len(rows), step))


def _count(rows: RowIndex, count: int) -> int:
    return len(range(count)[rows]) if isinstance(rows, slice) else len(rows)


def _stacked(parts: Iterable[NDArray[Any]], shape: tuple[int, ...]) -> Tensor:
    """Rows of any number type, one part after the other, as float32 of `shape`."""
    out = np.empty(shape, np.float32)
    at = 0
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return torch.from_numpy(out)
