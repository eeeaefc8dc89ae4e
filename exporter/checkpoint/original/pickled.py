"""Weights in files of `torch.save`: PyTorch's restricted unpickler locates the tensors, in a confined child.

The child's result is only names, shapes and offsets; the numbers are read from the file itself, as from safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from vtx.runtime.bundle.files import POINTER, Folder, Identity, check_fetched, reason
from vtx.runtime.bundle.safetensors import MAX_TENSORS, TensorInfo, nbytes_of
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine
from vtx.runtime.installing import pip_install

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
MAX_SHARDS = 1000
LIMITS = ChildLimits(memory=16 << 30)  # a build of PyTorch for GPUs maps several GB of address space
OLDEST = (2, 11)  # up to 2.9 the restricted unpickler has known holes, up to 2.10 it gives no offsets
_ZIP = b"PK\x03\x04"
_FIX = "use a checkpoint in safetensors"


def pickled_tensors(files: Folder, shards: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each of the files `shards`, by name. Raises CheckpointError."""
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{PICKLE_INDEX} names {len(shards):,} files, vtx reads at most {MAX_SHARDS:,}; {_FIX}")
    check_torch(version("torch"))
    tables = {}
    for shard in shards:
        with files.open(shard) as file:
            tables[shard] = tensors_of(file, files.path / shard)
    return tables


def check_torch(installed: str) -> None:
    """Raise CheckpointError if this version of PyTorch cannot be trusted with a stranger's pickle."""
    if tuple(int(number) for number in installed.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise CheckpointError(
            f"PyTorch is {installed}, pickled weights need {oldest} or newer: {pip_install()} -U torch, or {_FIX}"
        )


def tensors_of(file: BinaryIO, path: Path) -> dict[str, TensorInfo]:
    """The tensors in `file`, positioned at its start; `path` is for messages. Raises CheckpointError."""
    try:
        status = os.fstat(file.fileno())
        head = file.read(len(POINTER))
        file.seek(0)
    except OSError as cause:
        raise CheckpointError(f"{path.name} cannot be read ({reason(cause)}); check the disk") from cause
    check_fetched(head, path.name, CheckpointError)
    if not head.startswith(_ZIP):
        raise CheckpointError(f"{path.name} is not a file of torch.save (since PyTorch 1.6), or is damaged; {_FIX}")
    rows = confine(
        ChildTask("vtx.exporter.checkpoint.original.saved_child:tensors", path.name, LIMITS, ("torch",)),
        Subject(path.name, cure=f"it is damaged or holds more than tensors; {_FIX}"),
        data=file,
    )
    return located(rows, path, status)


def located(rows: Sequence[Sequence[Any]], path: Path, status: os.stat_result) -> dict[str, TensorInfo]:
    """The tensors by name, from the child's rows. Raises CheckpointError if one does not lie inside the file."""
    if len(rows) > MAX_TENSORS:
        raise CheckpointError(f"{path.name} holds {len(rows):,} tensors, the limit is {MAX_TENSORS:,}; {_FIX}")
    tensors = {}
    for name, dtype, shape, offset in rows:
        nbytes = nbytes_of(dtype, shape)
        if not 0 <= offset <= status.st_size - nbytes:
            raise CheckpointError(f"tensor {name!r} of {path.name} does not lie inside the file; {_FIX}")
        tensors[name] = TensorInfo(name, dtype, tuple(shape), path, offset, nbytes, Identity.of(status))
    return tensors
