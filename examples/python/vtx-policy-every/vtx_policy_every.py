"""A reduction for vtx that keeps every n-th image token, to see what a choice by attention is worth.

Usage:

    pip install examples/python/vtx-policy-every
    vtx-export --model MODEL --reduce every:n=2 --out bundle
    vtx-run --bundle bundle image.jpg "What is on the table?" --reduce every:n=3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx import RequestError
from vtx.runtime.policies import Boundary, Needs, Reduction, reduction


@reduction("every")
@dataclass(frozen=True, slots=True)
class Every(Reduction):
    """After layer `k`, every `n`-th of the image tokens still there continues."""

    n: int = 2
    k: int = 2

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise RequestError(f"every: n is {self.n} and k is {self.k}; both must be at least 1")

    def needs(self) -> Needs:
        return Needs(cuts=(self.k + 1,))

    def keep_mask(self, boundary: Boundary) -> NDArray[np.bool_] | None:
        keep: NDArray[np.bool_] = np.arange(boundary.count) % self.n == 0
        return keep
