"""The image stretched to the grid of tiles nearest to its shape, and after the tiles the whole of it: InternVL."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, check_tiles, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.preprocess import preprocess


@image_layout("tiles")
@dataclass(frozen=True, slots=True)
class Tiles(Layout):
    """`fewest` to `most` tiles of `tile` pixels a side and `tokens` each; if several, one more with the whole image."""

    tile: int
    tokens: int
    fewest: int
    most: int

    def __post_init__(self) -> None:
        if min(self.tile, self.tokens, self.fewest) < 1 or not self.fewest <= self.most <= MAX_TILES:
            raise BundleError(
                f"layout 'tiles' has {self.fewest} to {self.most} tiles of {self.tile} pixels and {self.tokens} "
                f"tokens; it needs at least 1 of each and at most {MAX_TILES} tiles; export the bundle again"
            )

    @property
    def max_tokens(self) -> int:
        return self.tokens * self.max_views

    @property
    def max_views(self) -> int:
        return self.most + (self.most > 1)

    def check(self, tower: TowerSpec) -> None:
        check_tiles(tower, self.tile, self.tokens)

    def limited(self, max_views: int) -> Tiles:
        """With at most `max_views` tiles, the whole image included."""
        most = min(self.most, max(1, max_views - 1))
        return replace(self, fewest=min(self.fewest, most), most=most)

    def count(self, width: int, height: int) -> int:
        return self.tokens * self.passes(width, height)

    def passes(self, width: int, height: int) -> int:
        columns, rows = self.grid(width, height)
        return columns * rows + (columns * rows > 1)

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        image = to_rgb(image)
        side = self.tile
        columns, rows = self.grid(*image.size)
        resized = image.resize((columns * side, rows * side), Image.Resampling[settings.resample.upper()])
        corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
        tiles = [resized.crop((x, y, x + side, y + side)) for x, y in corners]
        return np.stack([preprocess(tile, settings) for tile in (tiles if len(tiles) == 1 else [*tiles, image])])

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows: the nearest shape; of equal ones the largest whose tiles the image fills by half."""
        grids = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most // columns + 1)
            if columns * rows >= self.fewest
        ]
        best = (1, 1)
        least = float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            off = abs(width / height - columns / rows)
            filled = width * height > 0.5 * self.tile**2 * columns * rows
            if off < least or (off == least and filled):
                best = (columns, rows)
                least = off
        return best
