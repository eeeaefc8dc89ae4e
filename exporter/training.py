"""The learning-rate schedule of gates and of tunings."""

from __future__ import annotations

import math

WARM_UP = 0.03


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear warm-up over 3% of the steps, then half a cosine down to 0."""
    warm = math.ceil(WARM_UP * steps)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
