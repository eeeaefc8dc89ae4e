"""What is done in the confined process with pickled weights: which tensors there are, and where their bytes lie."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from vtx.runtime.bundle.files import open_named
from vtx.runtime.bundle.safetensors import MAX_TENSORS, shown
from vtx.runtime.errors import CheckpointError

_LOCAL_HEADER = 30  # bytes of a zip entry's own header, before its name
_LENGTHS = 26  # where in it the lengths of name and extra field stand
_SAMPLE = 64  # bytes of each tensor that are compared with the file
_DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def tensors_of(paths: list[str]) -> list[dict[str, dict[str, Any]]]:
    """For each file its tensors by name: `dtype` as safetensors has it, `shape`, and `offset` in the file.

    Raises:
        CheckpointError: a file that is no zip archive of tensors.

    """
    return [_tensors(Path(path)) for path in paths]


def _tensors(path: Path) -> dict[str, dict[str, Any]]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as cause:
        raise CheckpointError(
            f"{path.name} holds more than tensors, and what more there is was not run "
            f"({' '.join(str(cause).split())[:200]}); take a checkpoint in safetensors"
        ) from cause
    except RuntimeError as cause:
        raise CheckpointError(
            f"{path.name} is damaged, or was written by a torch older than 1.6 "
            f"({' '.join(str(cause).split())[:200]}); take a checkpoint in safetensors"
        ) from cause
    if not isinstance(state, dict) or len(state) > MAX_TENSORS or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path.name} is not a table of tensors by name; take a checkpoint in safetensors")
    for name, tensor in state.items():
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or not tensor.is_contiguous() or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
            raise CheckpointError(
                f"{path.name}: {shown(name)} is not a plain tensor, row after row; take a checkpoint in safetensors"
            )
    return _placed(path, state)


def _placed(path: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Where each tensor lies: the mapping of the file begins so many bytes before the storages in memory."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values() if t.numel()}
    entries = _stored_entries(path)
    first = min(storages, default=0)
    starts = (first - offset for offset in entries)
    fits = (s for s in starts if all(entries.get(p - s, -1) >= size for p, size in storages.items()))
    start = next(fits, None)
    if storages and start is None:
        raise CheckpointError(f"{path.name} holds tensors that are not stored as they are; save it with torch.save")
    found = {}
    with open_named(path, error=CheckpointError) as file:
        for name, tensor in state.items():
            offset = tensor.data_ptr() - start if tensor.numel() and start is not None else 0
            file.seek(offset)
            read = file.read(min(_SAMPLE, tensor.nbytes))
            if tensor.numel() and read != _first_bytes(tensor):
                raise CheckpointError(f"{path.name}: {shown(name)} is not where its archive says; download it again")
            dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
            found[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset}
    return found


def _first_bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.reshape(-1)[:_SAMPLE].view(torch.uint8)[:_SAMPLE].tolist())


def _stored_entries(path: Path) -> dict[int, int]:
    """The uncompressed entries of the archive: their size, by the byte at which they begin."""
    found = {}
    with open_named(path, error=CheckpointError) as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                continue
            file.seek(entry.header_offset + _LENGTHS)
            name, extra = struct.unpack("<HH", file.read(4))
            found[entry.header_offset + _LOCAL_HEADER + name + extra] = entry.file_size
    return found
