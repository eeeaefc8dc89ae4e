"""Files that would cost more than a picture is worth are refused from their structure, before a decoder sees them."""

from __future__ import annotations

import io
import re
import struct
import threading
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.support.gated import WAIT
from tests.support.png_texts import EXIF_BLOCK, RAW_PROFILE, TEXT_CHUNKS, chunk, with_chunks
from vtx.runtime.errors import ImageError
from vtx.runtime.vision import image
from vtx.runtime.vision.files import formats, jpeg
from vtx.runtime.vision.image import image_size, load_image
from vtx.runtime.vision.limits import DEFAULT_FORMATS, KNOWN_FORMATS, MAX_GIF_BLOCKS, MAX_PARTS, MAX_SCANS
from vtx.runtime.vision.video import container


def noise(width: int = 50, height: int = 40, channels: int = 3) -> Image.Image:
    values = np.random.default_rng(5).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png(*between: bytes, side: int = 8) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes((side + 1) * side)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(between) + pixels + chunk(b"IEND")


def progressive(side: int, extra_scans: int) -> bytes:
    """A grey progressive JPEG whose last scan, with the table it needs, stands there again and again."""
    content = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(rb"\xff[\xc4\xda]", content)]
    return content[:-2] + content[starts[-2] : -2] * extra_scans + b"\xff\xd9"


def refused(content: bytes, match: str, **options: object) -> None:
    with pytest.raises(ImageError, match=match) as caught:
        load_image(content, **options)  # type: ignore[arg-type]
    assert ";" in str(caught.value), "the message names no fix"


def test_a_progressive_jpeg_is_read_up_to_the_limit_of_scans_and_refused_beyond():
    scans = progressive(16, 0).count(b"\xff\xda")
    assert load_image(progressive(16, MAX_SCANS - scans)).size == (16, 16)
    refused(progressive(16, MAX_SCANS - scans + 1), "over 100 scans, the limit")
    refused(progressive(16, 10_000), "over 100 scans, the limit")


def test_scans_over_a_large_picture_are_bounded_by_the_blocks_they_visit(monkeypatch):
    content = progressive(80, 4)  # 100 blocks a scan
    scans = content.count(b"\xff\xda")
    monkeypatch.setattr(jpeg, "MAX_SCAN_BLOCKS", 100 * scans)
    assert load_image(content).size == (80, 80)
    monkeypatch.setattr(jpeg, "MAX_SCAN_BLOCKS", 100 * scans - 1)
    refused(content, rf"pass over more than {100 * scans - 1:,} blocks of 8x8 pixels, the limit; save it")


@pytest.mark.parametrize(("width", "height", "sampling", "blocks"), [(17, 9, 0, 3 * 3 * 2), (17, 9, 2, 2 * 6)])
def test_blocks_of_a_scan_count_every_component_with_its_sampling(width, height, sampling, blocks, monkeypatch):
    content = encoded(noise(width, height), "JPEG", subsampling=sampling)
    monkeypatch.setattr(jpeg, "MAX_SCAN_BLOCKS", blocks)
    load_image(content)
    monkeypatch.setattr(jpeg, "MAX_SCAN_BLOCKS", blocks - 1)
    refused(content, "blocks of 8x8 pixels")


def test_a_png_of_countless_empty_chunks_is_refused():
    assert load_image(png(chunk(b"teSt") * (MAX_PARTS - 3))).size == (8, 8)
    refused(png(chunk(b"teSt") * (MAX_PARTS - 2)), "over 32,768 chunks, the limit")


def test_a_jpeg_of_countless_empty_comments_is_refused():
    content = encoded(noise(), "JPEG")
    refused(content[:2] + b"\xff\xfe\0\2" * (MAX_PARTS + 1) + content[2:], "over 32,768 segments, the limit")


def test_a_webp_of_countless_empty_chunks_is_refused():
    content = encoded(noise(), "WEBP")
    body = content[8:] + b"abcd\0\0\0\0" * (MAX_PARTS + 1)
    refused(b"RIFF" + struct.pack("<I", len(body)) + body, "over 32,768 chunks, the limit")


