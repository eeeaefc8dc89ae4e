"""Where the files of a zip archive lie that stores them as they are, as `torch.save` writes it.

Nothing is decompressed. The archive must account for every byte: files in a row without overlap, then the directory,
then the end records at the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from vtx.runtime.bundle.safetensors import MAX_TENSORS, shown

ZIP = b"PK\x03\x04"
MAX_DIRECTORY = 16 * 2**20
MAX_ENTRIES = MAX_TENSORS + 16  # a storage each, and what torch says of the archive
_MAX_GAP = 24  # bytes of a descriptor behind a file's data
_LOCAL, _CENTRAL = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_STORED, _ENCRYPTED, _DESCRIPTOR = 0, 1, 8
_WIDE = 0xFFFFFFFF  # stands for a number that the zip64 field has
_CUT = "is cut off or damaged"


class StoredFile(NamedTuple):
    """A file of an archive: its first byte there, and how many there are."""

    start: int
    size: int


class _Listed(NamedTuple):
    """A file as the directory lists it."""

    header: int
    name: bytes
    flags: int
    size: int


def read_entries(file: BinaryIO, size: int) -> dict[str, StoredFile]:
    """The files of the archive in `file`, which holds `size` bytes, by name. Raises `ValueError`."""
    start, count, length = _directory(file, size)
    found: dict[str, StoredFile] = {}
    end = 0
    for listed in sorted(_listed(read_at(file, start, length), count)):
        if not 0 <= listed.header - end <= _MAX_GAP or listed.header + _LOCAL.size > start:
            raise ValueError("is an archive whose files overlap or leave gaps")
        entry = _entry(file, listed)
        end = entry.start + entry.size
        name = listed.name.decode()
        if name in found:
            raise ValueError(f"is an archive with two files named {shown(name)}")
        found[name] = entry
    if not 0 <= start - end <= _MAX_GAP:
        raise ValueError("is an archive whose files overlap its directory or leave a gap before it")
    return found


def read_at(file: BinaryIO, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises `ValueError` where the file ends before."""
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


def _listed(directory: bytes, count: int) -> Iterator[_Listed]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise ValueError(_CUT)
        kind, _, _, flags, method, _, _, _, packed, size, name, extra, comment, _, _, _, header = _CENTRAL.unpack_from(
            directory, at
        )
        begin = at + _CENTRAL.size
        at = begin + name + extra + comment
        if kind != b"PK\x01\x02" or at > len(directory):
            raise ValueError(_CUT)
        size, packed, header = _widened(directory[begin + name : begin + name + extra], size, packed, header)
        if method != _STORED or flags & _ENCRYPTED or packed != size:
            raise ValueError(
                "is an archive with compressed or encrypted files, and tensors are read from where they lie"
            )
        yield _Listed(header, directory[begin : begin + name], flags, size)
    if at != len(directory):
        raise ValueError(_CUT)


def _widened(extra: bytes, *numbers: int) -> list[int]:
    """`numbers`, with those of the zip64 field among the `extra` ones in place of the largest 32-bit number."""
    wide = b""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = extra[4 : 4 + length]
            break
        extra = extra[4 + length :]
    values = (value for (value,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8]))
    return [next(values, number) if number == _WIDE else number for number in numbers]


def _entry(file: BinaryIO, listed: _Listed) -> StoredFile:
    """Where a file's data lie, whose own header must say what the directory says."""
    kind, _, flags, method, _, _, _, packed, size, name, extra = _LOCAL.unpack(
        read_at(file, listed.header, _LOCAL.size)
    )
    rest = read_at(file, listed.header + _LOCAL.size, name + extra)
    size, packed = _widened(rest[name:], size, packed)
    if kind != ZIP or method != _STORED or flags != listed.flags or rest[:name] != listed.name:
        raise ValueError("is an archive whose directory and files disagree")
    if not (packed == size == listed.size or (flags & _DESCRIPTOR and packed == size == 0)):
        raise ValueError("is an archive whose directory and files disagree on a size")
    return StoredFile(listed.header + _LOCAL.size + name + extra, listed.size)
