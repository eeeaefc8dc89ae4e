"""The image in its own shape, as large as a budget of tokens allows: Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.strict import optional
from vtx.runtime.vision.layout import Layout, check_squares, image_layout
from vtx.runtime.vision.plan import ImagePlan, Size, own_shape

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

    @property
    def pixels(self) -> int:
        return self.tokens * self.unit**2

    def check(self, tower: TowerSpec) -> None:
        check_squares(tower, self.patch, self.pool, "axial")

    def within(self, max_pixels: int) -> TokenBudget:
        """The largest of the model's budgets whose images have at most `max_pixels`."""
        fitting = [tokens for tokens in BUDGETS if tokens <= self.tokens and tokens * self.unit**2 <= max_pixels]
        if not fitting:
            raise RequestError(
                f"max_pixels is {max_pixels}; the smallest budget of this model, {BUDGETS[0]} tokens of {self.unit} x "
                f"{self.unit}, takes {BUDGETS[0] * self.unit**2}; raise it"
            )
        return replace(self, tokens=fitting[-1], most=0)

    def choices(self, tokens: int | None) -> Iterator[Layout]:
        most = self.tokens if tokens is None else max(tokens, BUDGETS[0])
        return (replace(self, tokens=budget) for budget in self.budgets if budget <= most)

    def low(self) -> Layout:
        return replace(self, tokens=BUDGETS[0])

    def high(self) -> Layout:
        return replace(self, tokens=self.max_tokens)

    def plan(self, width: int, height: int) -> ImagePlan:
        return ImagePlan((own_shape(*self._grid(width, height), self.unit),))

    def _grid(self, width: int, height: int) -> Size:
        """Columns and rows of tokens of an image of this size in pixels."""
        factor = math.sqrt(self.tokens * self.unit**2 / (width * height))
        columns = math.floor(factor * width / self.unit)
        rows = math.floor(factor * height / self.unit)
        if not rows:
            return min(width // height, self.tokens), 1
        if not columns:
            return 1, min(height // width, self.tokens)
        return columns, rows
