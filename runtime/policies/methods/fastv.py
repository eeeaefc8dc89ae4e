"""FastV: after one layer, the image tokens that the prompt's last token looks at least are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vtx.runtime.errors import RequestError
from vtx.runtime.policies.base import Boundary, Needs, Reduction
from vtx.runtime.policies.registry import reduction
from vtx.runtime.vision.tokens import Mask, highest


@reduction("fastv")
@dataclass(frozen=True, slots=True)
class FastV(Reduction):
    """After layer `k`, `ratio` of the image tokens leave, rounded down; positions are kept (FastV section 4.1)."""

    k: int = 2
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise RequestError(f"fastv: k is {self.k}; the layer after which tokens leave must be at least 1")
        if not 0 <= self.ratio <= 1:
            raise RequestError(f"fastv: ratio is {self.ratio}; give the share to leave out, from 0 to 1")

    def needs(self) -> Needs:
        return Needs(cuts=(self.k + 1,), queries=(self.k,))

    def number_kept(self, count: int, layer: int) -> int:
        return count - math.floor(round(self.ratio * count, 9))

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        kept = self.number_kept(boundary.count, boundary.layer)
        return highest(boundary.attention(last_only=True)[0], kept) if kept < boundary.count else None
