"""FastV: after one layer, the image tokens that the prompt's last token attends to least are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from vtx.runtime.policies.base import Boundary, Reduction, reduction
from vtx.runtime.policies.methods.withdraw import most_attended
from vtx.runtime.policies.options import option
from vtx.runtime.vision.tokens import Mask


@reduction("fastv")
@dataclass(frozen=True, slots=True)
class FastV(Reduction):
    """After layer `k`, `ratio` of the image tokens leave, rounded down; positions are kept (FastV section 4.1)."""

    k: int = option(2, "the layer after which tokens leave must be at least 1", least=1)
    ratio: float = option(0.5, "give the share to leave out, from 0 to 1", least=0, most=1)

    requires: ClassVar[dict[str, Any]] = {"cuts": "k", "queries": "k"}
    last_query: ClassVar[bool] = True

    def number_kept(self, count: int, layer: int) -> int:
        return count - math.floor(round(self.ratio * count, 9))

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        return most_attended(boundary, self.number_kept(boundary.count, boundary.layer))
