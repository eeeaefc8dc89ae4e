import io
import json
import os
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.image_transforms import convert_to_rgb as hf_convert_to_rgb
from transformers.image_utils import load_image as hf_load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError, ImageError
from vtx.runtime.strict import Strict, json_value
from vtx.runtime.vision import image as module
from vtx.runtime.vision.files import source as source_module
from vtx.runtime.vision.image import image_size, load_image
from vtx.runtime.vision.preprocess import preprocess

PROCESSORS = {
    "clip-336": CLIPImageProcessorPil(size=336, crop_size=336),
    "clip-odd": CLIPImageProcessorPil(size={"shortest_edge": 45}, crop_size={"height": 29, "width": 31}),
    "clip-crop-beyond-resize": CLIPImageProcessorPil(size=40, crop_size=61, resample=2),
    "clip-crop-only": CLIPImageProcessorPil(do_resize=False, crop_size=30, do_normalize=False),
    "clip-nearest": CLIPImageProcessorPil(size=24, crop_size=24, resample=0, do_rescale=False),
    "siglip": SiglipImageProcessorPil(),
    "siglip-lanczos": SiglipImageProcessorPil(size={"height": 28, "width": 42}, resample=1, image_std=[0.5, 0.4, 0.3]),
    "llava": LlavaImageProcessorPil(size=56, crop_size=56),
    "llava-padded": LlavaImageProcessorPil(do_pad=True, size=56, crop_size=42),
    "llava-padded-uncropped": LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 33}, do_center_crop=False),
}
SIZES = [
    (1, 1),
    (2, 1),
    (31, 31),
    (336, 336),
    (20, 50),
    (300, 47),
    (47, 300),
    (61, 40),
    (40, 61),
    (641, 479),
    (1, 97),
]


def noise(width, height, bands=3):
    values = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if bands == 1 else values)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def expected(processor, image):
    return processor(image, return_tensors="np", input_data_format=None)["pixel_values"][0]


def ours(processor, image):
    return preprocess(image, image_settings(processor.to_dict()))


def png(width, height, *chunks):
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), *chunks]
    parts += [(b"IDAT", zlib.compress(bytes((width + 1) * min(height, 100)))), (b"IEND", b"")]
    framed = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def refused(source, *words):
    with pytest.raises(ImageError) as caught:
        load_image(source)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "the message names no cure"
    for word in words:
        assert word in message
    return caught.value


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_preprocess_gives_the_numbers_of_the_hf_processor(name, size):
    result, wanted = ours(PROCESSORS[name], noise(*size)), expected(PROCESSORS[name], noise(*size))
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result, wanted.astype(np.float32))


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from(["clip-odd", "siglip-lanczos", "llava-padded"]))
@hypothesis_settings(max_examples=60, deadline=None)
def test_preprocess_equals_hf_at_any_size(width, height, name):
    image = noise(width, height)
    np.testing.assert_array_equal(ours(PROCESSORS[name], image), expected(PROCESSORS[name], image))


@pytest.mark.parametrize("size", [(1, 98), (98, 1), (20, 1979)], ids=str)
def test_sides_that_differ_too_much_for_a_crop_are_refused(size):
    with pytest.raises(ImageError, match=r"its sides may differ at most 97-fold, .*; cut off some of its longer side"):
        ours(PROCESSORS["clip-336"], noise(*size))


@pytest.mark.parametrize("size", [(5, 487), (487, 5)], ids=str)
def test_sides_that_differ_as_much_as_a_crop_allows_give_the_numbers_of_hf(size):
    np.testing.assert_array_equal(
        ours(PROCESSORS["clip-336"], noise(*size)), expected(PROCESSORS["clip-336"], noise(*size))
    )


def test_a_square_too_large_to_pad_is_refused():
    with pytest.raises(ImageError, match=r"padded to a square it would be 9000x9000; the limit is 67,108,864"):
        ours(PROCESSORS["llava-padded"], Image.new("RGB", (9000, 1)))


def with_transparency(image, key):
    return encoded(image, "PNG", transparency=key)


