"""The orientation of a picture: EXIF's, or XMP's if EXIF has none."""

from __future__ import annotations

import re
import struct

from PIL import Image

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
