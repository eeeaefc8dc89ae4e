"""Images up to a longest edge: sizes, pixels and rows of tokens of transformers' own processor, for every edge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.checkpoint.families.pixtral import PROCESSOR
from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layout import sized_layout
from vtx.runtime.vision.layouts.longest import LongestEdge

PIXTRAL = LongestEdge(16, 1, 1024, 16, marks=True)
MISTRAL3 = LongestEdge(14, 2, 1540, 28, marks=True)
LIGHTON = LongestEdge(14, 2, 1540, 14, marks=False)
LAYOUTS = {"pixtral": PIXTRAL, "mistral3": MISTRAL3, "lighton": LIGHTON}
SIZES = (
    (33, 29),
    (64, 64),
    (100, 60),
    (640, 480),
    (480, 640),
    (300, 900),
    (1024, 484),
    (512, 40),
    (1541, 777),
    (1999, 3000),
)
SETTINGS = image_settings({"image_processor_type": PROCESSOR.name}, [PROCESSOR])


@pytest.mark.slow
@pytest.mark.parametrize("edge", [400, 500, 1024])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_and_pixels_are_those_of_transformers(name: str, edge: int) -> None:
    from transformers import PixtralImageProcessorPil

    layout = replace(LAYOUTS[name], longest=edge)
    processor = PixtralImageProcessorPil(size={"longest_edge": edge}, patch_size=layout.step)  # type: ignore[no-untyped-call]
    for number, size in enumerate(SIZES):
        image = random_image(number, size)
        expected = processor([image], return_tensors="np")
        high, wide = expected["image_sizes"][0]
        assert layout.count(*size) == (high // layout.unit) * (wide // layout.unit) <= layout.max_tokens
        views = np.asarray(layout.views(image, SETTINGS))
        assert_near(views, expected["pixel_values"], 1e-6)


def test_text_ends_each_row_and_the_image() -> None:
    image = MISTRAL3.prompt_image(100, 60)
    assert image.spans == (4, 4, 4)
    assert image.text("[IMG]") == "[IMG][IMG_BREAK][IMG][IMG_BREAK][IMG][IMG_END]"
    assert LIGHTON.prompt_image(100, 60).spans == (8,)
    assert (PIXTRAL.has_text, LIGHTON.has_text) == (True, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_request_gets_the_longest_edge_with_at_most_its_tokens(name: str) -> None:
    layout = LAYOUTS[name]
    for size in ((640, 480), (1000, 100), (2000, 3000)):
        for tokens in (30, 200, 1000):
            sized = sized_layout(layout, tokens, *size)
            assert isinstance(sized, LongestEdge)
            assert sized.count(*size) <= tokens
            if sized.longest < layout.longest:
                longer = replace(sized, longest=min(sized.longest + layout.step, layout.longest))
                assert longer.count(*size) > tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_largest_edge_that_fits_leaves_room_for_the_ends_of_rows(name: str) -> None:
    layout = LAYOUTS[name]
    sizes = [(640, 480), (300, 900)]

    def room(smaller: LongestEdge) -> int:
        images = [smaller.prompt_image(*size) for size in sizes]
        return sum(image.tokens + sum(map(bool, image.texts)) for image in images)

    for tokens in (60, 500, 5000):
        pixels = layout.fitting(sizes, tokens)
        assert pixels is not None
        fitting = layout.within(pixels)
        assert room(fitting) <= tokens
        if fitting.longest < layout.longest:
            assert room(layout.within((fitting.longest + layout.step) ** 2)) > tokens


def test_fewer_pixels_are_a_shorter_edge_and_never_a_longer_one() -> None:
    assert [PIXTRAL.within(pixels).longest for pixels in (10**9, 1024**2, 1024**2 - 1, 256)] == [1024, 1024, 1008, 16]
    with pytest.raises(RequestError, match="max_pixels is 255; one token takes 16 x 16; raise it"):
        PIXTRAL.within(255)
    assert PIXTRAL.fitting([(64, 64)] * 3, 2) is None


def test_an_image_of_a_pixel_has_a_token_and_a_strip_a_row() -> None:
    assert [LIGHTON.count(*size) for size in ((1, 1), (1, 2000), (2000, 1))] == [1, 55, 55]


@pytest.mark.parametrize("wrong", [{"longest": 15}, {"step": 0}, {"longest": 100_000}])
def test_a_layout_without_room_for_a_token_or_beyond_the_limit_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BundleError, match=r"layout 'longest' has edges of .*export the bundle again"):
        replace(PIXTRAL, **wrong)
