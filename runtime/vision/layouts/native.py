"""The image at native resolution, to the nearest multiple of a token's square: Qwen-VL, GLM-OCR.

The number of an image's tokens depends on its size; each has a row and a column as position, in addition to the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.strict import UPGRADE, optional
from vtx.runtime.vision.layout import Layout, SquareLayout, image_layout
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.plan import ImagePlan, Size, own_shape

MAX_RATIO = 200  # of an image's sides
FLOORED = "floored"  # both sides by one factor, and rounded down
NEAREST = "nearest"  # the short side to a square's, the other rounded
SMALL = (FLOORED, NEAREST)
LOW_PIXELS = 512**2  # of an image of little detail, as in OpenAI's API


@image_layout("native")
@dataclass(frozen=True, slots=True)
class Native(SquareLayout):
    """Images are resized to whole squares, between `min_pixels` and `max_pixels`.

    `small`: those with a side below a square's are first enlarged, one of `SMALL`. `flat`: positions are single
    numbers.
    """

    min_pixels: int
    max_pixels: int
    _: KW_ONLY
    small: str | None = optional(None)
    flat: bool = optional(False)

    def __post_init__(self) -> None:
        valid = min(self.patch, self.merge, self.min_pixels) >= 1 and self.unit**2 <= self.max_pixels
        if not valid or not self.min_pixels <= self.max_pixels <= MAX_RESIZED_PIXELS:
            raise BundleError(
                f"layout 'native' has {self.min_pixels} to {self.max_pixels} pixels in tokens of {self.unit} x "
                f"{self.unit}; at least one token must fit, and at most {MAX_RESIZED_PIXELS:,} pixels; "
                "export the bundle again"
            )
        if self.small not in (None, *SMALL):
            raise BundleError(
                f"layout 'native' enlarges small images by {self.small!r:.40}, unknown to this vtx, which has "
                f"{', '.join(SMALL)}; {UPGRADE}"
            )

    @property
    def min_tokens(self) -> int:
        """Tokens of an image of `min_pixels`."""
        return -(-self.min_pixels // self.unit**2)

    @property
    def max_tokens(self) -> int:
        """The bound for images that are shrunk, to a single row too, and for enlarged ones."""
        most = self.max_pixels / self.unit**2
        fewest = self.min_pixels / self.unit**2
        longest = range(math.ceil(math.sqrt(fewest)), math.ceil(math.sqrt(MAX_RATIO * fewest)) + 1)
        enlarged = max((side * math.ceil(fewest / max(1, side - 1)) for side in longest), default=1)
        return max(math.floor(most), math.floor(math.sqrt(MAX_RATIO * most)), enlarged)

    @property
    def pixels(self) -> int | None:
        return self.max_pixels

    def within(self, max_pixels: int) -> Native:
        if max_pixels < self.unit**2:
            raise RequestError(f"max_pixels is {max_pixels}; one token takes {self.unit} x {self.unit}; raise it")
        most = min(max_pixels, self.max_pixels)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    def choices(self, tokens: int | None) -> Iterator[Layout]:
        area = self.unit**2
        most = self.max_pixels // area
        for count in range(most if tokens is None else min(tokens, most), 0, -1):
            yield self.within(count * area)

    def low(self) -> Layout:
        return self.within(LOW_PIXELS)

    def plan(self, width: int, height: int) -> ImagePlan:
        """Each token has its row and column as position, unless they are `flat`."""
        columns, rows = self._grid(width, height)
        return ImagePlan((own_shape(columns, rows, self.unit),), shape=(columns, rows), placed=not self.flat)

    def _grid(self, width: int, height: int) -> Size:
        """Columns and rows of tokens of an image of this size in pixels."""
        check_ratio(width, height)
        width, height = self._enlarged(width, height)
        bounds = PixelBounds(self.unit, self.min_pixels, self.max_pixels)
        return bounds.grid(width, height, self.rounded(width, height))

    def _enlarged(self, width: int, height: int) -> Size:
        """The sides that an image counts with."""
        unit = self.unit
        if self.small == FLOORED:
            return enlarged(width, height, unit)
        if self.small == NEAREST and height < unit:
            width = round(width * unit / height)
            height = unit
        if self.small == NEAREST and width < unit:
            height = round(height * unit / width)
            width = unit
        return width, height

    def rounded(self, width: int, height: int) -> Size:
        """Columns and rows of tokens next to an image's size, whatever its pixels."""
        return round(width / self.unit), round(height / self.unit)


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Pictures of whole squares of `unit` pixels a side, of `least` to `most` pixels in all."""

    unit: int
    least: int
    most: int

    def grid(self, width: int, height: int, rounded: Size, frames: int = 1, counted: int = 1) -> Size:
        """Columns and rows of squares, `rounded` if all `counted` frames are within the bounds.

        Else those of `frames` frames made smaller or larger: transformers counts an even number, and resizes all.
        """
        unit = self.unit
        pixels = counted * rounded[0] * rounded[1] * unit**2
        if pixels > self.most:
            shrink = math.sqrt(frames * height * width / self.most)
            return max(1, math.floor(width / shrink / unit)), max(1, math.floor(height / shrink / unit))
        if pixels < self.least:
            enlarge = math.sqrt(self.least / (frames * height * width))
            return math.ceil(width * enlarge / unit), math.ceil(height * enlarge / unit)
        return rounded


def enlarged(width: int, height: int, unit: int) -> Size:
    """An image's sides, enlarged by one factor if one of them is below `unit`, and rounded down."""
    if min(width, height) >= unit:
        return width, height
    scale = unit / min(width, height)
    return int(width * scale), int(height * scale)


def check_ratio(width: int, height: int) -> None:
    """Raise ImageError for an image whose sides differ too much."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(
            f"the image is {width}x{height} pixels; its sides may differ at most {MAX_RATIO}-fold; "
            "cut off some of its longer side"
        )
