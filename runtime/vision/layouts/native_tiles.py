"""Small images at native resolution, large ones in tiles row by row and then as a whole: LFM2-VL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layout import Layout, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.layouts.native import Native
from vtx.runtime.vision.layouts.tiles import Tiles
from vtx.runtime.vision.plan import ImagePlan, Size, View, own_shape

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

    @property
    def pixels(self) -> int | None:
        return None if self.most > 1 else self.max_pixels

    def choices(self, tokens: int | None) -> Iterator[Layout]:
        for views in range(self.max_views, 1, -1):
            yield self.limited(views)
        yield from super(NativeTiles, self.limited(1)).choices(tokens)

    def low(self) -> Layout:
        return self.limited(1)

    def plan(self, width: int, height: int) -> ImagePlan:
        """The text is that of transformers' processor."""
        whole = own_shape(*self._grid(width, height), self.unit)
        tiles = self._tiles(width, height)
        if tiles is None:
            return ImagePlan((whole,), (_START, _END))
        columns, rows = tiles
        views = View(self._tile_tokens, ((columns * self.tile, rows * self.tile),)).tiles(columns, rows)
        texts = [_TILE.format(*number) for number in product(range(1, rows + 1), range(1, columns + 1))]
        if self.thumbnail:
            views = *views, whole
            texts = [*texts, _WHOLE]
        return ImagePlan(views, (_START + texts[0], *texts[1:], _END))

    def _tiles(self, width: int, height: int) -> Size | None:
        """Columns and rows of the tiles of an image, None if it is seen in one piece."""
        across, down = (max(self.patch, round(side / self.unit) * self.unit) for side in (width, height))
        if self.most == 1 or across * down <= self.max_pixels * self.tolerance:
            return None
        return Tiles(self.tile, self._tile_tokens, self.fewest, self.most).grid(width, height)

    def rounded(self, width: int, height: int) -> Size:
        columns, rows = super(NativeTiles, self).rounded(width, height)
        return max(1, columns), max(1, rows)
