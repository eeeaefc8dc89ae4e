"""Fewer or more tokens of one image: tokens and pixels of transformers' processors with the limit that it means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.checkpoint.families.gemma.gemma4 import PROCESSOR
from vtx.exporter.checkpoint.processor import image_settings
from vtx.runtime.errors import RequestError
from vtx.runtime.vision.layout import Layout, check_image_tokens, sized_layout
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.budget import BUDGETS, TokenBudget
from vtx.runtime.vision.layouts.crops import Crops
from vtx.runtime.vision.layouts.marked import MarkedTiles
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.native_tiles import NativeTiles
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.slices import Slices
from vtx.runtime.vision.layouts.tiles import Tiles

GEMMA = TokenBudget(16, 3, 280, 1120)
QWEN = Native(14, 2, 56 * 56, 12_845_056)
LFM = NativeTiles(16, 2, 64 * 1024, 256 * 1024, 512, 2, 10, 2.0, True)
TILED: dict[str, Layout] = {
    "tiles": Tiles(448, 256, 1, 12),
    "marked": MarkedTiles(512, 64, 4, 17),
    "crops": Crops(896, 256, 256, 4, 1.2),
    "anyres": Anyres(336, 24, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), rounded=True),
    "slices": Slices(16, 4, 448, 9, True),
    "native_tiles": LFM,
}
SIZES = (17, 19), (64, 64), (100, 60), (640, 480), (480, 640), (300, 900), (1024, 484), (512, 14), (33, 77), (800, 800)
SETTINGS = image_settings({}, [PROCESSOR])


def patches_of(view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The patches of Gemma 4 of a view [3, height, width], [patches, 768]."""
    _, height, width = view.shape
    return view.reshape(3, height // 16, 16, width // 16, 16).transpose(1, 3, 2, 4, 0).reshape(-1, 768)


@pytest.mark.parametrize(
    "budget", [pytest.param(budget, marks=[pytest.mark.slow] if budget > 280 else []) for budget in BUDGETS]
)
def test_each_budget_of_gemma_4_has_tokens_and_pixels_of_transformers(budget: int) -> None:
    from transformers import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)  # type: ignore[no-untyped-call]
    for number, size in enumerate(SIZES):
        image = random_image(number, size)
        layout = sized_layout(GEMMA, budget, *size)
        wanted = processor([image], return_tensors="np")
        patches = patches_of(np.asarray(layout.views(image, SETTINGS)[0]))
        assert [layout.count(*size)] == wanted["num_soft_tokens_per_image"]
        assert_near(patches, wanted["pixel_values"][0][: len(patches)], 1e-6)


@pytest.mark.parametrize("tokens", [16, 70, 256, 1280])
def test_tokens_of_qwen_are_those_of_its_processor_with_as_many_pixels(tokens: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for width, height in SIZES:
        high, wide = smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=tokens * 28**2)
        count = high * wide // 28**2
        sized = sized_layout(QWEN, tokens, width, height)
        assert sized.count(width, height) <= tokens
        if count <= tokens:  # a strip has more there
            assert sized.count(width, height) == count
            image = Image.new("RGB", (width, height))
            assert np.asarray(sized.views(image, SETTINGS)[0]).shape == (3, high, wide)


@pytest.mark.parametrize("name", TILED)
def test_of_an_image_in_tiles_the_most_fit_that_have_no_more_tokens(name: str) -> None:
    layout = TILED[name]
    for size in SIZES:
        whole = layout.count(*size)
        counts = [limited.count(*size) for limited in map(layout.limited, range(1, layout.max_views + 1))]
        fewest = min(counts)
        for tokens in {fewest, (fewest + whole) // 2, whole}:
            fitting = max(count for count in counts if count <= tokens)
            assert sized_layout(layout, tokens, *size).count(*size) == fitting, (size, tokens)
        if name != "native_tiles":
            with pytest.raises(RequestError, match=f"has at least {fewest} here; raise it"):
                sized_layout(layout, fewest - 1, *size)


def test_an_image_that_is_in_one_piece_already_shrinks_where_pieces_have_any_size() -> None:
    assert LFM.count(2000, 1500) > 512
    sized = sized_layout(LFM, 100, 2000, 1500)
    assert 64 < sized.count(2000, 1500) <= 100
    assert sized.passes(2000, 1500) == 1


@pytest.mark.parametrize("name", TILED)
def test_details_are_one_piece_and_all_that_the_bundle_allows(name: str) -> None:
    layout = TILED[name]
    assert sized_layout(layout, "low", 2000, 1500).passes(2000, 1500) == 1
    assert sized_layout(layout, "auto", 2000, 1500) is sized_layout(layout, None, 2000, 1500) is layout
    assert sized_layout(layout, "high", 2000, 1500) is layout


def test_details_of_a_budget_and_of_native_resolution() -> None:
    counts = [sized_layout(GEMMA, detail, 672, 672).count(672, 672) for detail in ("low", "auto", "high")]
    assert counts == [64, 256, 1089]
    assert sized_layout(QWEN, "low", 2000, 1500).count(2000, 1500) == QWEN.within(512**2).count(2000, 1500) < 350


def test_a_limit_between_two_budgets_is_the_smaller_and_limits_at_load_hold() -> None:
    assert sized_layout(GEMMA, 300, 672, 672) == replace(GEMMA, tokens=280)
    limited = GEMMA.within(140 * 48**2)
    assert [*limited.budgets] == [140, 70]
    with pytest.raises(RequestError, match="image_tokens is 280; images of this bundle have at most 140; lower it"):
        sized_layout(limited, 280, 672, 672)


def test_numbers_that_no_image_can_have_are_refused() -> None:
    with pytest.raises(RequestError, match="image_tokens is 63; an image of 9x9 pixels has at least 64 here; raise it"):
        sized_layout(GEMMA, 63, 9, 9)
    with pytest.raises(RequestError, match="image_tokens is 1121; images of this bundle have at most 1120; lower it"):
        sized_layout(GEMMA, 1121, 9, 9)
    for value, message in ((0, "image_tokens is 0"), (2.5, "image_tokens"), (True, "image_tokens"), ("big", "detail")):
        with pytest.raises(RequestError, match=message):
            check_image_tokens(GEMMA, value)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="every image of this model has 576 tokens; leave it out"):
        check_image_tokens(Single(576), 576)
    check_image_tokens(Single(576), "low")
