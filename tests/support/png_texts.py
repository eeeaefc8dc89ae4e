"""PNG files whose texts say how they are turned."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
from PIL import Image


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(picture: Image.Image, *chunks: bytes) -> bytes:
    """A PNG with further chunks behind its header."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    content = buffer.getvalue()
    return content[:33] + b"".join(chunks) + content[33:]


EXIF_BLOCK = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0" + bytes(4)
RAW_PROFILE = b"\nexif\n%8d\n" % len(EXIF_BLOCK) + "\n".join(re.findall(".{1,36}", EXIF_BLOCK.hex())).encode() + b"\n"
_PACKET = b'<x:xmpmeta tiff:Orientation="6"/>'
_TEXTS = {
    "text": chunk(b"tEXt", b"Raw profile type exif\0" + RAW_PROFILE),
    "compressed": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW_PROFILE)),
    "international": chunk(b"iTXt", b"Raw profile type exif\0\0\0en\0\0" + RAW_PROFILE),
    "xmp": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + _PACKET),
    "compressed-xmp": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(_PACKET)),
}
_PICTURE = Image.fromarray(np.random.default_rng(5).integers(0, 256, (20, 30, 3), dtype=np.uint8))
TEXT_CHUNKS = {form: with_chunks(_PICTURE, text) for form, text in _TEXTS.items()}  # 30x20, to be turned by 6
