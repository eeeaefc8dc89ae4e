"""The places of the tensors in a file of `torch.save`, by PyTorch's restricted unpickler; runs in a confined child.

No tensor is read: `torch.load` to the device `meta` gives each storage's offset in the file.
"""

from __future__ import annotations

import struct
import sys
import warnings
import zipfile
from typing import Any, BinaryIO

import torch

from vtx.runtime.errors import CheckpointError

MAX_PICKLE = 16 * 2**20  # bytes; a 13B LLaVA's is 100 kB
_HEADER = 30  # bytes of a file's local header, before its name
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


def tensors(name: str) -> list[list[Any]]:
    """`table` of the file on stdin, which messages call `name`."""
    return table(sys.stdin.buffer, name)


def table(file: BinaryIO, name: str) -> list[list[Any]]:
    """Name, dtype, shape and offset of each tensor of the table in `file`. Raises CheckpointError."""
    try:
        return _table(file)
    except ValueError as cause:
        problem = f"is not a plain table of tensors ({' '.join(str(cause).split())[:200]})"
        raise CheckpointError(f"{name} {problem}; use a checkpoint in safetensors") from cause
    except MemoryError:
        raise
    except Exception as cause:  # torch's message advises to load the file without restrictions
        problem = f"is damaged, or holds more than tensors, none of which was run ({type(cause).__name__})"
        raise CheckpointError(f"{name} {problem}; use a checkpoint in safetensors") from cause


def _table(file: BinaryIO) -> list[list[Any]]:
    entries = _entries(file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other versions of pickle
        values = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}")  # noqa: TRY004  the file's fault
    rows = [_row(name, tensor) for name, tensor in values.items()]
    storages = {tensor.untyped_storage()._checkpoint_offset: tensor.untyped_storage() for tensor in values.values()}
    sizes = {offset: storage.nbytes() for offset, storage in storages.items()}
    if sizes != {_start(file, entry): entry.file_size for entry in entries if "/data/" in entry.filename}:
        raise ValueError("the storages of its tensors are not those in the archive")
    return rows


def _entries(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """The entries of torch's archive in `file`. Raises ValueError."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        orders = [archive.read(entry) for entry in entries if entry.filename.endswith("/byteorder")]
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("the archive holds compressed files")
    if any(order != b"little" for order in orders):
        raise ValueError("its machine stored the highest byte first")
    pickles = [entry.file_size for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0] > MAX_PICKLE:
        raise ValueError(f"the archive does not hold one pickle of at most {MAX_PICKLE:,} bytes")
    return entries


def _start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """The offset of an entry's first byte: behind its local header, whose last two fields are lengths."""
    file.seek(entry.header_offset + _HEADER - 4)
    name, extra = struct.unpack("<2H", file.read(4))
    return int(entry.header_offset + _HEADER + name + extra)


def _row(name: object, tensor: object) -> list[Any]:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is not the name of a tensor")  # noqa: TRY004  the file's fault
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        raise ValueError(f"{name!r} is not a contiguous tensor of a known dtype")
    start: Any = tensor.untyped_storage()._checkpoint_offset
    offset = start + tensor.storage_offset() * tensor.itemsize
    return [name, DTYPES[tensor.dtype], list(tensor.shape), offset]
