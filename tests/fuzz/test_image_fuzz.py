"""Whatever an image file holds, it becomes RGB pixels within the limits, or is refused with one line."""

from __future__ import annotations

import io
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.support.fuzzing import cases, damaged, fuzz, one_line
from vtx.runtime.errors import ImageError
from vtx.runtime.vision.image import load_image
from vtx.runtime.vision.limits import KNOWN_FORMATS, MAX_DECODE_SECONDS, MAX_PIXELS, MAX_SIDE

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (18, 21, 3), dtype=np.uint8))
CLEAR = PICTURE.convert("RGBA")
CLEAR.putalpha(PICTURE.convert("L"))
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
PNG, SOI = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def frames(picture: Image.Image) -> dict[str, Any]:
    return {"save_all": True, "append_images": [picture.rotate(90), picture.rotate(180)], "duration": 20}


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block.update({0x0112: orientation, 0x010E: "a camera", 0x0132: "2026:01:01 00:00:00"})
    return block


SOUND = {
    "jpeg": encoded(PICTURE, "JPEG", exif=exif(6)),
    "jpeg-progressive": encoded(PICTURE, "JPEG", progressive=True, xmp=XMP),
    "jpeg-restarts": encoded(PICTURE, "JPEG", restart_marker_blocks=1, subsampling=2),
    "jpeg-grey": encoded(PICTURE.convert("L"), "JPEG", comment=b"grey"),
    "jpeg-cmyk": encoded(PICTURE.convert("CMYK"), "JPEG", progressive=True),
    "png": encoded(PICTURE, "PNG", exif=exif(8)),
    "png-alpha": encoded(CLEAR, "PNG"),
    "png-palette": encoded(PICTURE.convert("P"), "PNG", transparency=bytes(range(0, 256, 3))),
    "png-one-bit": encoded(PICTURE.convert("1"), "PNG"),
    "png-16-bit": encoded(Image.fromarray(np.arange(378, dtype=np.uint16).reshape(18, 21) * 150), "PNG"),
    "png-animated": encoded(PICTURE, "PNG", **frames(PICTURE)),
    "gif": encoded(PICTURE, "GIF", transparency=3, comment=b"a comment"),
    "gif-animated": encoded(PICTURE, "GIF", **frames(PICTURE)),
    "webp": encoded(PICTURE, "WEBP", exif=exif(3)),
    "webp-lossless": encoded(CLEAR, "WEBP", lossless=True, xmp=XMP),
    "webp-animated": encoded(PICTURE, "WEBP", **frames(PICTURE)),
    "bmp": encoded(PICTURE, "BMP"),
    "bmp-palette": encoded(PICTURE.convert("P"), "BMP"),
    "bmp-alpha": encoded(CLEAR, "BMP"),
    "ppm": encoded(PICTURE, "PPM"),
    "pgm": encoded(PICTURE.convert("L"), "PPM"),
    "tiff": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
}
NAMES = sorted(SOUND)
READ = [name for name in NAMES if name != "tiff"]
NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 100, 255, 256, 16_384, 16_385, 32_767, 65_535, 1 << 24, (1 << 31) - 1, -1])


def attack(content: bytes) -> Image.Image | None:
    """Read a file: its picture, or None where it is refused. Nothing else happens, and none takes long."""
    start = time.thread_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            picture = load_image(content, KNOWN_FORMATS)
        except ImageError as error:
            one_line(error)
            refused = str(error)
            picture = None
        else:
            refused = ""
    assert not told, told[0]
    assert not refused or ";" in refused, "the message names no fix"
    assert time.thread_time() - start < 2 * MAX_DECODE_SECONDS
    if picture is not None:
        assert picture.mode == "RGB"
        assert min(picture.size) >= 1
        assert max(picture.size) <= MAX_SIDE
        assert picture.width * picture.height <= MAX_PIXELS
    return picture


def same(picture: Image.Image | None, wanted: Image.Image | None) -> None:
    assert picture is not None
    assert wanted is not None
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(wanted))


def with_checksums(content: bytes) -> bytes:
    """A PNG whose chunks have the checksums of what is in them, so that a decoder reads on; other files as they are."""
    if not content.startswith(PNG):
        return content
    result, at = bytearray(content), 8
    while at + 12 <= len(result):
        end = at + 8 + int.from_bytes(result[at : at + 4], "big")
        if end + 4 > len(result):
            break
        result[end : end + 4] = struct.pack(">I", zlib.crc32(result[at + 4 : end]))
        at = end + 4
    return bytes(result)


def test_the_sound_ones_are_read_and_tiff_is_refused() -> None:
    assert [name for name in NAMES if attack(SOUND[name]) is not None] == READ


@pytest.mark.parametrize("case", cases("image"), ids=lambda case: case.name)
def test_what_was_found_before(case: Path) -> None:
    attack(case.read_bytes())


@fuzz
@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_damaged_file(name: str, data: st.DataObject) -> None:
    content = data.draw(damaged(SOUND[name]))
    attack(content)
    attack(with_checksums(content))


@fuzz
@given(name=st.sampled_from(NAMES), data=st.data(), size=st.sampled_from([1, 2, 4]), number=NUMBERS)
def test_a_number_of_the_header_replaced(name: str, data: st.DataObject, size: int, number: int) -> None:
    content = bytearray(SOUND[name])
    at = data.draw(st.integers(0, min(len(content), 200) - size))
    value = number & (1 << 8 * size) - 1
    content[at : at + size] = value.to_bytes(size, data.draw(st.sampled_from(["big", "little"])))
    attack(with_checksums(bytes(content)))


