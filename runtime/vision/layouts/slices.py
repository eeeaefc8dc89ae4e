"""The whole image, and large ones in slices of their own shape row by row after it: MiniCPM-V 4.6."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, Views, check_squares, image_layout
from vtx.runtime.vision.layouts.anyres import MAX_TILES
from vtx.runtime.vision.layouts.native import MAX_RATIO, check_ratio, resized
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.preprocess import normalised
from vtx.runtime.vision.tokens import PromptImage

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
class Slices(Layout):
    """A token is a square of `merge` x `merge` patches of `patch` pixels a side.

    Each view has its own shape and as many pixels as a square of `side`, to whole tokens. Images of more pixels have
    slices, too, up to `most`; `most` of 1: none has. `numbered`: the prompt has an image's number before it.
    """

    has_text = True
    patch: int
    merge: int
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
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.merge

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

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.merge, any_shape=tower.positions == "nearest")

    def limited(self, max_views: int) -> Slices:
        """With at most `max_views` views, the whole image included."""
        return replace(self, most=max(1, min(self.most, max_views - 1)))

    def within(self, max_pixels: int) -> Slices:
        raise RequestError(
            "max_pixels has no effect here: this model sees large images in slices; use max_tiles (--max-tiles), 1 for "
            "none"
        )

    def count(self, width: int, height: int) -> int:
        return self.prompt_image(width, height).tokens

    def passes(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height)
        return 1 + columns * rows

    def prompt_image(self, width: int, height: int) -> PromptImage:
        """The prompt's text around the tokens of an image of this size, as transformers' processor prints it."""
        columns, rows = self._grid(width, height)
        spans = tuple(across * down // self.unit**2 for across, down in self._sizes(width, height))
        begin = [SLICE_END + "\n" * (at % columns == 0) + SLICE for at in range(1, columns * rows)]
        texts = (WHOLE, WHOLE_END + SLICE, *begin, SLICE_END) if columns * rows else (WHOLE, WHOLE_END)
        return PromptImage(spans, texts, number=(ID, ID_END) if self.numbered else None)

    def views(self, image: Image.Image, settings: ImageSettings) -> Views:
        image = to_rgb(image)
        columns, rows = self._grid(*image.size)
        overview, *slices = self._sizes(*image.size)
        views = [resized(image, settings, *overview)]
        if slices:
            width, height = slices[0]
            resample = Image.Resampling[settings.resample.upper()]
            corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
            try:
                large = image.resize((columns * width, rows * height), resample)
                views += [normalised(large.crop((x, y, x + width, y + height)), settings) for x, y in corners]
            except MemoryError as error:
                raise ImageError("no memory left to resize the image; shrink it, or free memory") from error
        return views

    def _grid(self, width: int, height: int) -> tuple[int, int]:
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

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Width and height of each view, in pixels."""
        columns, rows = self._grid(width, height)
        sizes = [self._shaped(width / height)]
        if columns * rows:
            across, down = (_multiple(side, count) / count for side, count in ((width, columns), (height, rows)))
            sizes += [self._shaped(across / down)] * (columns * rows)
        return sizes

    def _shaped(self, ratio: float) -> tuple[int, int]:
        """Width and height of a view, in whole tokens; transformers cuts both down to whole pixels first."""
        height = int(self.side / math.sqrt(ratio))
        return _multiple(int(height * ratio), self.unit), _multiple(height, self.unit)


def _multiple(length: int, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)
