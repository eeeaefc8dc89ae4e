"""The whole image, and large ones in slices of their own shape row by row after it: MiniCPM-V 4.6."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layout import SquareLayout, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.layouts.native import MAX_RATIO, check_ratio
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.plan import ImagePlan, Size, View

MARKS = WHOLE, WHOLE_END, SLICE, SLICE_END, ID, ID_END = (
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
)


@image_layout("slices")
@dataclass(frozen=True, slots=True)
class Slices(SquareLayout):
    """Each view has its own shape and as many pixels as a square of `side`, to whole tokens.

    Images of more pixels have slices, too, up to `most`; `most` of 1: none has. `numbered`: the prompt has an image's
    number before it.
    """

    positions = "nearest"
    side: int
    most: int
    numbered: bool

    def __post_init__(self) -> None:
        valid = min(self.patch, self.merge) >= 1 and self.unit <= self.side and 1 <= self.most <= MAX_TILES
        if not valid or self.most * self.side**2 > MAX_RESIZED_PIXELS:
            raise BundleError(
                f"layout 'slices' has up to {self.most} slices of {self.side} x {self.side} pixels in tokens of "
                f"{self.unit} x {self.unit}; it needs 1 to {MAX_TILES} slices of at least one token, and at most "
                f"{MAX_RESIZED_PIXELS:,} pixels in all; export again"
            )

    @property
    def max_views(self) -> int:
        return 1 if self.most == 1 else 1 + self.most

    @property
    def max_tokens(self) -> int:
        """A bound: a slice of n has sides that differ n-fold, or n times less than the image's, before rounding."""
        slices = (n * self._longest(2 * max(MAX_RATIO / n, n)) for n in range(2, self.most + 1))
        return self._longest(MAX_RATIO) + max(slices, default=0)

    def _longest(self, ratio: float) -> int:
        """The most tokens of a view whose sides differ up to `ratio`-fold."""
        side = self.side / self.unit
        most = math.sqrt(ratio)
        stretched = ((rows, min(most, side / (rows - 0.5))) for rows in range(1, math.floor(side + 0.5) + 1))
        return max(rows * max(1, math.floor(side * stretch + 0.5)) for rows, stretch in stretched)

    def limited(self, max_views: int) -> Slices:
        """With at most `max_views` views, the whole image included."""
        return replace(self, most=max(1, min(self.most, max_views - 1)))

    def within(self, max_pixels: int) -> Slices:
        raise RequestError(
            "max_pixels has no effect here: this model sees large images in slices; use max_tiles (--max-tiles), 1 for "
            "none"
        )

    def plan(self, width: int, height: int) -> ImagePlan:
        """The text is that of transformers' processor."""
        columns, rows = self._grid(width, height)
        number = (ID, ID_END) if self.numbered else None
        whole = self._view(width / height)
        if not columns * rows:
            return ImagePlan((whole,), (WHOLE, WHOLE_END), number=number)
        slice_ratio = (_multiple(width, columns) / columns) / (_multiple(height, rows) / rows)
        slices = self._view(slice_ratio, columns, rows).tiles(columns, rows)
        begin = [SLICE_END + "\n" * (at % columns == 0) + SLICE for at in range(1, columns * rows)]
        return ImagePlan((whole, *slices), (WHOLE, WHOLE_END + SLICE, *begin, SLICE_END), number=number)

    def _grid(self, width: int, height: int) -> Size:
        """Columns and rows of an image's slices, the shape nearest to its own; (0, 0) without."""
        check_ratio(width, height)
        count = min(math.ceil(width * height / self.side**2), self.most)
        if count <= 1:
            return 0, 0
        best = (1, 1)
        least = math.inf
        ratio = math.log(width / height)
        for columns, rows in self._grids(count):
            off = abs(ratio - math.log(columns / rows))
            if off < least or (off == least and rows > best[1]):
                best = (columns, rows)
                least = off
        return best

    def _grids(self, count: int) -> Iterator[tuple[int, int]]:
        """Columns and rows of about `count` slices."""
        for slices in range(max(2, count - 1), min(self.most, count + 1) + 1):
            yield from ((slices // rows, rows) for rows in range(1, slices + 1) if slices % rows == 0)

    def _view(self, ratio: float, columns: int = 1, rows: int = 1) -> View:
        """The image as `columns` x `rows` views whose sides differ `ratio`-fold, each in whole tokens.

        Transformers cuts both sides down to whole pixels first.
        """
        height = int(self.side / math.sqrt(ratio))
        across = _multiple(int(height * ratio), self.unit)
        down = _multiple(height, self.unit)
        return View(across * down // self.unit**2, ((columns * across, rows * down),))


def _multiple(length: int, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)
