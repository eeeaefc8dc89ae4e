"""The image in its own shape, shrunk until its longest edge fits: Pixtral, Mistral 3, LightOnOCR."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.layout import Layout, SquareLayout, image_layout
from vtx.runtime.vision.layouts.native import LOW_PIXELS
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.plan import ImagePlan, Size, View

ROW_END = "[IMG_BREAK]"
IMAGE_END = "[IMG_END]"


@image_layout("longest")
@dataclass(frozen=True, slots=True)
class LongestEdge(SquareLayout):
    """Images whose longest edge is above `longest` pixels are shrunk to it.

    All are stretched to whole multiples of `step` pixels; pixels beyond the last whole square give no token. `marks`:
    text ends each row of tokens.
    """

    longest: int
    step: int
    marks: bool

    def __post_init__(self) -> None:
        sides = self.patch, self.merge, self.step
        if min(sides) < 1 or self.longest < self.unit or self._multiple(self.longest) ** 2 > MAX_RESIZED_PIXELS:
            raise BundleError(
                f"layout 'longest' has edges of {self.longest} pixels in steps of {self.step} and tokens of "
                f"{self.unit} x {self.unit}; at least one token must fit, and at most {MAX_RESIZED_PIXELS:,} pixels; "
                "export the bundle again"
            )

    @property
    def min_tokens(self) -> int:
        return 1

    @property
    def max_tokens(self) -> int:
        return (self._multiple(self.longest) // self.unit) ** 2

    @property
    def pixels(self) -> int | None:
        return self._multiple(self.longest) ** 2

    def within(self, max_pixels: int) -> LongestEdge:
        edge = math.isqrt(max_pixels) // self.step * self.step
        if edge < self.unit:
            raise RequestError(f"max_pixels is {max_pixels}; one token takes {self.unit} x {self.unit}; raise it")
        return replace(self, longest=min(edge, self.longest))

    def choices(self, tokens: int | None) -> Iterator[Layout]:
        yield self
        for edge in range((self.longest - 1) // self.step * self.step, self.unit - 1, -self.step):
            yield replace(self, longest=edge)

    def low(self) -> Layout:
        return self.within(LOW_PIXELS)

    def plan(self, width: int, height: int) -> ImagePlan:
        """The text is that of transformers' processor."""
        size = self._size(width, height)
        columns, rows = (side // self.unit for side in size)
        views = (View(columns * rows, (size,)),)
        if not self.marks:
            return ImagePlan(views, shape=(columns, rows))
        texts = "", *[ROW_END] * (rows - 1), IMAGE_END
        return ImagePlan(views, texts, (columns,) * rows, shape=(columns, rows))

    def _multiple(self, side: int) -> int:
        """The next whole multiple of `step` pixels, with room for a token."""
        return max(-(-side // self.step) * self.step, self.unit)

    def _size(self, width: int, height: int) -> Size:
        """Width and height in pixels of an image of this size as the tower sees it."""
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width = math.floor(width / ratio)
            height = math.floor(height / ratio)
        return self._multiple(width), self._multiple(height)
