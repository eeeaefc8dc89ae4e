"""Weights in files of `torch.save`: their tensors are located by the pickle's opcodes, and read from the file itself.

No pickle is unpickled and torch is not used. A file is opened once; its pickle's description of a tensor must agree
with the archive and with the file's size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from vtx.exporter.checkpoint.original.archive import ZIP, read_at, read_entries
from vtx.exporter.checkpoint.original.opcodes import PickledStorage, PickledTensor, read_value
from vtx.runtime.bundle.files import POINTER, Folder, Identity, check_fetched, reason
from vtx.runtime.bundle.safetensors import MAX_TENSORS, TensorInfo, nbytes_of, shown
from vtx.runtime.errors import CheckpointError

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
MAX_SHARDS = 1000
MAX_PICKLE = 16 * 2**20  # a 13B LLaVA's is 100 kB
MOST_SHARED = 4  # times a file's bytes: the limit for its tensors, some of which share their storage
_FIX = "use a checkpoint in safetensors"
# Files of torch before 1.6: pickles of this number, a version, a description, the tensors and their storages' keys, and
# then the storages, each after its number of values.
_OLD, _OLD_VERSION = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b".", 1001


def pickled_tensors(files: Folder, shards: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each of the files `shards`, by name. Raises CheckpointError."""
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{PICKLE_INDEX} names {len(shards):,} files, vtx reads at most {MAX_SHARDS:,}; {_FIX}")
    found = {}
    for shard in shards:
        with files.open(shard) as file:
            found[shard] = tensors_of(file, files.path / shard)
    return found


def tensors_of(file: BinaryIO, path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file that is open at its start and was opened at `path`. Raises `CheckpointError`."""
    status = os.fstat(file.fileno())
    try:
        head = file.read(len(POINTER))
        check_fetched(head, path.name, CheckpointError)
        table, offsets = (_of_archive if head.startswith(ZIP) else _of_stream)(file, status.st_size)
        return _located(table, offsets, path, status)
    except ValueError as cause:
        # pickletools' messages on arguments of opcodes are long, and not all text
        problem = " ".join(str(cause).split())[:200]
        raise CheckpointError(f"{path.name} {problem if problem.isprintable() else 'is damaged'}; {_FIX}") from cause
    except OSError as cause:
        raise CheckpointError(f"{path.name} cannot be read ({reason(cause)}); check the disk") from cause


def _located(
    table: Any, offsets: dict[PickledStorage, int], path: Path, status: os.stat_result
) -> dict[str, TensorInfo]:
    if not isinstance(table, dict) or len(table) > MAX_TENSORS:
        raise ValueError(f"is not a table of at most {MAX_TENSORS:,} tensors by name")
    other = [name for name, value in table.items() if not isinstance(value, PickledTensor)]
    if other:
        raise ValueError(f"holds {shown(other[0])}, which is not a tensor")
    found = {}
    for name, tensor in table.items():
        dtype = tensor.storage.dtype
        offset, nbytes = offsets[tensor.storage] + nbytes_of(dtype, [tensor.first]), nbytes_of(dtype, tensor.shape)
        found[name] = TensorInfo(name, dtype, tensor.shape, path, offset, nbytes, Identity.of(status))
    total = sum(info.nbytes for info in found.values())
    if total > MOST_SHARED * status.st_size:
        raise ValueError(
            f"has {status.st_size:,} bytes and tensors of {total:,}, more than {MOST_SHARED} times as many"
        )
    return found


def _storages(table: Any) -> list[PickledStorage]:
    tensors = table.values() if isinstance(table, dict) else ()
    return [*dict.fromkeys(tensor.storage for tensor in tensors if isinstance(tensor, PickledTensor))]


def _of_archive(file: BinaryIO, size: int) -> tuple[Any, dict[PickledStorage, int]]:
    """The pickled table of an archive, and the offset of each storage."""
    entries = read_entries(file, size)
    roots = {name.partition("/")[0] for name in entries}
    root = roots.pop() if len(roots) == 1 else ""
    pickle, order = entries.get(f"{root}/data.pkl"), entries.get(f"{root}/byteorder")
    if pickle is None:
        raise ValueError("is an archive without one data.pkl, not one of torch.save")
    if order is not None and (order.size > 6 or read_at(file, order.start, order.size) != b"little"):
        raise ValueError("was written by a machine that stores the highest byte first")
    if pickle.size > MAX_PICKLE:
        raise ValueError(f"holds a pickle of {pickle.size:,} bytes, the limit is {MAX_PICKLE:,}")
    stream = BytesIO(read_at(file, pickle.start, pickle.size))
    table = read_value(stream)
    offsets: dict[PickledStorage, int] = {}
    if stream.tell() != pickle.size:
        raise ValueError("holds bytes after the end of its pickle")
    for storage in _storages(table):
        entry = entries.get(f"{root}/data/{storage.key}")
        if entry is None or entry.size != nbytes_of(storage.dtype, [storage.count]):
            raise ValueError(
                f"has a storage {shown(storage.key)} of {storage.count:,} {storage.dtype} in its pickle, and "
                f"{'none' if entry is None else f'{entry.size:,} bytes'} in its archive"
            )
        offsets[storage] = entry.start
    return table, offsets


def _of_stream(file: BinaryIO, size: int) -> tuple[Any, dict[PickledStorage, int]]:
    """`_of_archive` for a file of torch before 1.6; its storages must end at the end of the file."""
    begin = read_at(file, 0, min(size, MAX_PICKLE))
    if not begin.startswith(_OLD):
        raise ValueError("is not a file of torch.save, or is damaged")
    stream = BytesIO(begin)
    _, version, machine, table, keys = (read_value(stream) for _ in range(5))
    if version != _OLD_VERSION or not isinstance(keys, list):
        raise ValueError("is not a file of torch.save, or is damaged")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise ValueError("was written by a machine that stores the highest byte first")
    storages = {storage.key: storage for storage in _storages(table)}
    listed = {key for key in keys if isinstance(key, str)}
    if not len(keys) == len(listed) == len(_storages(table)) or listed != set(storages):
        raise ValueError("holds other storages than its tensors need")
    offsets, at = dict[PickledStorage, int](), stream.tell()
    for key in keys:
        storage = storages[key]
        if read_at(file, at, 8) != storage.count.to_bytes(8, "little"):
            raise ValueError(f"has another size of storage {shown(key)} in its pickle")
        offsets[storage] = at + 8
        at += 8 + nbytes_of(storage.dtype, [storage.count])
    if at != size:
        raise ValueError(f"holds {size:,} bytes, its storages end at {at:,}")
    return table, offsets
