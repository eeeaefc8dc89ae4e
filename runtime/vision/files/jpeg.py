"""The structure of a JPEG file, read without decoding.

A progressive JPEG repeats its blocks of 8x8 pixels in scan after scan, and a scan that changes nothing takes some
30 bytes. Hence scans are counted, and the blocks that all of them visit.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files.container import Container, DamagedError, exif_orientation, too_many, xmp_orientation
from vtx.runtime.vision.limits import MAX_PARTS, MAX_SCAN_BLOCKS, MAX_SCANS

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")  # zero follows a data byte of 255; D0 to D7 restart within a scan
_START = 0xD8
_END = 0xD9
_SCAN = 0xDA
_LINES = 0xDC
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_METADATA = frozenset([*range(0xE1, 0xEE), 0xEF, 0xFE])  # all but JFIF (E0) and Adobe (EE), which tell the colours
_STANDALONE = (0x01, _START, _END)
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"


def read_jpeg(name: str, content: bytes) -> Container:
    """The segments that make pixels, up to the first end marker.

    Raises ImageError beyond `MAX_PARTS`, `MAX_SCANS` or `MAX_SCAN_BLOCKS`.
    """
    view = memoryview(content)
    pieces = []
    blocks: dict[int, int] = {}  # of 8x8 pixels, by component
    width = height = 0
    orientation = _Orientation()
    scans = _Scans()
    end = 0
    for _ in range(MAX_PARTS):
        marker = _MARKER.search(content, end)
        if marker is None or marker[1][0] == _END:
            break
        code = marker[1][0]
        start = marker.end() - 2
        end = start + _length(content, code, start)
        segment = content[start + 4 : end]
        if code in _METADATA:
            if code == 0xE1:
                orientation.read(segment)
            continue
        if code in _FRAMES:
            if blocks:
                raise DamagedError("it has two frame headers")
            width, height, blocks = _frame(segment)
        elif code == _SCAN:
            scans.add(name, segment, blocks)
            following = _MARKER.search(content, end)  # the compressed data ends there, or with the file
            end = len(content) if following is None else following.start()
        elif code == _LINES:
            raise DamagedError("its height is not in its header")
        pieces.append(view[start:end])
    else:
        raise too_many(name, "segments", MAX_PARTS)
    if not blocks:
        raise DamagedError("it has no frame header")
    closing = () if marker is None else (b"\xff\xd9",)
    return Container("JPEG", width, height, (*pieces, *closing), orientation.value)


@dataclass(slots=True)
class _Scans:
    """The number of scans, and of the blocks that all of them visit."""

    count: int = 0
    visited: int = 0

    def add(self, name: str, segment: bytes, blocks: dict[int, int]) -> None:
        """Count a scan by its header; `blocks` of each component. Raises ImageError if there is too much."""
        if not blocks or not segment:
            raise DamagedError("a scan comes before the frame header")
        self.count += 1
        self.visited += sum(blocks.get(component, 0) for component in segment[1 : 1 + 2 * segment[0] : 2])
        if self.count > MAX_SCANS:
            raise too_many(name, "scans", MAX_SCANS)
        if self.visited > MAX_SCAN_BLOCKS:
            raise ImageError(
                f"the scans of {name} pass over more than {MAX_SCAN_BLOCKS:,} blocks of 8x8 pixels, the limit; "
                "save it as a baseline JPEG, or shrink it"
            )


@dataclass(slots=True)
class _Orientation:
    """The first orientation in Exif, and the first in XMP, which counts where Exif has none."""

    exif: int | None = None
    xmp: int | None = None

    def read(self, segment: bytes) -> None:
        """Take what a segment of metadata says."""
        if self.exif is None and segment.startswith(_EXIF):
            self.exif = exif_orientation(segment)
        if self.xmp is None and segment.startswith(_XMP):
            self.xmp = xmp_orientation(segment)

    @property
    def value(self) -> int:
        return self.exif or self.xmp or 1


def _length(content: bytes, code: int, start: int) -> int:
    """Bytes of a segment from its marker at `start` on; of a scan only those of its header."""
    if code in _STANDALONE:
        return 2
    length = int.from_bytes(content[start + 2 : start + 4], "big")
    if length < 2:
        raise DamagedError(f"segment {code:02X} has a length of {length}")
    return 2 + length


def _frame(segment: bytes) -> tuple[int, int, dict[int, int]]:
    """Width, height, and the blocks of each component."""
    _, height, width, count = struct.unpack_from(">BHHB", segment)
    if len(segment) != 6 + 3 * count or not 1 <= count <= 4:
        raise DamagedError(f"its header names {count} components in {len(segment)} bytes")
    across = [byte >> 4 for byte in segment[7::3]]
    down = [byte & 15 for byte in segment[7::3]]
    if not 1 <= min(across + down) <= max(across + down) <= 4:
        raise DamagedError("a component's sampling factor is not from 1 to 4")
    units = -(-width // (8 * max(across))) * -(-height // (8 * max(down)))
    return width, height, {id: units * h * v for id, h, v in zip(segment[6::3], across, down, strict=True)}
