"""The format of an image file, and the structure of PNG, WebP, GIF, BMP and PPM files.

Only the parts of the first frame reach a decoder. Metadata, later frames and junk are left out, and the number of
chunks is bounded, because decoders spend time on each.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files.container import (
    Container,
    DamagedError,
    check_size,
    exif_orientation,
    too_many,
    xmp_orientation,
)
from vtx.runtime.vision.files.jpeg import read_jpeg
from vtx.runtime.vision.limits import DEFAULT_FORMATS, KNOWN_FORMATS, MAX_GIF_BLOCKS, MAX_PARTS

_SIGNATURES = (
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("BMP", re.compile(rb"BM")),
    ("PPM", re.compile(rb"P[1-6]\s")),
    ("TIFF", re.compile(rb"II\*\0|MM\0\*")),
    ("AVIF", re.compile(rb"....ftypavi[fs]", re.DOTALL)),
    ("HEIC", re.compile(rb"....ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)),
    ("CR3", re.compile(rb"....ftypcrx ", re.DOTALL)),
    ("MP4", re.compile(rb"....ftyp", re.DOTALL)),
)
_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_EXIF = re.compile(rb"\nexif\n *[0-9]+\n([0-9A-Fa-f\n]*)")  # of ImageMagick: hexadecimal digits in lines
_TEXT_BYTES = 256 << 10  # of a text without compression, which is read for its first bytes
_SPACE = rb"(?:\s|#[^\n]{0,200}\n){1,9}"
_PPM = re.compile(rb"P([56])" + _SPACE + rb"(\d{1,9})" + _SPACE + rb"(\d{1,9})" + _SPACE + rb"255\s")
_BMP_CODINGS = {1: "RLE8", 2: "RLE4", 4: "JPEG", 5: "PNG"}


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """The names in capitals; ImageError for a format that vtx cannot read."""
    names = tuple(str(name).upper() for name in ([formats] if isinstance(formats, str) else formats))
    for name in names:
        if name not in KNOWN_FORMATS:
            raise ImageError(f"image format {name[:20]!r} is unknown; vtx reads {', '.join(KNOWN_FORMATS)}")
    if not names:
        raise ImageError(f"the list of image formats is empty; name at least one of {', '.join(KNOWN_FORMATS)}")
    return names


def read_container(name: str, content: bytes, formats: Sequence[str] = DEFAULT_FORMATS) -> Container:
    """The structure of an image file; `name` is for messages.

    Raises ImageError if its format is none of `formats`, or if it is damaged or beyond a limit.
    """
    kind = next((kind for kind, signature in _SIGNATURES if signature.match(content)), "")
    if not kind:
        raise ImageError(
            f"{name} is not an image that vtx reads; it reads {', '.join(formats)}: convert it, or give its pixels"
        )
    if kind == "MP4":
        raise ImageError(f"{name} is an MP4 video, not an image; give it as a video, or a frame of it as an image")
    if kind not in KNOWN_FORMATS:
        raise ImageError(
            f"{name} is a {kind} image; vtx reads {', '.join(formats)}; convert it, or open it yourself and give a PIL "
            "image or an array"
        )
    if kind not in formats:
        raise ImageError(
            f"{name} is a {kind} image, and only {', '.join(formats)} are read here; add {kind.lower()} to the "
            "image formats, or convert it"
        )
    try:
        container = _READERS[kind](name, content)
    except (DamagedError, struct.error, IndexError) as error:
        reason = str(error) if isinstance(error, DamagedError) else "it ends too early"
        raise ImageError(f"{name} is a damaged {kind} file ({reason}); save or copy it again") from error
    check_size(name, container.width, container.height)
    return container


def _read_png(name: str, content: bytes) -> Container:
    view = memoryview(content)
    pieces = [memoryview(content)[:8]]
    exif = raw = xmp = None
    for kind, start, end in _chunks(name, content, png=True):
        data = view[start + 8 : end - 4]
        if kind == b"eXIf" and exif is None:
            exif = exif_orientation(bytes(data))
        elif kind in _PNG_TEXTS:
            keyword, text = _png_text(kind, bytes(data))
            if keyword == b"XML:com.adobe.xmp":
                xmp = xmp_orientation(text)
            elif keyword == b"Raw profile type exif" and (profile := _PNG_EXIF.match(text)):
                digits = profile[1].replace(b"\n", b"")
                raw = exif_orientation(bytes.fromhex(digits[: len(digits) & ~1].decode()))
        elif kind in _PNG_PIXELS and (start == 8 or kind != b"IHDR"):
            pieces.append(view[start:end])
    if content[12:16] != b"IHDR":
        raise DamagedError("its header is not its first chunk")
    width, height = struct.unpack_from(">II", content, 16)
    return Container("PNG", width, height, tuple(pieces), exif or raw or xmp or 1)


def _png_text(kind: bytes, data: bytes) -> tuple[bytes, bytes]:
    """The keyword and the text of a chunk, at most `_TEXT_BYTES` of it if it is compressed; empty if it is damaged."""
    keyword, _, text = data.partition(b"\0")
    compressed = kind == b"zTXt"
    if kind == b"iTXt":  # the flag, the method, the language and the translated keyword come first
        compressed = text[:1] == b"\1"
        text = text[2:].split(b"\0", 2)[-1]
    elif compressed:
        text = text[1:]
    if not compressed:
        return keyword, text
    try:
        return keyword, zlib.decompressobj().decompress(text, _TEXT_BYTES)
    except zlib.error:
        return keyword, b""


def _read_webp(name: str, content: bytes) -> Container:
    exif = xmp = size = None
    for kind, start, end in _chunks(name, content, png=False):
        data = content[start + 8 : end]
        if size is None and kind == b"VP8X":
            sides = content[start + 12 : start + 18]
            size = int.from_bytes(sides[:3], "little") + 1, int.from_bytes(sides[3:], "little") + 1
        elif size is None and kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", content, start + 14)
            size = width & 0x3FFF, height & 0x3FFF
        elif size is None and kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", content, start + 9)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif kind == b"EXIF":
            exif = exif_orientation(data)
        elif kind == b"XMP ":
            xmp = xmp_orientation(data)
    if size is None:
        raise DamagedError("it holds no picture")
    return Container("WEBP", *size, (content,), exif or xmp or 1)


def _chunks(name: str, content: bytes, *, png: bool) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and end of each chunk of a PNG, up to its IEND, or of a WebP; the last may end beyond a cut file."""
    at = 8 if png else 12
    count = 0
    total = len(content) if png else min(len(content), 8 + int.from_bytes(content[4:8], "little"))
    while at + 8 <= total:
        if count >= MAX_PARTS:
            raise too_many(name, "chunks", MAX_PARTS)
        if png:
            length, kind = struct.unpack_from(">I4s", content, at)
            end = at + 12 + length
        else:
            kind, length = struct.unpack_from("<4sI", content, at)
            end = at + 8 + length
        yield kind, at, end
        if png and kind == b"IEND":
            return
        at = end if png else end + length % 2
        count = count + 1


