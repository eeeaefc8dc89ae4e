"""The image in its own shape, as large as a budget of tokens allows: Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, ImageError, RequestError
from vtx.runtime.strict import optional
from vtx.runtime.vision.image import to_rgb
from vtx.runtime.vision.layout import Layout, check_squares, image_layout
from vtx.runtime.vision.preprocess import normalised

BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image that the model was trained for


@image_layout("budget")
@dataclass(frozen=True, slots=True)
class TokenBudget(Layout):
    """A token is the mean of a square of `pool` x `pool` patches of `patch` pixels a side.

    Images are enlarged or shrunk to whole squares, at most `tokens` of them, or by request of another of the model's
    budgets up to `most`; 0: up to `tokens`.
    """

    patch: int
    pool: int
    tokens: int
    most: int = optional(0)

    def __post_init__(self) -> None:
        for tokens in (self.tokens, self.most or self.tokens):
            if tokens not in BUDGETS or isinstance(tokens, bool) or min(self.patch, self.pool) < 1:
                raise BundleError(
                    f"layout 'budget' has {tokens!r:.20} tokens of {self.unit} x {self.unit} pixels; it needs one of "
                    f"{', '.join(map(str, BUDGETS))}"
                )

    @property
    def unit(self) -> int:
        """Pixels a side of one token's square."""
        return self.patch * self.pool

    @property
    def square(self) -> int:
        """Pixels a side of the largest square image."""
        return math.isqrt(self.tokens) * self.unit

    @property
    def min_tokens(self) -> int:
        """Nearly half of the budget is lost where a single row of squares is left."""
        return self.tokens // 2

    @property
    def max_tokens(self) -> int:
        return max(self.tokens, self.most)

    @property
    def budgets(self) -> list[int]:
        """The budgets that a request may choose, the largest first."""
        return [tokens for tokens in reversed(BUDGETS) if tokens <= self.max_tokens]

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.pool, any_shape=tower.positions == "axial")

    def within(self, max_pixels: int) -> TokenBudget:
        """The largest of the model's budgets whose images have at most `max_pixels`."""
        fitting = [tokens for tokens in BUDGETS if tokens <= self.tokens and tokens * self.unit**2 <= max_pixels]
        if not fitting:
            raise RequestError(
                f"max_pixels is {max_pixels}; the smallest budget of this model, {BUDGETS[0]} tokens of {self.unit} x "
                f"{self.unit}, takes {BUDGETS[0] * self.unit**2}; raise it"
            )
        return replace(self, tokens=fitting[-1], most=0)

    def fitting(self, sizes: Sequence[tuple[int, int]], tokens: int) -> int | None:
        for budget in reversed([each for each in BUDGETS if each <= self.tokens]):
            layout = replace(self, tokens=budget)
            if sum(layout.count(*size) for size in sizes) <= tokens:
                return budget * self.unit**2
        return None

    def choices(self, tokens: int) -> Iterator[Layout]:
        for budget in self.budgets:
            if budget <= tokens or budget == BUDGETS[0]:
                yield replace(self, tokens=budget)

    def low(self) -> Layout:
        return replace(self, tokens=BUDGETS[0])

    def high(self) -> Layout:
        return replace(self, tokens=self.max_tokens)

    def count(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height)
        return columns * rows

    def views(self, image: Image.Image, settings: ImageSettings) -> NDArray[np.float32]:
        image = to_rgb(image)
        columns, rows = self._grid(*image.size)
        shape = columns * self.unit, rows * self.unit
        try:
            if image.size != shape:
                image = image.resize(shape, Image.Resampling[settings.resample.upper()])
            return normalised(image, settings)[None]
        except MemoryError as error:
            raise ImageError("no memory left to resize the image; shrink it, or free memory") from error

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tokens of an image of this size in pixels."""
        factor = math.sqrt(self.tokens * self.unit**2 / (width * height))
        columns = math.floor(factor * width / self.unit)
        rows = math.floor(factor * height / self.unit)
        if not rows:
            return min(width // height, self.tokens), 1
        if not columns:
            return 1, min(height // width, self.tokens)
        return columns, rows
