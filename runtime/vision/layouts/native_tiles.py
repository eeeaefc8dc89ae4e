"""Small images at native resolution, large ones in tiles row by row and then as a whole: LFM2-VL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, Views, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.runtime.vision.preprocess import normalised
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, PromptImage

_START = "<|image_start|>"
_END = "<|image_end|>"
_WHOLE = "<|img_thumbnail|>"
_TILE = "<|img_row_{}_col_{}|>"


@image_layout("native_tiles")
@dataclass(frozen=True, slots=True)
class NativeTiles(Native):
    """As `Native`, but text has positions of one part, and images of over `tolerance` times `max_pixels` are tiled.

    They have `fewest` to `most` tiles of `tile` pixels a side, and with `thumbnail` the whole image as a small one has
    it. `most` of 1: no image is tiled.
    """

    has_text = True
    tile: int
    fewest: int
    most: int
    tolerance: float
    thumbnail: bool

    def __post_init__(self) -> None:
        super(NativeTiles, self).__post_init__()
        tiled = 2 <= self.fewest <= self.most <= MAX_TILES
        if not (tiled or self.fewest == self.most == 1) or self.tile % self.unit or not self.tolerance >= 1:
            raise BundleError(
                f"layout 'native_tiles' has {self.fewest} to {self.most} tiles of {self.tile} pixels for images of "
                f"over {self.tolerance} times the pixels of small ones; it needs 2 to {MAX_TILES} tiles of whole "
                f"tokens of {self.unit} pixels, or 1, and 1 times or more; export again"
            )

    @property
    def max_tokens(self) -> int:
        overview = super(NativeTiles, self).max_tokens
        return overview if self.most == 1 else max(overview, self.most * self._tile_tokens + self.thumbnail * overview)

    @property
    def max_views(self) -> int:
        return 1 if self.most == 1 else self.most + self.thumbnail

    @property
    def _tile_tokens(self) -> int:
        return (self.tile // self.unit) ** 2

    def check(self, tower: TowerSpec) -> None:
        if (self.patch, self.merge, self.tile) != (tower.patch, tower.square, tower.image) or (
            tower.positions != "stretched"
        ):
            raise BundleError(
                f"vtx.json: the image layout has tokens of {self.merge} x {self.merge} patches of {self.patch} pixels "
                f"and tiles of {self.tile}, the tower of {tower.square} x {tower.square} of {tower.patch} and tiles "
                f"of {tower.image}; export the bundle again"
            )

    def limited(self, max_views: int) -> NativeTiles:
        """With at most `max_views` tiles, the whole image included."""
        most = min(self.most, max_views - self.thumbnail)
        if most < 2:
            return replace(self, fewest=1, most=1)
        return replace(self, fewest=min(self.fewest, most), most=most)

    def within(self, max_pixels: int) -> NativeTiles:
        if self.most > 1:
            raise RequestError(
                "max_pixels has no effect on tiles: this model sees large images in tiles of one size; use max_tiles "
                "(--max-tiles), 1 for none"
            )
        limited = super(NativeTiles, self).within(max_pixels)
        assert isinstance(limited, NativeTiles)
        return limited

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        return None if self.most > 1 else super(NativeTiles, self).fitting(sizes, tokens)

    def choices(self, tokens: int) -> Iterator[Layout]:
        for views in range(self.max_views, 1, -1):
            yield self.limited(views)
        yield from super(NativeTiles, self.limited(1)).choices(tokens)

    def low(self) -> Layout:
        return self.limited(1)

    def count(self, width: int, height: int) -> int:
        return self.prompt_image(width, height).tokens

    def passes(self, width: int, height: int) -> int:
        return len(self.prompt_image(width, height).spans)

    def prompt_image(self, width: int, height: int) -> PromptImage:
        """The prompt's text around the tokens of an image of this size, as transformers' processor prints it."""
        columns, rows = self._grid(width, height)
        tiles = self._tiles(width, height)
        if tiles is None:
            return PromptImage((columns * rows,), (_START, _END))
        numbers = product(range(1, tiles[1] + 1), range(1, tiles[0] + 1))
        spans = [self._tile_tokens] * (tiles[0] * tiles[1])
        texts = [_TILE.format(*number) for number in numbers]
        if self.thumbnail:
            spans = [*spans, columns * rows]
            texts = [*texts, _WHOLE]
        return PromptImage(tuple(spans), (_START + texts[0], *texts[1:], _END))

    def views(self, image: Image.Image, settings: ImageSettings) -> Views:
        image = to_rgb(image)
        side = self.tile
        resample = Image.Resampling[settings.resample.upper()]
        columns, rows = self._grid(*image.size)
        tiles = self._tiles(*image.size)
        views = list[NDArray[np.float32]]()
        try:
            if tiles is not None:
                large = image.resize((tiles[0] * side, tiles[1] * side), resample)
                corners = ((x * side, y * side) for y in range(tiles[1]) for x in range(tiles[0]))
                views = [normalised(large.crop((x, y, x + side, y + side)), settings) for x, y in corners]
            if tiles is None or self.thumbnail:
                views.append(normalised(image.resize((columns * self.unit, rows * self.unit), resample), settings))
        except MemoryError as error:
            raise ImageError("no memory left to resize the image; shrink it, or free memory") from error
        return views

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: HiddenStates) -> ImageTokens:
        return Layout.arrange(self, views, width, height, newline)

    def _tiles(self, width: int, height: int) -> tuple[int, int] | None:
        """Columns and rows of the tiles of an image, None if it is seen in one piece."""
        across, down = (max(self.patch, round(side / self.unit) * self.unit) for side in (width, height))
        if self.most == 1 or across * down <= self.max_pixels * self.tolerance:
            return None
        return Tiles(self.tile, self._tile_tokens, self.fewest, self.most).grid(width, height)

    def rounded(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = super(NativeTiles, self).rounded(width, height)
        return max(1, columns), max(1, rows)
