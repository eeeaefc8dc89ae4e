"""The image at native resolution, to the nearest multiple of a token's square: Qwen-VL, GLM-OCR.

The number of an image's tokens depends on its size; each has a row and a column as position, in addition to the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import PARTS, TowerSpec
from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.strict import UPGRADE, optional
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, Views, check_squares, image_layout
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.preprocess import normalised
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, Patches

MAX_RATIO = 200  # of an image's sides
FLOORED = "floored"  # both sides by one factor, and rounded down
NEAREST = "nearest"  # the short side to a square's, the other rounded
SMALL = (FLOORED, NEAREST)
LOW_PIXELS = 512**2  # of an image of little detail, as in OpenAI's API


@image_layout("native")
@dataclass(frozen=True, slots=True)
class Native(Layout):
    """A token is a square of `merge` x `merge` patches of `patch` pixels a side.

    Images are resized to whole squares, between `min_pixels` and `max_pixels`; `small`: those with a side below a
    square's are first enlarged, one of `SMALL`. `flat`: positions are single numbers.
    """

    patch: int
    merge: int
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
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.merge

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

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.merge, any_shape=tower.positions == "rotary")

    def within(self, max_pixels: int) -> Native:
        if max_pixels < self.unit**2:
            raise RequestError(f"max_pixels is {max_pixels}; one token takes {self.unit} x {self.unit}; raise it")
        most = min(max_pixels, self.max_pixels)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        area = self.unit**2
        for count in range(self.max_pixels // area, 0, -1):
            layout = self.within(count * area)
            if sum(layout.count(*size) for size in sizes) <= tokens:
                return count * area
        return None

    def choices(self, tokens: int) -> Iterator[Layout]:
        area = self.unit**2
        for most in range(min(tokens, self.max_pixels // area), 0, -1):
            yield self.within(most * area)

    def low(self) -> Layout:
        return self.within(LOW_PIXELS)

    def count(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height)
        return columns * rows

    def views(self, image: Image.Image, settings: ImageSettings) -> Views:
        image = to_rgb(image)
        columns, rows = self._grid(*image.size)
        return resized(image, settings, columns * self.unit, rows * self.unit)[None]

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: HiddenStates) -> ImageTokens:
        """One token after the other, row by row; all at one time, each at its row and column."""
        (tokens,) = views
        columns, rows = self._grid(width, height)
        count = columns * rows
        patches = Patches(np.arange(count), np.zeros(count, bool), tokens.patches.signals)
        if self.flat:
            return ImageTokens(tokens.hidden, patches)
        return ImageTokens(tokens.hidden, patches, offsets=squares(columns, rows), span=max(columns, rows))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tokens of an image of this size in pixels."""
        check_ratio(width, height)
        width, height = self._enlarged(width, height)
        return fitted_grid(width, height, self.unit, self.min_pixels, self.max_pixels, self.rounded(width, height))

    def _enlarged(self, width: int, height: int) -> tuple[int, int]:
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

    def rounded(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tokens next to an image's size, whatever its pixels."""
        return round(width / self.unit), round(height / self.unit)


def fitted_grid(
    width: int,
    height: int,
    unit: int,
    least: int,
    most: int,
    rounded: tuple[int, int],
    frames: int = 1,
    counted: int = 1,
) -> tuple[int, int]:
    """Columns and rows of squares of `unit` pixels a side, `rounded` if all `counted` frames have `least` to `most`.

    Else those of `frames` frames made smaller or larger: transformers counts an even number, and resizes all.
    """
    pixels = counted * rounded[0] * rounded[1] * unit**2
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        return max(1, math.floor(width / shrink / unit)), max(1, math.floor(height / shrink / unit))
    if pixels < least:
        enlarge = math.sqrt(least / (frames * height * width))
        return math.ceil(width * enlarge / unit), math.ceil(height * enlarge / unit)
    return rounded


def enlarged(width: int, height: int, unit: int) -> tuple[int, int]:
    """An image's sides, enlarged by one factor if one of them is below `unit`, and rounded down."""
    if min(width, height) >= unit:
        return width, height
    scale = unit / min(width, height)
    return int(width * scale), int(height * scale)


def squares(columns: int, rows: int) -> NDArray[np.int64]:
    """Offsets [tokens, 3] of the tokens of a grid, row by row: time 0, and their row and column."""
    offsets = np.zeros((columns * rows, PARTS), np.int64)
    offsets[:, 1], offsets[:, 2] = np.divmod(np.arange(columns * rows), columns)
    return offsets


def resized(image: Image.Image, settings: ImageSettings, width: int, height: int) -> NDArray[np.float32]:
    """An RGB picture as the tower's input, [3, height, width] float32."""
    try:
        return normalised(image.resize((width, height), Image.Resampling[settings.resample.upper()]), settings)
    except MemoryError as error:
        raise ImageError("no memory left to resize the image; shrink it, or free memory") from error


def check_ratio(width: int, height: int) -> None:
    """Raise ImageError for an image whose sides differ too much."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(
            f"the image is {width}x{height} pixels; its sides may differ at most {MAX_RATIO}-fold; "
            "cut off some of its longer side"
        )
