"""VTW: all image tokens leave before a fixed layer; or never."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.base import Boundary, Needs, Reduction
from vtx.runtime.vision.tokens import Mask


@dataclass(frozen=True, slots=True)
class Full(Reduction):
    """No withdrawal: every layer sees the image."""

    name = "none"
    whole = True
    fixed = True


@dataclass(frozen=True, slots=True)
class Withdraw(Reduction):
    """The image tokens leave before layer `k`, positions kept (VTW section 3.3, "keep")."""

    k: int
    name = "withdrawal"
    whole = True
    fixed = True

    def needs(self) -> Needs:
        return Needs(cuts=(self.k,))

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        return np.zeros(boundary.count, bool)