RGB, RGBA = noise(50, 40), noise(50, 40, 4)
MODES = {
    "grey": encoded(noise(50, 40, 1), "PNG"),
    "one-bit": encoded(RGB.convert("1"), "PNG"),
    "grey-alpha": encoded(RGBA.convert("LA"), "PNG"),
    "palette": encoded(RGB.convert("P"), "PNG"),
    "palette-key": with_transparency(RGB.convert("P"), 5),
    "palette-alpha": with_transparency(RGB.convert("P"), bytes(range(256))),
    "rgb-key": with_transparency(RGB, RGB.getpixel((3, 3))),
    "grey-key": with_transparency(RGB.convert("L"), 7),
    "rgba": encoded(RGBA, "PNG"),
    "rgba-webp": encoded(RGBA, "WEBP", lossless=True),
    "cmyk-jpeg": encoded(RGB.convert("CMYK"), "JPEG"),
    "progressive": encoded(RGB, "JPEG", progressive=True),
    "bmp": encoded(RGB, "BMP"),
    "gif": encoded(RGB, "GIF", transparency=3),
    "animated-gif": encoded(RGB, "GIF", save_all=True, append_images=[RGB.rotate(90)]),
    "animated-png": encoded(RGBA, "PNG", save_all=True, append_images=[RGBA.rotate(90)]),
    "animated-webp": encoded(RGBA, "WEBP", save_all=True, append_images=[RGBA.rotate(90)]),
}


def hf_drops_transparency():
    return hf_convert_to_rgb(Image.new("RGBA", (1, 1))).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_as_in_the_hf_processor(mode):
    image = Image.open(io.BytesIO(MODES[mode]))
    if ("A" in image.getbands() or "transparency" in image.info) and hf_drops_transparency():
        pytest.skip("this transformers drops transparency; newer releases compose it over white, as vtx does")
    wanted = expected(PROCESSORS["clip-odd"], image)
    np.testing.assert_array_equal(ours(PROCESSORS["clip-odd"], load_image(MODES[mode])), wanted)


WIDE = np.random.default_rng(1).integers(0, 65536, (40, 50)).astype(np.uint16)


