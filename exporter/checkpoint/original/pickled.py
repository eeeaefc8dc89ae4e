"""Weights in pickled files: found out in a confined process, and then read from where they lie.

The child opens each file with `torch.load(weights_only=True, mmap=True)`, which builds tensors and calls nothing that
the file names, and reports which tensors there are and at which byte of the file each begins. What it reports is
checked here, and the bytes are read from the file as those of safetensors are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vtx.runtime.bundle.files import POINTER, Folder, Identity, check_fetched
from vtx.runtime.bundle.safetensors import DTYPES, MAX_DIMS, TensorInfo, shown
from vtx.runtime.errors import CheckpointError
from vtx.runtime.host.confined import ChildLimits, confine

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
MAX_SHARDS = 1000
# Beside the mapped file: torch's own address space, and the pickle's objects.
LIMITS = ChildLimits(memory=12 << 30, cpu_seconds=300, wall_seconds=1800, file=64 << 20)
_CURE = "take a checkpoint in safetensors"


def pickled_tensors(files: Folder, shards: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each of the files `shards`, by name.

    Raises:
        CheckpointError: a file is missing or damaged, holds something else than tensors, or goes beyond a limit.

    """
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{PICKLE_INDEX} names {len(shards):,} files, vtx reads at most {MAX_SHARDS:,}; {_CURE}")
    identities = {}
    for shard in shards:
        with files.open(shard) as file:
            identities[shard] = Identity.of(os.fstat(file.fileno()))
            check_fetched(file.read(len(POINTER)), shard, CheckpointError)
    largest = max(identity.size for identity in identities.values())
    found = confine(
        "vtx.exporter.checkpoint.original.pickled_child:tensors_of",
        [str(files.path / shard) for shard in shards],
        subject=f"the pickled weights of {files.path.name}",
        limits=replace(LIMITS, memory=LIMITS.memory + largest),
        libraries=("torch",),
        reads=[files.path / shard for shard in shards],
        cure=_CURE,
    )
    return {
        shard: {name: _checked(name, entry, files, shard, identities[shard]) for name, entry in tensors.items()}
        for shard, tensors in zip(shards, found, strict=True)
    }


def _checked(name: str, entry: Mapping[str, Any], files: Folder, shard: str, identity: Identity) -> TensorInfo:
    """What the child says of a tensor, held against the file."""
    dtype, shape, offset = entry["dtype"], entry["shape"], entry["offset"]
    sizes = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
    if dtype not in DTYPES or not sizes or type(offset) is not int:
        raise CheckpointError(f"tensor {shown(name)} in {shard} is not one that vtx reads; {_CURE}")
    nbytes = DTYPES[dtype][0] // 8
    for n in shape:
        nbytes *= n
    if not 0 <= offset <= offset + nbytes <= identity.size:
        raise CheckpointError(f"tensor {shown(name)} lies outside of {shard}; {_CURE}")
    return TensorInfo(name, dtype, tuple(shape), files.path / shard, offset, nbytes, identity)
