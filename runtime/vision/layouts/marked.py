"""Tiles row by row, each after text with its row and column, and after them the whole image: SmolVLM, Idefics3."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, check_tiles, image_layout
from vtx.runtime.vision.preprocess import preprocess
from vtx.runtime.vision.tokens import PromptImage

MAX_SIDE = 8  # tiles: transformers resizes nothing beyond 4,096 pixels
FRAME = "<fake_token_around_image>"
WHOLE = "<global-img>"
_TILE = "<row_{}_col_{}>"


@image_layout("marked")
@dataclass(frozen=True, slots=True)
class MarkedTiles(Layout):
    """Tiles of `tile` pixels a side and `tokens` each, up to `side` of them along the longer side, and the whole image.

    Images are resized to the largest size that gives at most `most` tiles, including the whole image; if that is one
    tile, it is the only one.
    """

    has_text = True
    tile: int
    tokens: int
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

    @property
    def max_tokens(self) -> int:
        return self.tokens * self.max_views

    def check(self, tower: TowerSpec) -> None:
        check_tiles(tower, self.tile, self.tokens)

    def limited(self, max_views: int) -> MarkedTiles:
        """With at most `max_views` tiles, the whole image included."""
        return replace(self, most=min(self.most, max_views))

    def count(self, width: int, height: int) -> int:
        return self.tokens * self.passes(width, height)

    def passes(self, width: int, height: int) -> int:
        return self._views(*self._grid(width, height))

    def prompt_image(self, width: int, height: int) -> PromptImage:
        """The prompt's text around the tokens of an image of this size, as transformers' processor prints it."""
        columns, rows = self._grid(width, height)
        if columns * rows == 1:
            return PromptImage((self.tokens,), (FRAME + WHOLE, FRAME))
        numbers = product(range(1, rows + 1), range(1, columns + 1))
        tiles = [FRAME + _TILE.format(row, column) for row, column in numbers]
        tiles[columns::columns] = ["\n" + tile for tile in tiles[columns::columns]]
        spans = (self.tokens,) * (columns * rows + 1)
        return PromptImage(spans, (*tiles, f"\n\n{FRAME}{WHOLE}", FRAME))

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        image = to_rgb(image)
        side = self.tile
        resample = Image.Resampling[settings.resample.upper()]
        image = image.resize(self._resized(*image.size), resample)
        columns, rows = self._grid(*image.size)
        image = image.resize((columns * side, rows * side), resample)
        if columns * rows == 1:
            return preprocess(image, settings)[None]
        corners = [(column * side, row * side) for row, column in product(range(rows), range(columns))]
        tiles = [image.crop((x, y, x + side, y + side)) for x, y in corners]
        return np.stack([preprocess(tile, settings) for tile in (*tiles, image)])

    @staticmethod
    def _views(columns: int, rows: int) -> int:
        return columns * rows + (columns * rows > 1)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of the tiles that cover an image of this size."""
        return self._covering(*self._resized(width, height))

    def _covering(self, width: int, height: int) -> tuple[int, int]:
        """Of a resized image: its longer side in whole tiles, and the shorter one as that makes it, in whole tiles."""
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            return columns, math.ceil(int(columns * self.tile / aspect) / self.tile)
        rows = math.ceil(height / self.tile)
        return math.ceil(int(rows * self.tile * aspect) / self.tile), rows

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image whose longer side has as many whole tiles as are allowed."""
        for side in range(self.side, 0, -1):
            size = resized_size(width, height, side * self.tile)
            if self._views(*self._covering(*size)) <= self.most:
                break
        return size


def resized_size(width: int, height: int, longer: int) -> tuple[int, int]:
    """The size with `longer` pixels along the longer side, the other one even, as transformers rounds it."""
    other = int(longer / (width / height)) if width >= height else int(longer * (width / height))
    other = max(other + other % 2, 1)
    return (longer, other) if width >= height else (other, longer)