def test_a_gif_of_countless_blocks_is_refused():
    comment = b"\x21\xfe" + b"\1a" * (MAX_GIF_BLOCKS + 1) + b"\0"
    refused(b"GIF89a\1\0\1\0\0\0\0" + comment + b";", "over 524,288 blocks, the limit")


@pytest.mark.parametrize("text", [b"P3 2 2 255\n" + b"1 " * 12, b"P1 2 2 1 0 0 1", b"P2 1 1 255 7", b"P6 1 1 65535\n"])
def test_a_ppm_as_text_is_refused_even_where_ppm_is_allowed(text):
    refused(text, "is a PPM image, and only JPEG, PNG, .* add ppm to the image formats")
    refused(text, "PPM in text form, or has other than 256 levels", formats=KNOWN_FORMATS)


def test_a_binary_ppm_is_read_where_it_is_allowed_and_its_comments_cost_nothing():
    wanted = noise()
    content = encoded(wanted, "PPM")
    commented = content.replace(b"P6\n", b"P6\n# made by a camera\n", 1)
    for each in (content, commented):
        np.testing.assert_array_equal(np.asarray(load_image(each, formats=["ppm"])), np.asarray(wanted))
    refused(b"P6 #" + b"x" * 1_000_000 + b"\n1 1 255\n123", "PPM in text form", formats=["ppm"])


def test_a_bmp_whose_decoder_is_slow_is_refused():
    content = bytearray(encoded(noise(), "BMP"))
    content[30] = 1
    refused(bytes(content), "BMP compressed by RLE8")


def test_only_the_listed_formats_are_read():
    refused(encoded(noise(), "GIF"), "is a GIF image, and only JPEG, PNG are read here", formats=("jpeg", "PNG"))
    assert load_image(encoded(noise(), "PNG"), formats=("jpeg", "PNG")).size == (50, 40)
    refused(encoded(noise(), "PNG"), "image format 'EPS' is unknown; vtx reads JPEG", formats=("eps",))
    refused(encoded(noise(), "PNG"), "list of image formats is empty", formats=())


def test_decoding_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(image, "MAX_DECODE_SECONDS", -1.0)
    refused(encoded(noise(), "JPEG"), "takes over -1 s to decode, the limit")


def test_what_is_not_pixels_never_reaches_a_decoder():
    clean = encoded(noise(), "JPEG")
    comment, profile = b"\xff\xfe\0\6spam", b"\xff\xe2\0\x10ICC_PROFILE\0\1\1"
    dirty = clean[:2] + comment + profile + clean[2:] + b"a second picture stands here"
    container = formats.read_container("x", dirty)
    assert b"".join(container.pieces) == clean
    dirty_png = png(chunk(b"tEXt", b"a\0b"), chunk(b"iCCP", b"x\0\0y"), chunk(b"acTL", bytes(8)))
    assert b"".join(formats.read_container("x", dirty_png).pieces) == png()


def test_the_whole_file_is_not_decoded_again_for_later_frames():
    frames = [noise(30, 20), noise(30, 20).rotate(180)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[::-1] * 20)
    pieces = formats.read_container("x", content).pieces
    assert sum(map(len, pieces)) < len(content) / 20


