"""Weights on their way from a checkpoint's files into a bundle's, one tensor at a time.

A source file whose tensors already have the wanted type is linked or copied whole; any other is rewritten
in blocks. Where each tensor will lie is known before a byte is read, so graphs can be built first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.exporter.graphs.builder import StoredTensor
from vtx.exporter.hf.checkpoint import Checkpoint, check_finite
from vtx.runtime.errors import ExportError
from vtx.runtime.safetensors import TensorInfo, layout, open_tensor, widen_bf16

BLOCK = 1 << 22  # elements converted at a time
STORED = {"fp32": "F32", "fp16": "F16"}
NUMPY: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file to be: `tensors` in order, from `source`. `header` is None where the source is taken whole."""

    name: str
    source: Path
    tensors: tuple[tuple[str, TensorInfo], ...]  # canonical name, place in the source
    header: bytes | None
    dtype: str
    size: int

    @property
    def whole(self) -> bool:
        return self.header is None

    @property
    def work(self) -> int:
        """Source bytes that writing this file reads, for progress."""
        return sum(info.nbytes for _, info in self.tensors)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All files, and where each tensor will lie in them, by canonical name."""

    files: tuple[WeightFile, ...]
    stored: Mapping[str, StoredTensor]

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(t.shape)) for t in self.stored.values())


def plan_weights(checkpoint: Checkpoint, needed: Iterable[tuple[str, tuple[int, ...]]], precision: str) -> WeightPlan:
    """Check that every needed tensor is there in its shape, and settle where it will lie.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the configuration promises.

    """
    by_source: dict[Path, list[tuple[str, TensorInfo]]] = {}
    for name, shape in needed:
        info = checkpoint.require(name, shape)
        by_source.setdefault(info.file, []).append((name, info))
    dtype, files, stored = STORED[precision], [], dict[str, StoredTensor]()
    for number, (source, tensors) in enumerate(sorted(by_source.items()), 1):
        file = f"weights/{number:05d}-of-{len(by_source):05d}.safetensors"
        if all(info.dtype == dtype for _, info in tensors):
            places, header, size = [info for _, info in tensors], None, source.stat().st_size
        else:
            header, places = layout(Path(file), [(name, dtype, info.shape) for name, info in tensors])
            size = places[-1].offset + places[-1].nbytes
        files.append(WeightFile(file, source, tuple(tensors), header, dtype, size))
        for (name, info), place in zip(tensors, places, strict=True):
            stored[name] = StoredTensor(file, place.offset, place.nbytes, dtype, info.shape)
    return WeightPlan(tuple(files), stored)


def write_weights(plan: WeightPlan, folder: Path, report: Report) -> None:
    """Write all weight files under `folder`; `report` gets the source bytes of each finished block.

    Raises:
        CheckpointError: a weight is NaN or infinite.
        ExportError: the disk is full, or a value does not fit the precision.

    """
    (folder / "weights").mkdir()
    for file in plan.files:
        try:
            if file.whole:
                _take_whole(file, folder / file.name, report)
            else:
                _rewrite(file, folder / file.name, report)
        except OSError as e:
            raise ExportError(f"cannot write {folder / file.name} ({e.strerror}); free some space and try again") from e


def _take_whole(file: WeightFile, target: Path, report: Report) -> None:
    for name, info in file.tensors:
        for block in _blocks(info):
            check_finite(block, name)
            report(block.nbytes)
    source = file.source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _rewrite(file: WeightFile, target: Path, report: Report) -> None:
    with target.open("wb") as out:
        out.write(file.header or b"")
        for name, info in file.tensors:
            for block in _blocks(info):
                check_finite(block, name)
                out.write(_converted(block, info.dtype, file.dtype, name).tobytes())
                report(block.nbytes)
            with contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _blocks(info: TensorInfo) -> Iterable[NDArray[Any]]:
    """The stored bits of a tensor, flat, a bounded number at a time."""
    flat = open_tensor(info).reshape(-1)
    for start in range(0, len(flat), BLOCK):
        yield flat[start : start + BLOCK]


def _converted(block: NDArray[Any], source: str, target: str, name: str) -> NDArray[Any]:
    values = widen_bf16(block) if source == "BF16" else block
    with np.errstate(over="ignore"):
        out: NDArray[Any] = values.astype(NUMPY[target], copy=False)
    if target == "F16" and not np.isfinite(out).all():
        largest = float(np.abs(values.astype(np.float32)).max())
        raise ExportError(f"tensor {name} holds {largest:g}, fp16 ends at 65504; export with --precision fp32")
    return out
