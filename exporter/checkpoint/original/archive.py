"""The offsets of the files in an uncompressed zip archive, as `torch.save` writes it.

The archive must account for every byte: files in a row without overlap, then the directory, then the end records at the
end of the file.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

from vtx.runtime.bundle.safetensors import MAX_TENSORS, shown

ZIP = b"PK\x03\x04"
MAX_DIRECTORY = 16 * 2**20
MAX_ENTRIES = MAX_TENSORS + 16  # one a storage, and those that describe the archive
_MAX_GAP = 24  # bytes of a descriptor after a file's data
_LOCAL, _CENTRAL = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_STORED, _ENCRYPTED, _DESCRIPTOR = 0, 1, 8
_IN_ZIP64 = 0xFFFFFFFF  # instead of a number that the zip64 field has
_CUT = "is cut off or damaged"


class StoredFile(NamedTuple):
    """A file of an archive: its first byte and its number of bytes."""

    start: int
    size: int


def read_entries(file: BinaryIO, size: int) -> dict[str, StoredFile]:
    """The files of the archive in `file` of `size` bytes, by name. Raises `ValueError`."""
    start, count, length = _directory(file, size)
    directory, at = read_at(file, start, length), 0
    listed: list[tuple[int, bytes, int, int]] = []  # of each file its header's offset, name, flags and size
    for _ in range(count):
        if at + _CENTRAL.size > length:
            raise ValueError(_CUT)
        kind, _, _, flags, method, _, _, _, packed, nbytes, name, extra, comment, _, _, _, header = (
            _CENTRAL.unpack_from(directory, at)
        )
        begin = at + _CENTRAL.size
        at = begin + name + extra + comment
        if kind != b"PK\x01\x02" or at > length:
            raise ValueError(_CUT)
        nbytes, packed, header = _widened(directory[begin + name : begin + name + extra], nbytes, packed, header)
        if method != _STORED or flags & _ENCRYPTED or packed != nbytes:
            raise ValueError("is an archive with compressed or encrypted files, which vtx does not read")
        listed.append((header, directory[begin : begin + name], flags, nbytes))
    if at != length:
        raise ValueError(_CUT)
    found, end = dict[str, StoredFile](), 0
    for header, title, flags, nbytes in sorted(listed):
        if not 0 <= header - end <= _MAX_GAP or header + _LOCAL.size > start:
            raise ValueError("is an archive whose files overlap or leave gaps")
        local = _LOCAL.unpack(read_at(file, header, _LOCAL.size))
        kind, _, own_flags, method, _, _, _, packed, own, name, extra = local
        rest = read_at(file, header + _LOCAL.size, name + extra)
        own, packed = _widened(rest[name:], own, packed)
        if kind != ZIP or method != _STORED or own_flags != flags or rest[:name] != title:
            raise ValueError("is an archive whose directory and files disagree")
        if not (packed == own == nbytes or (flags & _DESCRIPTOR and packed == own == 0)):
            raise ValueError("is an archive whose directory and files disagree on a size")
        if title.decode() in found:
            raise ValueError(f"is an archive with two files named {shown(title.decode())}")
        begin = header + _LOCAL.size + name + extra
        found[title.decode()], end = StoredFile(begin, nbytes), begin + nbytes
    if not 0 <= start - end <= _MAX_GAP:
        raise ValueError("is an archive whose files overlap its directory or leave a gap before it")
    return found


def read_at(file: BinaryIO, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises `ValueError` if the file ends before."""
    file.seek(start)
    content = file.read(count)
    if len(content) != count:
        raise ValueError(_CUT)
    return content


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """The directory's first byte, its number of entries and its bytes; it ends where the end records begin."""
    at = size - _END.size
    if at < 0:
        raise ValueError(_CUT)
    kind, _, _, _, count, length, start, _ = _END.unpack(read_at(file, at, _END.size))
    if kind != b"PK\x05\x06":
        raise ValueError("is cut off, or holds bytes after the end of its archive")
    locator = at - _LOCATOR.size
    if locator >= _END_64.size and read_at(file, locator, 4) == b"PK\x06\x07":
        _, _, given, _ = _LOCATOR.unpack(read_at(file, locator, _LOCATOR.size))
        at = locator - _END_64.size
        kind, _, _, _, _, _, _, count, length, start = _END_64.unpack(read_at(file, at, _END_64.size))
        if kind != b"PK\x06\x06" or given != at:
            raise ValueError(_CUT)
    if length > MAX_DIRECTORY or count > MAX_ENTRIES:
        raise ValueError(
            f"has a directory of {count:,} files in {length:,} bytes, vtx reads {MAX_ENTRIES:,} in {MAX_DIRECTORY:,}"
        )
    if start + length != at:
        raise ValueError("is an archive whose directory does not end where its end record begins")
    return start, count, length


def _widened(extra: bytes, *numbers: int) -> list[int]:
    """`numbers`, with the largest 32-bit number replaced by the next number of the zip64 field in `extra`."""
    field = b""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            field = extra[4 : 4 + length]
            break
        extra = extra[4 + length :]
    values = (value for (value,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8]))
    return [next(values, number) if number == _IN_ZIP64 else number for number in numbers]