def test_a_pillow_decoder_that_sees_another_size_is_not_run(monkeypatch):
    content = encoded(noise(), "JPEG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    start = content.index(b"\xff\xc0")
    larger = content[: start + 5] + struct.pack(">HH", 9_000, 9_000) + content[start + 9 :]
    refused(larger, "9000x9000 pixels; the limit is")


@pytest.mark.parametrize("kind", DEFAULT_FORMATS)
def test_decoding_raises_no_warning_and_leaves_the_filters_of_the_process_alone(kind):
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = list(warnings.filters)
        load_image(encoded(noise(), kind))
        assert list(warnings.filters) == inside
    assert list(warnings.filters) == before


def test_threads_decode_side_by_side(monkeypatch):
    """Two decoders meet at a barrier inside Pillow: with a shared lock the second would never come."""
    barrier, real = threading.Barrier(2, timeout=WAIT), Image.Image.getbands
    content, errors = encoded(noise(), "PNG"), []

    def meeting(self: Image.Image) -> tuple[str, ...]:
        barrier.wait()
        return real(self)

    def load() -> None:
        try:
            load_image(content)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(Image.Image, "getbands", meeting)
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize("form", ['tiff:Orientation="6"', "<tiff:Orientation>6</tiff:Orientation>"])
def test_xmp_turns_a_picture_that_has_no_exif(kind, form):
    packet = f"<x:xmpmeta>{form}</x:xmpmeta>".encode()
    content = encoded(noise(30, 20), kind, xmp=packet)
    assert load_image(content).size == (20, 30)
    exif = Image.Exif()
    exif[0x0112] = 1
    assert load_image(encoded(noise(30, 20), kind, xmp=packet, exif=exif)).size == (30, 20)


@pytest.mark.parametrize("form", TEXT_CHUNKS)
def test_a_png_is_turned_by_its_texts_as_pillow_does(form):
    content = TEXT_CHUNKS[form]
    assert Image.open(io.BytesIO(content)).getexif()[0x0112] == 6
    assert load_image(content).size == image_size(content) == (20, 30)


def test_an_exif_chunk_comes_before_the_texts():
    upright = chunk(b"eXIf", EXIF_BLOCK[6:].replace(b"\x06", b"\x01"))
    raw = chunk(b"tEXt", b"Raw profile type exif\0" + RAW_PROFILE)
    assert load_image(with_chunks(noise(30, 20), upright, raw)).size == (30, 20)


@pytest.mark.parametrize("cut", [1, 8, 25, 40, 60])
def test_a_damaged_text_leaves_the_picture_as_it_stands(cut):
    raw, packed = RAW_PROFILE[:cut], zlib.compress(RAW_PROFILE)[:cut]
    lead = b"Raw profile type exif\0"
    for content in (png(chunk(b"tEXt", lead + raw)), png(chunk(b"zTXt", lead + b"\0" + packed))):
        assert load_image(content).size == (8, 8)
    bomb = zlib.compress(b"\nexif\n 1\n" + bytes(1 << 24))
    assert load_image(png(chunk(b"zTXt", lead + b"\0" + bomb))).size == (8, 8)


def test_a_damaged_exif_block_leaves_the_picture_as_it_stands():
    for block in (b"", b"II", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0", b"hello" * 9):
        content = encoded(noise(30, 20), "JPEG")
        segment = b"\xff\xe1" + struct.pack(">H", 8 + len(block)) + b"Exif\0\0" + block
        assert load_image(content[:2] + segment + content[2:]).size == (30, 20)


def test_a_hostile_file_costs_little_cpu():
    """The margin is wide: each of these took from 10 to 40 seconds without limits."""
    start = time.thread_time()
    refused(progressive(2000, 10_000), "scans")
    refused(png(chunk(b"teSt") * 2_000_000), "chunks")
    refused(b"P3 3000 3000 255\n" + b"1 " * 27_000_000, "PPM")
    assert time.thread_time() - start < 8


@pytest.mark.parametrize(
    ("brand", "message"),
    [
        (b"heic", "a HEIC image; vtx reads JPEG"),
        (b"mif1", "a HEIC image"),
        (b"avif", "a AVIF image"),
        (b"crx ", "a CR3 image; vtx reads JPEG"),
        (b"isom", "an MP4 video, not an image; give it as a video, or a frame of it as an image"),
        (b"qt  ", "an MP4 video"),
    ],
)
def test_files_in_mp4s_container_are_called_what_they_are(brand, message):
    content = b"\0\0\0\x18ftyp" + brand + bytes(8)
    refused(content, message)
    assert (container(content) is None) == ("video" not in message)
