"""How many views an image has, said before there is one."""

from __future__ import annotations

import pytest

from tests.support.tiny import random_image
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.vision.layout import Layout
from vtx.runtime.vision.layouts.anyres import Anyres
from vtx.runtime.vision.layouts.longest import LongestEdge
from vtx.runtime.vision.layouts.marked import MarkedTiles
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.single import Single
from vtx.runtime.vision.layouts.tiles import Tiles

TILE = ImageSettings(None, (28, 28), "bicubic", None, 1 / 255, (0.5,) * 3, (0.5,) * 3)
OWN_SIZE = ImageSettings(None, None, "bicubic", None, 1 / 255, (0.5,) * 3, (0.5,) * 3)
ANYRES = Anyres(28, 2, ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84)), rounded=True)


@pytest.mark.parametrize("size", [(64, 36), (36, 64), (28, 28), (20, 90), (130, 110)])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Single(4), TILE),
        (ANYRES, TILE),
        (ANYRES.limited(1), TILE),
        (Tiles(28, 4, 1, 6), TILE),
        (Tiles(28, 4, 1, 1), TILE),
        (MarkedTiles(28, 4, 3, 7), TILE),
        (MarkedTiles(28, 4, 1, 1), TILE),
        (Native(7, 2, 196, 19600), OWN_SIZE),
        (LongestEdge(7, 2, 70, 7, marks=True), OWN_SIZE),
    ],
)
def test_passes_are_the_number_of_views(layout: Layout, settings: ImageSettings, size: tuple[int, int]) -> None:
    assert layout.passes(*size) == len(layout.views(random_image(1, size), settings)) <= layout.max_views