@fuzz
@given(name=st.sampled_from(READ), data=st.data())
def test_a_file_that_was_cut_is_whole_or_refused(name: str, data: st.DataObject) -> None:
    content = SOUND[name]
    picture = attack(content[: data.draw(st.integers(0, len(content)))])
    if picture is not None:
        same(picture, attack(content))


@fuzz
@given(one=st.sampled_from(NAMES), other=st.sampled_from(NAMES), data=st.data())
def test_two_files_in_one(one: str, other: str, data: st.DataObject) -> None:
    first, second = SOUND[one], SOUND[other]
    cut, start = data.draw(st.integers(0, len(first))), data.draw(st.integers(0, len(second)))
    attack(with_checksums(first[:cut] + second[start:]))


@fuzz
@given(content=st.binary(max_size=300), start=st.sampled_from([SOI, PNG, b"GIF89a", b"RIFF____WEBP", b"BM", b"P6\n"]))
def test_any_bytes(content: bytes, start: bytes) -> None:
    attack(content)
    attack(start + content)


# ---- what is not pixels changes no pixel ----------------------------------------------------------------------------


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def jpeg_segment(code: int, content: bytes) -> bytes:
    return b"\xff" + bytes([code]) + struct.pack(">H", 2 + len(content)) + content


def gif_extension(label: int, content: bytes) -> bytes:
    return b"\x21" + bytes([label]) + (bytes([len(content)]) + content if content else b"") + b"\0"


def with_png_chunk(content: bytes, code: int, junk: bytes) -> bytes:
    kinds = (b"tEXt", b"zTXt", b"iCCP", b"gAMA", b"tIME", b"acTL", b"fcTL", b"fdAT", b"vtXy", b"iTXt")
    return content[:33] + png_chunk(kinds[code % len(kinds)], junk) + content[33:]


def with_jpeg_segment(content: bytes, code: int, junk: bytes) -> bytes:
    codes = (0xFE, 0xE2, 0xED, 0xEF, 0xE5)  # a comment, and what applications put in
    return content[:2] + jpeg_segment(codes[code % len(codes)], junk) + content[2:]


def with_gif_extension(content: bytes, code: int, junk: bytes) -> bytes:
    at = 13 + (3 << (content[10] & 7) + 1)
    return content[:at] + gif_extension((0xFE, 0x01, 0xFF)[code % 3], junk[:255]) + content[at:]


def with_webp_chunk(content: bytes, code: int, junk: bytes) -> bytes:
    kind = (b"ICCP", b"vtXy", b"abcd")[code % 3]
    body = content[8:] + kind + struct.pack("<I", len(junk)) + junk + b"\0" * (len(junk) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


ADDED: dict[str, Callable[[bytes, int, bytes], bytes]] = {
    "png": with_png_chunk, "jpeg": with_jpeg_segment, "gif": with_gif_extension, "webp": with_webp_chunk,
}  # fmt: skip


@fuzz
@given(
    name=st.sampled_from([name for name in READ if name.split("-")[0] in ADDED]),
    code=st.integers(0, 9),
    junk=st.binary(max_size=300),
)
def test_parts_that_are_not_pixels_change_no_pixel(name: str, code: int, junk: bytes) -> None:
    same(attack(ADDED[name.split("-")[0]](SOUND[name], code, junk)), attack(SOUND[name]))


# ---- EXIF -----------------------------------------------------------------------------------------------------------

ENTRIES = st.tuples(st.integers(0, 0xFFFF), st.integers(0, 13), st.integers(0, 1 << 32), st.integers(0, 1 << 32))


def exif_block(order: str, entries: list[tuple[int, int, int, int]], start: int = 8) -> bytes:
    numbers = [struct.pack(order + "HHII", t, k, c & 0xFFFFFFFF, v & 0xFFFFFFFF) for t, k, c, v in entries]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start & 0xFFFFFFFF)
    return head + struct.pack(order + "H", len(entries)) + b"".join(numbers) + bytes(4)


def with_exif(name: str, block: bytes) -> bytes:
    if name == "jpeg":
        content = encoded(PICTURE, "JPEG")
        return content[:2] + jpeg_segment(0xE1, b"Exif\0\0" + block) + content[2:]
    if name == "png":
        content = encoded(PICTURE, "PNG")
        return content[:33] + png_chunk(b"eXIf", block) + content[33:]
    return encoded(PICTURE, "WEBP", lossless=True, exif=block)


@fuzz
@given(
    name=st.sampled_from(["jpeg", "png", "webp"]),
    block=st.binary(max_size=80) | st.builds(exif_block, st.sampled_from("<>"), st.lists(ENTRIES, max_size=5), NUMBERS),
)
def test_any_exif_turns_the_picture_or_leaves_it(name: str, block: bytes) -> None:
    picture = attack(with_exif(name, block))
    assert picture is not None
    assert picture.size in (PICTURE.size, PICTURE.size[::-1])


@fuzz
@given(
    name=st.sampled_from(["jpeg", "png", "webp"]),
    order=st.sampled_from("<>"),
    orientation=st.integers(0, 9),
    tags=st.lists(st.integers(0x0100, 0x0111), max_size=3, unique=True),
)
def test_a_sound_exif_turns_the_picture_as_pillow_does(
    name: str, order: str, orientation: int, tags: list[int]
) -> None:
    value = orientation if order == "<" else orientation << 16  # a short stands at the front of its four bytes
    content = with_exif(name, exif_block(order, [*((tag, 4, 1, 7) for tag in tags), (0x0112, 3, 1, value)]))
    with Image.open(io.BytesIO(content)) as opened:
        same(attack(content), ImageOps.exif_transpose(opened).convert("RGB"))
