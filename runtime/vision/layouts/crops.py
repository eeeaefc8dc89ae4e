"""An image as a whole, and after it crops along its longer side: Gemma 3's pan and scan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vtx.runtime.errors import BundleError
from vtx.runtime.vision.layout import TiledLayout, image_layout
from vtx.runtime.vision.plan import Box, ImagePlan, View

MAX_CROPS = 64
_BEGIN = "\n\n<start_of_image>"
_END = "<end_of_image>\n\n"
_WHOLE = "Here is the original image "
_CROPS = " and here are some crops to help you see better "


@image_layout("crops")
@dataclass(frozen=True, slots=True)
class Crops(TiledLayout):
    """Images of `tile` pixels a side and `tokens` each: the whole one, squeezed to a square, and up to `most` crops.

    An image is cropped if its longer side is at least `ratio` times the other one and no crop's side is below `side`.
    """

    side: int
    most: int
    ratio: float

    def __post_init__(self) -> None:
        if min(self.tile, self.tokens) < 1 or not 0 <= self.most <= min(self.side, MAX_CROPS) or not self.ratio >= 1:
            raise BundleError(
                f"layout 'crops' has up to {self.most} crops of at least {self.side} pixels a side and {self.tokens} "
                f"tokens, from a ratio of {self.ratio} on; it needs at least 1 token, at most {MAX_CROPS} crops and "
                "as many pixels, and a ratio of at least 1; export again"
            )

    @property
    def max_views(self) -> int:
        return 1 + self.most

    def limited(self, max_views: int) -> Crops:
        """With at most `max_views` views, the whole image included: one crop would be the image again."""
        most = min(self.most, max_views - 1)
        return replace(self, most=most if most > 1 else 0)

    def plan(self, width: int, height: int) -> ImagePlan:
        """The text is that of transformers' processor."""
        boxes = self._boxes(width, height)
        if not boxes:
            return ImagePlan((View(self.tokens),), (_BEGIN, _END))
        views = View(self.tokens), *(View(self.tokens, box=box) for box in boxes)
        between = [_END + _CROPS + _BEGIN, *[f"{_END} {_BEGIN}"] * (len(boxes) - 1)]
        return ImagePlan(views, (_WHOLE + _BEGIN, *between, _END))

    def _boxes(self, width: int, height: int) -> list[Box]:
        """The crops of an image of this size, in pixels."""
        longer = max(width, height)
        shorter = min(width, height)
        if not self.most or longer / shorter < self.ratio:
            return []
        count = min(self.most, max(2, min(longer // self.side, math.floor(longer / shorter + 0.5))))
        length = math.ceil(longer / count)
        if min(length, shorter) < self.side:
            return []
        spans = [(at * length, min(longer, (at + 1) * length)) for at in range(count)]
        wide = width >= height
        return [(first, 0, last, height) if wide else (0, first, width, last) for first, last in spans]
