"""Images at native resolution: pixels, grids and counts as transformers' processor has them, whatever the shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.tiny import random_image
from tests.support.towers import tower_spec
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.vision.layout import limited_layout, settings_for
from vtx.runtime.vision.layouts import read_layout, spec_of
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.tokens import ImageTokens

TINY = Native(patch=14, merge=2, min_pixels=4 * 784, max_pixels=40 * 784)
PUBLISHED = Native(patch=14, merge=2, min_pixels=3136, max_pixels=12_845_056)
SETTINGS = ImageSettings(
    pad=None, resize=None, resample="bicubic", crop=None, rescale=1 / 255,
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip
SHAPES = [
    (80, 60), (60, 80), (56, 56), (40, 40), (17, 19), (300, 30), (30, 300), (9, 200), (113, 57), (131, 257), (256, 255),
    (600, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": TINY.min_pixels, "longest_edge": TINY.max_pixels}
    return Qwen2VLImageProcessorPil(size=size)


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_grids_and_counts_equal_transformers(processor: Any, shape: tuple[int, int]) -> None:
    image = random_image(3, shape)
    found = processor(images=image, return_tensors="np")
    time, rows, columns = found["image_grid_thw"][0].tolist()
    view = TINY.views(image, SETTINGS)
    assert (1, 3, 14 * rows, 14 * columns) == view.shape
    assert time == 1
    assert TINY.count(*shape) == rows * columns // 4 <= TINY.max_tokens
    # their patches stand square by square, each twice for two moments
    squares = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    for moment in range(2):
        picture = squares[:, :, :, :, :, moment].transpose(4, 0, 2, 5, 1, 3, 6).reshape(view[0].shape)
        np.testing.assert_array_equal(view[0], picture)


def test_the_published_counts() -> None:
    assert PUBLISHED.count(1920, 1080) == 69 * 39
    assert PUBLISHED.count(8000, 6000) <= PUBLISHED.max_tokens == 16_384
    counts = [PUBLISHED.count(width, height) for width in range(46, 9000, 371) for height in range(45, 9000, 523)]
    assert max(counts) <= PUBLISHED.max_tokens
    assert PUBLISHED.min_tokens == 4


def test_no_shape_gives_more_tokens_than_the_layout_says() -> None:
    shapes = [(width, height) for width in range(1, 700, 9) for height in range(1, 700, 7)]
    for layout in (TINY, TINY.within(784), TINY.within(3 * 784), replace(TINY, min_pixels=TINY.max_pixels)):
        counts = [layout.count(*shape) for shape in shapes if max(shape) <= 200 * min(shape)]
        assert 1 <= min(counts) <= max(counts) <= layout.max_tokens


def test_tokens_stand_at_their_rows_and_columns() -> None:
    (wide, high), hidden = (100, 60), np.zeros((8, 4), np.float32)
    tokens = TINY.arrange([ImageTokens.one_per_patch(hidden)], wide, high, np.zeros((0, 4), np.float32))
    assert TINY.count(wide, high) == 8
    assert tokens.offsets is not None
    assert tokens.offsets.tolist() == [[0, row, column] for row in range(2) for column in range(4)]
    assert tokens.positions == 4
    some = tokens.take(np.array([1, 6]))
    assert some.offsets is not None
    assert some.offsets.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert some.positions == 4


def test_the_most_pixels_that_fit_are_found() -> None:
    sizes = [(200, 150), (60, 80)]
    assert sum(TINY.count(*size) for size in sizes) == 41
    pixels = TINY.fitting(sizes, 30)
    assert pixels is not None
    assert sum(TINY.within(pixels).count(*size) for size in sizes) <= 30
    more = TINY.within(pixels + 784)
    assert sum(more.count(*size) for size in sizes) > 30
    assert TINY.fitting(sizes, 1) is None


def test_limits_are_refused_where_they_have_no_meaning() -> None:
    with pytest.raises(RequestError, match="max_pixels is 783; one token takes 28 x 28"):
        TINY.within(783)
    with pytest.raises(RequestError, match="in one piece; use max_pixels"):
        limited_layout(TINY, 3, None)
    with pytest.raises(RequestError, match="max_pixels has no effect here"):
        limited_layout(Single(16), None, 9999)
    with pytest.raises(RequestError, match="of any shape at native resolution; leave it out"):
        settings_for(TINY, SETTINGS, "pad")
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        TINY.count(603, 3)
    with pytest.raises(ImageError, match="its sides may differ at most 200-fold"):
        TINY.views(Image.new("RGB", (1, 201)), SETTINGS)


@pytest.mark.parametrize(
    "changes", [{"min_pixels": 40 * 784 + 1}, {"max_pixels": 1 << 40}, {"patch": 0}, {"merge": 99}]
)
def test_what_is_no_layout_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BundleError, match="layout 'native' has"):
        replace(TINY, **changes)


def test_a_manifest_must_say_what_the_tower_does() -> None:
    spec = spec_of(TINY)
    tower = tower_spec(168, 14, 36, 2, "rotary")
    assert read_layout(spec, tower) == TINY
    for other in (replace(tower, square=1), replace(tower, positions="table")):
        with pytest.raises(BundleError, match="the image layout has tokens of 2 x 2 patches of 14 pixels"):
            read_layout(spec, other)
    with pytest.raises(BundleError, match="min_tokens 5 is not that of 'native'"):
        read_layout(replace(spec, min_tokens=5), tower)