def _read_gif(name: str, content: bytes) -> Container:
    """The screen, the first frame, and its transparency."""
    view = memoryview(content)
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    at = 13 + _colours(flags)
    pieces: list[bytes | memoryview] = [view[:at]]
    blocks = 0
    while True:
        start = at
        introducer = content[at]
        if introducer == 0x2C:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", content, at + 1)
            end, _ = _gif_blocks(name, content, at + 11 + _colours(flags), blocks)
            pieces += [view[start:end], b";"] if end <= len(content) else [view[start:]]
            return Container("GIF", max(width, left + frame_width), max(height, top + frame_height), tuple(pieces))
        if introducer != 0x21:
            raise DamagedError("it holds no frame")
        at, blocks = _gif_blocks(name, content, at + 2, blocks)
        if content[start + 1] == 0xF9:
            pieces.append(view[start:at])


def _colours(flags: int) -> int:
    """Bytes of the colour table that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks(name: str, content: bytes, at: int, count: int) -> tuple[int, int]:
    """The end of a chain of blocks, and the number of blocks so far; the end may lie beyond a file that was cut."""
    while at < len(content) and content[at]:
        at = at + 1 + content[at]
        count = count + 1
        if count > MAX_GIF_BLOCKS:
            raise too_many(name, "blocks", MAX_GIF_BLOCKS)
    return at + 1, count


def _read_bmp(name: str, content: bytes) -> Container:
    (header,) = struct.unpack_from("<I", content, 14)
    if header == 12:
        width, height = struct.unpack_from("<HH", content, 18)
        coding = 0
    else:
        width, height, _, _, coding = struct.unpack_from("<iiHHI", content, 18)
    if coding in _BMP_CODINGS:  # Pillow decodes these in Python, a byte at a time, or not at all
        raise ImageError(f"{name} is a BMP compressed by {_BMP_CODINGS[coding]}; save it uncompressed, or as PNG")
    return Container("BMP", width, abs(height), (content,))


def _read_ppm(name: str, content: bytes) -> Container:
    """Binary grey or RGB of 8 bits; the header is written anew, since its comments may be long."""
    header = _PPM.match(content)
    if header is None:
        raise ImageError(
            f"{name} is a PPM in text form, or has other than 256 levels; convert it to binary (P6, 255), or to PNG"
        )
    width = int(header[2])
    height = int(header[3])
    start = b"P%b %d %d 255\n" % (header[1], width, height)
    return Container("PPM", width, height, (start, memoryview(content)[header.end() :]))


_READERS: dict[str, Callable[[str, bytes], Container]] = {
    "JPEG": read_jpeg,
    "PNG": _read_png,
    "WEBP": _read_webp,
    "GIF": _read_gif,
    "BMP": _read_bmp,
    "PPM": _read_ppm,
}
