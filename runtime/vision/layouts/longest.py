"""The image in its own shape, shrunk until its longest edge fits: Pixtral, Mistral 3, LightOnOCR."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, Views, check_squares, image_layout
from vtx.runtime.vision.layouts.native import LOW_PIXELS, resized
from vtx.runtime.vision.limits import MAX_RESIZED_PIXELS
from vtx.runtime.vision.tokens import HiddenStates, ImageTokens, Patches, PromptImage

ROW_END = "[IMG_BREAK]"
IMAGE_END = "[IMG_END]"


@image_layout("longest")
@dataclass(frozen=True, slots=True)
class LongestEdge(Layout):
    """A token is a square of `merge` x `merge` patches of `patch` pixels a side.

    Images whose longest edge is above `longest` pixels are shrunk to it, and all are stretched to whole multiples of
    `step` pixels; pixels beyond the last whole square give no token. `marks`: text ends each row of tokens.
    """

    patch: int
    merge: int
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
    def has_text(self) -> bool:
        return self.marks

    @property
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.merge

    @property
    def min_tokens(self) -> int:
        return 1

    @property
    def max_tokens(self) -> int:
        return (self._multiple(self.longest) // self.unit) ** 2

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.merge, any_shape=tower.positions == "rotary")

    def within(self, max_pixels: int) -> LongestEdge:
        edge = math.isqrt(max_pixels) // self.step * self.step
        if edge < self.unit:
            raise RequestError(f"max_pixels is {max_pixels}; one token takes {self.unit} x {self.unit}; raise it")
        return replace(self, longest=min(edge, self.longest))

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        for layout in self._smaller():
            images = [layout.prompt_image(*size) for size in sizes]
            if sum(image.tokens + len(image.spans) * self.marks for image in images) <= tokens:
                return self._multiple(layout.longest) ** 2
        return None

    def choices(self, tokens: int) -> Iterator[Layout]:
        return self._smaller()

    def low(self) -> Layout:
        return self.within(LOW_PIXELS)

    def count(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height)
        return columns * rows

    def prompt_image(self, width: int, height: int) -> PromptImage:
        """The tokens of an image of this size, row by row if text ends each, as transformers' processor prints it."""
        columns, rows = self._grid(width, height)
        if not self.marks:
            return PromptImage((columns * rows,))
        return PromptImage((columns,) * rows, ("", *[ROW_END] * (rows - 1), IMAGE_END))

    def views(self, image: Image.Image, settings: ImageSettings) -> Views:
        image = to_rgb(image)
        return resized(image, settings, *self._size(*image.size))[None]

    def arrange(self, views: Sequence[ImageTokens], width: int, height: int, newline: HiddenStates) -> ImageTokens:
        """One token after the other, row by row."""
        (tokens,) = views
        count = len(tokens)
        return replace(tokens, patches=Patches(np.arange(count), np.zeros(count, bool), tokens.patches.signals))

    def _multiple(self, side: int) -> int:
        """The next whole multiple of `step` pixels, with room for a token."""
        return max(-(-side // self.step) * self.step, self.unit)

    def _smaller(self) -> Iterator[LongestEdge]:
        """The layouts with this longest edge and with shorter ones, the longest first."""
        yield self
        for edge in range((self.longest - 1) // self.step * self.step, self.unit - 1, -self.step):
            yield replace(self, longest=edge)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels of an image of this size as the tower sees it."""
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width = math.floor(width / ratio)
            height = math.floor(height / ratio)
        return self._multiple(width), self._multiple(height)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tokens of an image of this size in pixels."""
        across, down = self._size(width, height)
        return across // self.unit, down // self.unit
