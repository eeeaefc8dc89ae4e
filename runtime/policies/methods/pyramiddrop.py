"""PyramidDrop: after several layers, the image tokens that the prompt's last token is about to look at least leave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vtx.runtime.policies.base import Boundary, Reduction, reduction
from vtx.runtime.policies.options import option
from vtx.runtime.vision.tokens import Mask, highest


@reduction("pyramiddrop")
@dataclass(frozen=True, slots=True)
class PyramidDrop(Reduction):
    """After the i-th of `layers`, floor(`ratio` ** i * V) of the V image tokens that entered the decoder go on.

    They are those that get most attention from the prompt's last token in the next layer, mean over heads: that layer
    runs over all tokens there, and then anew over those that stay. Of equal ones the earlier counts. Tokens keep their
    positions; with positions=renumber, which the preset sets, they are numbered anew after each cut, as in the
    released code.
    """

    ratio: float = option(0.5, "give the share that each cut keeps, from 0 to 1", least=0, most=1)
    layers: tuple[int, ...] = option((8, 16, 24), "give rising numbers of at least 1, e.g. 8/16/24", least=1)
    positions: Literal["keep", "renumber"] = "keep"

    presets: ClassVar[dict[str, dict[str, Any]]] = {"released": {"positions": "renumber"}}
    of_entered: ClassVar[bool] = True
    requires: ClassVar[dict[str, Any]] = {"cuts": "layers", "ahead": "layers"}

    @property
    def renumbers(self) -> bool:
        return self.positions == "renumber"

    def number_kept(self, count: int, layer: int) -> int:
        return math.floor(round(count * self.ratio ** (self.layers.index(layer - 1) + 1), 9))

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        number = self.number_kept(len(boundary.present), boundary.layer)
        return highest(boundary.next_attention(), number) if number < boundary.count else None
