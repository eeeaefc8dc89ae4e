"""The whole image squeezed into one tile, and the image in tiles at its own aspect ratio: LLaVA-NeXT, LLaVA-OneVision.

The tiles' tokens form one grid. Tokens of padding are cut off it, a learned newline ends each of its rows, and
the grid comes after the tokens of the squeezed image. LLaVA-OneVision shrinks large grids, and gives each of several
images one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.strict import optional
from vtx.runtime.vision.layout import Layout, check_tiles, image_layout
from vtx.runtime.vision.plan import Box, ImagePlan, Size, TileGrid, View

MAX_RESOLUTIONS = 128
MAX_TILES = 64  # of one image
CLEARLY_MORE = 1.1  # times the side of the grid that it is shrunk to


@image_layout("anyres")
@dataclass(frozen=True, slots=True)
class Anyres(Layout):
    """Tiles of `tile` pixels a side with `grid` tokens a side; `resolutions` (width, height) that tiles may cover.

    Of equally good resolutions the first is taken, so their order counts. `rounded`: the rows and columns left after
    unpadding are rounded to 7 digits before they are cut down to whole numbers, as transformers does it.

    `shrink`: a grid of clearly more tokens than `shrink` tiles have is shrunk to about that number, bilinearly, before
    the newlines; and each of several images in a prompt is one tile, padded to a square. 0: neither. `padded`: the only
    tile shows the image so. `unpads`: tokens of padding are cut off and newlines added.
    """

    newline = True
    tile: int
    grid: int
    resolutions: tuple[Size, ...]
    rounded: bool
    shrink: int = optional(0)
    padded: bool = optional(False)
    unpads: bool = optional(True)

    def __post_init__(self) -> None:
        valid = self.tile >= 1 and self.grid >= 1 and len(self.resolutions) <= MAX_RESOLUTIONS
        valid = valid and 0 <= self.shrink <= MAX_TILES and not (self.padded and self.resolutions)
        for width, height in self.resolutions:
            fits = width >= self.tile and height >= self.tile and not width % self.tile and not height % self.tile
            valid = valid and fits and width * height <= MAX_TILES * self.tile**2
        if not valid:
            raise BundleError(
                f"layout 'anyres' has resolutions {list(self.resolutions)!s:.80} in tiles of {self.tile}; each side "
                f"must be a multiple of the tile, with at most {MAX_TILES} tiles; export the bundle again"
            )

    @property
    def one_tile(self) -> int:
        """Tokens of one tile."""
        return self.grid**2

    @property
    def max_tokens(self) -> int:
        if not self.shrink:
            return max((self.count(*resolution) for resolution in self.resolutions), default=self.one_tile + 1)
        # Any cut of any resolution: a grid just too small to be shrunk has more tokens than larger ones.
        grids = {tuple(side // self.tile * self.grid for side in resolution) for resolution in self.resolutions}
        cuts = [(cut, down) for across, down in grids for cut in range(across, 0, -2)]
        cuts += [(across, cut) for across, down in grids for cut in range(down, 0, -2)]
        shrunk = (self.shrunk(*cut) for cut in cuts)
        return self.one_tile + max((down * (across + 1) for across, down in shrunk), default=1)

    @property
    def max_views(self) -> int:
        return 1 + max((width * height // self.tile**2 for width, height in self.resolutions), default=0)

    def check(self, tower: TowerSpec) -> None:
        check_tiles(tower, self.tile, self.one_tile)

    def limited(self, max_views: int) -> Anyres:
        """With resolutions of at most `max_views` tiles, the squeezed image included; with 1 that one alone."""
        most = (max_views - 1) * self.tile**2
        return replace(self, resolutions=tuple(size for size in self.resolutions if size[0] * size[1] <= most))

    def released(self) -> Anyres:
        """Always two tiles by two and the squeezed image, all their tokens and no newline."""
        if self.shrink:
            return cast(Anyres, Layout.released(self))
        if self.max_views < 5:
            raise RequestError(
                f"fit 'released' takes 5 tiles and an image has at most {self.max_views} here; leave max_tiles out"
            )
        return replace(self, resolutions=((2 * self.tile, 2 * self.tile),), unpads=False)

    def for_images(self, count: int) -> Anyres:
        return replace(self, resolutions=(), padded=True) if self.shrink and count > 1 else self

    def plan(self, width: int, height: int) -> ImagePlan:
        overview = View(self.one_tile)
        if not self.resolutions:
            return ImagePlan((overview,), grid=TileGrid(self.grid), squared=self.padded and width != height)
        canvas = self._resolution(width, height)
        across = canvas[0] / width
        down = canvas[1] / height
        if across < down:
            size = canvas[0], min(math.ceil(height * across), canvas[1])
        else:
            size = min(math.ceil(width * down), canvas[0]), canvas[1]
        columns, rows = (side // self.tile for side in canvas)
        box = self._unpadded(width, height, canvas)
        shrunk = self.shrunk(box[2] - box[0], box[3] - box[1])
        tiles = View(self.one_tile, (size,), canvas).tiles(columns, rows)
        return ImagePlan((overview, *tiles), grid=TileGrid(self.grid, columns, rows, box, shrunk, self.unpads))

    def shrunk(self, across: int, down: int) -> Size:
        """The columns and rows of a grid of this size, before its newlines, after it is shrunk."""
        ratio = math.sqrt(across * down / (self.shrink * self.one_tile)) if self.shrink else 1.0
        return (int(across // ratio) or 1, int(down // ratio) or 1) if ratio > CLEARLY_MORE else (across, down)

    def _resolution(self, width: int, height: int) -> Size:
        """The resolution (width, height) that shows most of an image, and of those the one with the least padding."""

        def shown(size: Size) -> tuple[int, int]:
            scale = min(size[0] / width, size[1] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - size[0] * size[1]

        return max(self.resolutions, key=shown)  # the first of equals

    def _unpadded(self, width: int, height: int, canvas: Size) -> Box:
        """The part of the grid of tokens that shows the image."""
        across, down = (side // self.tile * self.grid for side in canvas)
        if not self.unpads:
            return 0, 0, across, down
        if width / height > across / down:
            padding = (down - self._whole(height, across / width)) // 2
            return 0, padding, across, down - padding
        padding = (across - self._whole(width, down / height)) // 2
        return padding, 0, across - padding, down

    def _whole(self, side: int, scale: float) -> int:
        return int(round(side * scale, 7) if self.rounded else side * scale)
