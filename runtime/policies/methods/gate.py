"""DyVTE: trained gates decide per question when the image tokens leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import BundleError
from vtx.runtime.policies.base import Boundary, Decision, Needs, Reduction
from vtx.runtime.vision.tokens import Mask

Odds = Callable[[int, NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Gate(Reduction):
    """At each boundary with a gate, the image tokens leave when its probability is above `threshold`.

    `odds` gives (stay, withdraw) for a boundary's layer and hidden states; 0.5 is the paper's "p1 > p0". Decisions are
    kept in `asked`, in order. No gate fires: no withdrawal.
    """

    odds: Odds = field(compare=False)
    ks: tuple[int, ...]
    threshold: float = 0.5
    asked: list[Decision] = field(default_factory=list, compare=False)
    name = "gate"
    whole = True

    def needs(self) -> Needs:
        return Needs(cuts=self.ks)

    def keep_mask(self, boundary: Boundary) -> Mask | None:
        start = time.perf_counter()
        probability = float(self.odds(boundary.layer, boundary.question_hidden)[1])
        if not math.isfinite(probability):
            raise BundleError(f"the gate before layer {boundary.layer} gave {probability}; export the bundle again")
        self.asked.append(Decision(boundary.layer, probability, 1000 * (time.perf_counter() - start)))
        return np.zeros(boundary.count, bool) if probability > self.threshold else None
