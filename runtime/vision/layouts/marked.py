"""Tiles row by row, each after text with its row and column, and after them the whole image: SmolVLM, Idefics3."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layout import TiledLayout, image_layout
from vtx.runtime.vision.plan import ImagePlan, Size, View

MAX_SIDE = 8  # tiles: transformers resizes nothing beyond 4,096 pixels
FRAME = "<fake_token_around_image>"
WHOLE = "<global-img>"
_TILE = "<row_{}_col_{}>"


@image_layout("marked")
@dataclass(frozen=True, slots=True)
class MarkedTiles(TiledLayout):
    """Tiles of `tile` pixels a side and `tokens` each, up to `side` of them along the longer side, and the whole image.

    Images are resized to the largest size that gives at most `most` tiles, including the whole image; if that is one
    tile, it is the only one.
    """

    side: int
    most: int

    def __post_init__(self) -> None:
        if min(self.tile, self.tokens, self.most) < 1 or not 1 <= self.side <= MAX_SIDE:
            raise BundleError(
                f"layout 'marked' has {self.side} tiles a side of {self.tile} pixels and {self.tokens} tokens, at most "
                f"{self.most} an image; it needs at least 1 of each and at most {MAX_SIDE} a side; export again"
            )

    @property
    def max_views(self) -> int:
        """A square image has the most tiles, but if fewer are allowed, a strip may come nearer to that number."""
        sides = product(range(1, self.side + 1), repeat=2)
        return max(views for a, b in sides if (views := a * b + (a * b > 1)) <= self.most)

    def limited(self, max_views: int) -> MarkedTiles:
        """With at most `max_views` tiles, the whole image included."""
        return replace(self, most=min(self.most, max_views))

    def plan(self, width: int, height: int) -> ImagePlan:
        """The text is that of transformers' processor."""
        size = self._resized(width, height)
        columns, rows = self._covering(*size)
        whole = View(self.tokens, (size, (columns * self.tile, rows * self.tile)))
        if columns * rows == 1:
            return ImagePlan((whole,), (FRAME + WHOLE, FRAME))
        numbers = product(range(1, rows + 1), range(1, columns + 1))
        tiles = [FRAME + _TILE.format(row, column) for row, column in numbers]
        tiles[columns::columns] = ["\n" + tile for tile in tiles[columns::columns]]
        return ImagePlan((*whole.tiles(columns, rows), whole), (*tiles, f"\n\n{FRAME}{WHOLE}", FRAME))

    @staticmethod
    def _views(columns: int, rows: int) -> int:
        return columns * rows + (columns * rows > 1)

    def _covering(self, width: int, height: int) -> Size:
        """Of a resized image: its longer side in whole tiles, and the shorter one as that makes it, in whole tiles."""
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            return columns, math.ceil(int(columns * self.tile / aspect) / self.tile)
        rows = math.ceil(height / self.tile)
        return math.ceil(int(rows * self.tile * aspect) / self.tile), rows

    def _resized(self, width: int, height: int) -> Size:
        """The size of an image whose longer side has as many whole tiles as are allowed."""
        for side in range(self.side, 0, -1):
            size = resized_size(width, height, side * self.tile)
            if self._views(*self._covering(*size)) <= self.most:
                break
        return size


def resized_size(width: int, height: int, longer: int) -> Size:
    """The size with `longer` pixels along the longer side, the other one even, as transformers rounds it."""
    other = int(longer / (width / height)) if width >= height else int(longer * (width / height))
    other = max(other + other % 2, 1)
    return (longer, other) if width >= height else (other, longer)
