"""The ladders of tiles and resolutions that vtx-fit tries, by what they change for the images of the questions."""

from __future__ import annotations

import pytest

from vtx.runtime.vision.layout import Layout, limited_layout
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.budget import TokenBudget
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.tools.fit.settings import ImageLimit, limits_of

NEXT = Anyres(336, 24, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), rounded=True)
INTERN = Tiles(448, 256, 1, 12)
QWEN = Native(14, 2, 3136, 12_845_056)
GEMMA = TokenBudget(16, 3, 280)
LARGE, WIDE, SMALL = (1280, 960), (1600, 400), (300, 300)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layout", "sizes", "tokens"),
    [
        (NEXT, [LARGE], [2340, 1368, 577]),  # the last is the squeezed image alone
        (NEXT, [(672, 336)], [1776, 577]),
        (INTERN, [LARGE], [3328, 1792, 256]),  # of three tiles none has its shape
        (INTERN, [SMALL], [256]),
        (QWEN, [LARGE], [1564, 782, 391, 195]),
        (GEMMA, [LARGE], [266, 130, 63]),
        (GEMMA, [], []),
        (QWEN, [(20_000, 20)], []),  # refused when it is asked about
    ],
)
def test_each_limit_leaves_about_half_of_the_tiles_or_tokens(
    layout: Layout, sizes: list[tuple[int, int]], tokens: list[int]
) -> None:
    limits = limits_of(layout, lambda: sizes)
    found = [limited_layout(layout, *limit).count(*sizes[0]) for limit in (ImageLimit(), *limits)] if tokens else limits
    assert len(found) == len(tokens)
    assert all(abs(a - b) <= 0.1 * b for a, b in zip(found, tokens, strict=True)), found


def test_a_limit_that_changes_nothing_for_the_images_is_left_out() -> None:
    assert limits_of(INTERN, lambda: [SMALL]) == []
    assert len(limits_of(INTERN, lambda: [SMALL, LARGE])) == 2
    assert limits_of(NEXT, lambda: [WIDE]) == limits_of(NEXT, lambda: [WIDE, WIDE])


def test_a_model_with_images_of_one_size_reads_none_of_them() -> None:
    def unread() -> list[tuple[int, int]]:
        raise AssertionError("the sizes are not needed")

    assert limits_of(Single(576), unread) == []
