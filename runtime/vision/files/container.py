"""An image file before it is decoded: its format, its size, its orientation, and the parts of it that make pixels."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from PIL import Image

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.limits import MAX_PIXELS, MAX_SIDE

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TRANSPOSED = frozenset({5, 6, 7, 8})  # width and height are swapped
TAG = 0x0112
_TYPES = {1: "B", 3: "H", 4: "I"}  # TIFF's BYTE, SHORT, LONG
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


@dataclass(frozen=True, slots=True)
class Container:
    """One frame without metadata: `pieces` joined are a file of the format `kind`.

    `width` and `height` are the stored canvas's; `orientation` is EXIF's, 1 for upright.
    """

    kind: str
    width: int
    height: int
    pieces: tuple[bytes | memoryview, ...]
    orientation: int = 1


class DamagedError(Exception):
    """The file contradicts its format; the message says how."""


def check_size(name: str, width: int, height: int) -> None:
    """Raise ImageError for a picture without pixels, or with too many."""
    if min(width, height) < 1:
        raise ImageError(f"{name} is {width}x{height} pixels: there is nothing to see; give an image with pixels")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(
            f"{name} is {width}x{height} pixels; the limit is {MAX_SIDE:,} a side and {MAX_PIXELS:,} in total; "
            "shrink it first"
        )


def too_many(name: str, parts: str, limit: int) -> ImageError:
    """The error for a file with more parts than an honest one has."""
    return ImageError(f"{name} has over {limit:,} {parts}, the limit; open it in an image editor and save it again")


def exif_orientation(block: bytes) -> int | None:
    """The orientation in the first directory of an EXIF block, or None if it has none or is damaged."""
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", block, entry)
            if tag == TAG and count == 1 and kind in _TYPES:
                return int(struct.unpack_from(order + _TYPES[kind], block, entry + 8)[0])
    except struct.error:  # an offset or a count beyond the block
        pass
    return None


def xmp_orientation(packet: bytes) -> int | None:
    """The orientation in an XMP packet, or None."""
    match = _XMP.search(packet)
    return int(match[1]) if match else None
