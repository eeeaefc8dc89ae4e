"""Images as arrays, data URLs and bytes-like objects."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.files import source as module
from vtx.runtime.vision.files.source import bgr, read_data_url
from vtx.runtime.vision.image import load_image

RGB = np.random.default_rng(3).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def png(array: np.ndarray = RGB) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def pixels(source: object) -> np.ndarray:
    return np.asarray(load_image(source))  # type: ignore[arg-type]


def refused(source: object, match: str) -> None:
    with pytest.raises(ImageError, match=match) as caught:
        load_image(source)  # type: ignore[arg-type]
    assert ";" in str(caught.value), "the message names no fix"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\t"])
def test_base64_may_be_broken_into_lines(end: str) -> None:
    content = b"\x89PNG" + bytes(range(256))
    text = base64.b64encode(content).decode()
    lines = end.join(text[at : at + 76] for at in range(0, len(text), 76)) + end
    assert read_data_url(f"data:image/png;base64,{lines}", "image", len(content)) == content
    with pytest.raises(ImageError, match="over 0 MiB, the limit"):
        read_data_url(f"data:image/png;base64,{lines}", "image", len(content) - 3)


def test_an_array_is_rgb_unless_it_is_said_to_be_bgr():
    np.testing.assert_array_equal(pixels(RGB), RGB)
    np.testing.assert_array_equal(pixels(bgr(RGB[:, :, ::-1])), RGB)
    np.testing.assert_array_equal(pixels(bgr(np.ascontiguousarray(RGB[:, :, ::-1]))), RGB)


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::2], np.s_[3:9, 4:8], np.s_[::2, ::-3, ::-1]], ids=str)
def test_views_of_arrays_are_read_as_numpy_reads_them(view):
    np.testing.assert_array_equal(pixels(RGB[view]), RGB[view])


def test_grey_arrays_have_two_axes_or_one_channel():
    grey = RGB[:, :, 0]
    for array in (grey, grey[:, :, None]):
        np.testing.assert_array_equal(pixels(array), np.repeat(grey[:, :, None], 3, 2))
    refused(bgr(grey), "vtx.bgr got grey")


def test_a_fourth_channel_is_transparency_over_white_as_in_a_file():
    rgba = np.dstack([RGB, RGB[:, :, 1]])
    wanted = pixels(png(rgba))
    np.testing.assert_array_equal(pixels(rgba), wanted)
    np.testing.assert_array_equal(pixels(bgr(rgba[:, :, [2, 1, 0, 3]])), wanted)


def test_the_array_may_change_afterwards():
    array = RGB[:, :, 0].copy()
    image = load_image(array)
    array[:] = 0
    np.testing.assert_array_equal(np.asarray(image)[:, :, 0], RGB[:, :, 0])


def test_a_read_only_array_is_read():
    array = RGB.copy()
    array.flags.writeable = False
    np.testing.assert_array_equal(pixels(array), RGB)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (RGB / 255, r"float64, the limit is uint8 of 0 to 255; give \(array \* 255\)\.round\(\)\.astype\('uint8'\)"),
        (RGB.astype(np.float32), "float32"),
        (RGB.astype(np.int64), r"int64, .*; give array\.astype\('uint8'\) if its values are from 0 to 255"),
        (RGB > 5, r"bool, .*; give array\.astype\('uint8'\) \* 255"),
        (RGB.transpose(2, 0, 1), r"\[3, 20, 30\] has its channels first; give array\.transpose\(1, 2, 0\)"),
        (RGB[None], r"\[1, 20, 30, 3\] is a batch; give one image at a time: array\[0\]"),
        (RGB[0, 0], r"\[3\] is not an image; give \[height, width\]"),
        (RGB[:, :, :2], r"\[20, 30, 2\] is not an image"),
        (np.zeros((0, 5, 3), np.uint8), "5x0 pixels: there is nothing to see"),
        (np.zeros((1, 20_000, 3), np.uint8), "20000x1 pixels; the limit is"),
        (np.array(["a.png"]), "is not an image"),
    ],
    ids=str,
)
def test_other_arrays_are_refused_with_the_expression_that_fixes_them(array, match):
    refused(array, match)


def test_what_looks_like_an_array_is_refused_with_the_fix():
    refused(RGB.tolist(), "an object of type list is not an image; .*numpy.asarray makes one")
    refused(bgr("frame"), "vtx.bgr got a str; give it a numpy array")  # type: ignore[arg-type]


def test_tensors_are_refused_with_the_fix():
    torch = pytest.importorskip("torch")
    refused(torch.zeros(3, 4, 5), r"an object of type Tensor is not an image; .*permute\(1, 2, 0\)")


def url(content: bytes = png(), kind: str = "image/png;base64") -> str:
    return f"data:{kind}," + base64.b64encode(content).decode()


@pytest.mark.parametrize("kind", ["image/png;base64", "image/jpeg;base64", ";base64", "image/png;name=a;BASE64"])
def test_a_data_url_gives_the_pixels_of_its_file(kind):
    np.testing.assert_array_equal(pixels(url(kind=kind)), RGB)


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("data:image/png," + "x" * 900, "does not start with data:image/...;base64,"),
        ("data:", "does not start with"),
        ("data:text/html;base64,aGVsbG8=", "holds text/html, not an image"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,####", "is not valid base64"),
        ("data:image/png;base64,aGVsbG8", "is not valid base64"),
        ("data:image/png;base64,\N{SNOWMAN}", "is not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "is not an image that vtx reads"),
        ("https://example.com/a.png", "vtx fetches no https URLs; give the file's path or its bytes"),
        ("file:///tmp/a.png", "vtx fetches no file URLs"),
    ],
)
def test_other_urls_are_refused(address, match):
    refused(address, match)


def test_a_data_url_over_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(module.base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    refused("data:image/png;base64," + "A" * (-(-(1 << 20) // 3) * 4 + 1), "over 1 MiB, the limit; save it smaller")


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytes_like_objects_are_read(kind):
    np.testing.assert_array_equal(pixels(kind(png())), RGB)