@pytest.mark.parametrize("form", ["file", "array", "big-endian", "tiff"])
def test_grey_of_16_bits_keeps_its_upper_8_as_colour_does(form):
    content = encoded(Image.fromarray(WIDE), "TIFF" if form == "tiff" else "PNG")
    sources = {
        "file": content,
        "array": Image.fromarray(WIDE),
        "big-endian": Image.frombytes("I;16B", (50, 40), WIDE.astype(">u2").tobytes()),
        "tiff": Image.open(io.BytesIO(content)),
    }
    result = np.asarray(load_image(sources[form]))
    np.testing.assert_array_equal(result, np.repeat((WIDE >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_the_transparent_grey_of_16_bits_is_one_value_of_65536():
    values = WIDE.copy()
    values[0, :3] = 0x1234, 0x1235, 0x1334
    image = Image.fromarray(values)
    image.info["transparency"] = 0x1234
    assert np.asarray(load_image(image))[0, :3, 0].tolist() == [255, 0x12, 0x13]


@pytest.mark.parametrize(("mode", "values"), [("I", "32-bit integers"), ("F", "floating-point numbers")])
def test_values_whose_white_is_unknown_are_refused(mode, values):
    refused(Image.new(mode, (5, 4), 100), f"values are {values}, whose white is unknown", "uint8")


def test_a_png_that_an_older_pillow_opens_as_32_bits_is_read_as_16():
    opened = Image.fromarray(WIDE.astype(np.int32))
    opened.format = "PNG"
    np.testing.assert_array_equal(np.asarray(load_image(opened))[:, :, 0], WIDE >> 8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_turns_the_image_upright_as_hf_load_image_does(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    noise(30, 20).save(path, kind, exif=exif)
    result = load_image(path)
    assert result.size == ((20, 30) if 5 <= orientation <= 8 else (30, 20))
    assert image_size(path) == image_size(Image.open(path)) == result.size
    np.testing.assert_array_equal(np.asarray(result), np.asarray(hf_load_image(str(path))))
    np.testing.assert_array_equal(np.asarray(result), np.asarray(load_image(Image.open(path))))


def test_compositing_in_bands_changes_nothing(monkeypatch):
    whole = np.asarray(load_image(MODES["palette-alpha"]))
    monkeypatch.setattr(module, "BAND_PIXELS", 130)
    np.testing.assert_array_equal(np.asarray(load_image(MODES["palette-alpha"])), whole)


def test_path_bytes_stream_and_pipe_give_the_same_pixels(tmp_path):
    content = encoded(RGB, "PNG")
    path = tmp_path / "wrong-extension.jpg"
    path.write_bytes(content)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as out:
        out.write(content)
    with os.fdopen(reader, "rb") as pipe:
        images = [load_image(s) for s in (str(path), path, content, io.BytesIO(content), pipe, RGB)]
    assert all(image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(RGB)) for image in images)


@pytest.mark.parametrize("content", [b"hello", b"%PDF-1.4\n", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x00" * 4000, b"<svg/>"])
def test_what_is_no_image_is_refused_with_the_formats(content, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    refused(path, "a.png", "is not an image", "JPEG")


def test_formats_beyond_the_list_are_refused():
    refused(encoded(RGB, "ICO"), "is not an image that vtx reads")
    refused(encoded(RGB, "TIFF"), "is a TIFF image; vtx reads JPEG, PNG", "give a PIL image")
    refused(encoded(RGB, "AVIF"), "is a AVIF image")


def test_an_empty_image_is_refused(tmp_path):
    (tmp_path / "a.png").touch()
    refused(tmp_path / "a.png", "a.png", "empty")
    refused(b"", "empty")
    refused(io.BytesIO(), "empty")


def gif(width, height, frame_width, frame_height):
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, frame_width, frame_height, 0) + b"\x02\x02\x4c\x01\x00;"


@pytest.mark.parametrize(
    "content",
    [
        png(60_000, 60_000),
        png(60_000, 4),
        png(4, 60_000),
        png(10_000, 9_000),  # between our limit and Pillow's
        png(8_193, 8_193),
        gif(60_000, 60_000, 60_000, 60_000),
        gif(9, 9, 60_000, 60_000),
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
    ],
    ids=range(8),
)
def test_too_many_pixels_are_refused_from_the_header_alone(content, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded := Mock())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(content, "pixels", "16,384 a side and 67,108,864 in total")
    decoded.assert_not_called()


def test_a_decompression_bomb_takes_no_memory():
    script = (
        "import sys\nfrom vtx.tools.common.memory import peak\nfrom vtx.runtime.vision.image import load_image\n"
        "from vtx.runtime.errors import ImageError\ncontent = sys.stdin.buffer.read()\nbefore = peak()\n"
        "try:\n    load_image(content)\nexcept ImageError as error:\n    print(error)\n"
        "print(peak() - before)"
    )
    bomb = png(13_000, 13_000, (b"IDAT", zlib.compress(bytes(64 << 20), 9)))
    done = subprocess.run([sys.executable, "-c", script], input=bomb, capture_output=True, check=True)
    message, grown = done.stdout.decode().splitlines()
    assert "13000x13000 pixels" in message
    assert int(grown) < 16 << 20
    assert done.stderr == b""


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_huge_text_and_profiles_are_passed_over(kind):
    assert load_image(png(8, 8, (kind, b"a\0\0" + zlib.compress(bytes(100 << 20), 9)))).size == (8, 8)
    assert load_image(png(8, 8, *[(b"tEXt", b"a\0" + b"x" * 900_000)] * 40)).size == (8, 8)


def test_an_image_without_pixels_is_refused():
    refused(Image.new("RGB", (0, 5)), "0x5 pixels", "nothing")
    refused(png(0, 5), "0x5 pixels", "nothing")


def test_a_given_image_meets_the_same_limits():
    refused(Image.new("1", (16_385, 1)), "16385x1 pixels")


def test_files_and_streams_over_the_byte_limit_are_refused_while_reading(tmp_path, monkeypatch):
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:] = b"\xff" * len(buffer)
            return len(buffer)

    monkeypatch.setattr(source_module, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for source in (path, Endless(), io.BufferedReader(Endless()), bytes((1 << 20) + 1)):
        refused(source, "over 1 MiB, the limit")


def test_directory_missing_device_and_fifo_are_refused_without_waiting(tmp_path):
    refused(tmp_path, "is a directory")
    refused(tmp_path / "no.png", "no.png", "does not exist")
    refused(tmp_path / "no" / "no.png", "does not exist")
    refused("/dev/zero", "device or pipe")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "device or pipe")
    refused("a\0b", "cannot be opened")
    refused("a" * 5000, "cannot be opened (File name too long)")
    refused(tmp_path / "line\nbreak.png", "does not exist")
    refused(7, "int is not an image")


def test_no_permission_is_refused_by_name(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret.png"
    path.write_bytes(MODES["grey"])
    monkeypatch.setattr(os, "open", denied)
    refused(path, "secret.png", "permissions")


def test_unreadable_streams_are_refused():
    closed = io.BytesIO(b"x")
    closed.close()
    refused(closed, "cannot be read")
    refused(io.StringIO("text"), "cannot be read")


def test_memory_running_out_is_an_image_error(monkeypatch):
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", exhausted)
    with pytest.raises(ImageError, match="no memory left to resize"):
        preprocess(RGB, image_settings({}))
    monkeypatch.setattr(Image.Image, "convert", exhausted)
    assert isinstance(refused(MODES["grey"], "no memory").__cause__, MemoryError)


def test_a_decoder_without_memory_is_not_taken_for_damage(monkeypatch):
    def exhausted(*args, **kwargs):
        raise OSError(f"{ImageFile.ERRORS[-9]} when reading image file")

    monkeypatch.setattr(ImageFile.ImageFile, "load", exhausted)
    refused(MODES["grey"], "no memory left to decode")


def test_threads_may_load_at_the_same_time():
    content, results = MODES["palette-alpha"], []
    threads = [threading.Thread(target=lambda: results.append(load_image(content).tobytes())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [load_image(content).tobytes()] * 8


def test_preprocess_leaves_the_image_as_it_was():
    image = noise(60, 40)
    before = image.tobytes()
    ours(PROCESSORS["llava-padded"], image)
    assert image.tobytes() == before


def test_importing_the_module_loads_only_pillow_and_numpy():
    script = "import sys, vtx.runtime.vision.image as i; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in ("torch", "transformers", "onnxruntime", "tokenizers", "jinja2"))


SETTINGS = ImageSettings((122, 116, 104), 336, "bicubic", (336, 300), 1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def test_settings_survive_json():
    assert Strict().read(ImageSettings, json.loads(json.dumps(json_value(SETTINGS))), "image") == SETTINGS
    assert SETTINGS.size == (336, 300)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad", [256, 0, 0]),
        ("pad", [0, 0]),
        ("pad", 0),
        ("resize", 0),
        ("resize", True),
        ("resize", "336"),
        ("resize", [336]),
        ("resize", 10**9),
        ("resample", "cubic"),
        ("resample", 3),
        ("resample", []),
        ("crop", [336, -1]),
        ("crop", 336),
        ("crop", None),  # the shortest edge alone leaves the longer one open
        ("rescale", 0),
        ("rescale", float("nan")),
        ("mean", [0.5, 0.5]),
        ("mean", [0.5, 0.5, float("inf")]),
        ("mean", 0.5),
        ("std", [0.5, 0.5, 0.0]),
        ("std", [0.5, 0.5, None]),
        ("std", [0.5, 0.5, True]),
    ],
)
def test_settings_refuse_nonsense_by_name(key, value):
    values = {**json_value(SETTINGS), "pad": None, key: value}
    with pytest.raises(BundleError, match=f"image(:| setting) {key if value is not None else 'crop'} "):
        Strict().read(ImageSettings, values, "image")


def test_settings_refuse_unknown_and_missing_keys():
    values = json_value(SETTINGS)
    with pytest.raises(BundleError, match="flip"):
        Strict().read(ImageSettings, {**values, "flip": True}, "image")
    del values["std"]
    with pytest.raises(BundleError, match="std"):
        Strict().read(ImageSettings, values, "image")
    with pytest.raises(BundleError, match="not an object"):
        Strict().read(ImageSettings, [], "image")
