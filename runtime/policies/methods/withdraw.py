"""Image tokens leave before a fixed layer: all of them (VTW), all but a rest that the question chooses, or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtx.runtime.policies.base import Boundary, Needs, Reduction
from vtx.runtime.vision.tokens import Mask, highest, share

Rest = int | float  # a number of image tokens, or as a float a share of them


def most_attended(boundary: Boundary, count: int) -> Mask | None:
    """The `count` image tokens that get most attention from the prompt's last token, mean over heads; None: all."""
    return highest(boundary.attention(last_only=True)[0], count) if count < boundary.count else None


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


@dataclass(frozen=True, slots=True)
class WithdrawToRest(Reduction):
    """The image tokens leave before layer `k`, but for a `rest` that the prompt's last token attends to most.

    Its attention is that of layer `k` - 1, mean over heads; of equal tokens the earlier stay. A share is one of the
    image tokens there, rounded up. Positions are kept.
    """

    k: int
    rest: Rest
    name = "rest"
    whole = True
    last_query = True

    def needs(self) -> Needs:
        return Needs(cuts=(self.k,), queries=(self.k - 1,))

    def number_kept(self, count: int, layer: int) -> int:
        return min(count, self.rest if isinstance(self.rest, int) else share(self.rest, count))

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        return most_attended(boundary, self.number_kept(boundary.count, boundary.layer))
