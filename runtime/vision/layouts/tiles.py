"""The image stretched to the grid of tiles nearest to its shape, and after the tiles the whole of it: InternVL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layout import TiledLayout, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.plan import ImagePlan, Size, View


@image_layout("tiles")
@dataclass(frozen=True, slots=True)
class Tiles(TiledLayout):
    """`fewest` to `most` tiles of `tile` pixels a side and `tokens` each; if several, one more with the whole image."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if min(self.tile, self.tokens, self.fewest) < 1 or not self.fewest <= self.most <= MAX_TILES:
            raise BundleError(
                f"layout 'tiles' has {self.fewest} to {self.most} tiles of {self.tile} pixels and {self.tokens} "
                f"tokens; it needs at least 1 of each and at most {MAX_TILES} tiles; export the bundle again"
            )

    @property
    def max_views(self) -> int:
        return self.most + (self.most > 1)

    def limited(self, max_views: int) -> Tiles:
        """With at most `max_views` tiles, the whole image included."""
        most = min(self.most, max(1, max_views - 1))
        return replace(self, fewest=min(self.fewest, most), most=most)

    def plan(self, width: int, height: int) -> ImagePlan:
        columns, rows = self.grid(width, height)
        tiles = View(self.tokens, ((columns * self.tile, rows * self.tile),)).tiles(columns, rows)
        return ImagePlan(tiles if len(tiles) == 1 else (*tiles, View(self.tokens)))

    def grid(self, width: int, height: int) -> Size:
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
