"""A reduction for vtx that keeps every n-th image token, to see what a choice by attention is worth.

Usage:

    pip install examples/python/vtx-policy-every
    vtx-export --model MODEL --reduce every:n=2 --out bundle
    vtx-run --bundle bundle image.jpg "What is on the table?" --reduce every:n=3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.policies import Boundary, Reduction, option, reduction


@reduction("every")
@dataclass(frozen=True, slots=True)
class Every(Reduction):
    """After layer `k`, every `n`-th of the image tokens still there continues."""

    n: int = option(2, "it must be at least 1", least=1)
    k: int = option(2, "the layer after which tokens leave must be at least 1", least=1)

    requires: ClassVar[dict[str, Any]] = {"cuts": "k"}

    def keep_mask(self, boundary: Boundary) -> NDArray[np.bool_] | None:
        keep: NDArray[np.bool_] = np.arange(boundary.count) % self.n == 0
        return keep
