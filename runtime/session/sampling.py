"""From logits to a token: greedy, or temperature with top-k and top-p, in this order as transformers has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import RequestError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p is {self.top_p}; give a number above 0 and at most 1")
        if self.top_k < 0:
            raise RequestError(f"top-k is {self.top_k}; give 0 (all tokens) or a positive number")
        if self.seed is not None and self.seed < 0:
            raise RequestError(f"seed is {self.seed}; give a number from 0 on")


class Sampler:
    """Draws tokens one after another; the same seed gives the same answer."""

    def __init__(self, settings: Sampling) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Token id for logits [vocab]."""
        s = self._settings
        if s.temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):
            scores = (logits.astype(np.float64) - float(logits.max())) / s.temperature
        if 0 < s.top_k < len(scores):
            scores[scores < np.partition(scores, -s.top_k)[-s.top_k]] = -np.inf
        odds = np.exp(scores)
        odds /= odds.sum()
        if s.top_p < 1:
            odds = _nucleus(odds, s.top_p)
        return int(self._rng.choice(len(odds), p=odds))


def _nucleus(odds: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """The smallest set of most likely tokens that holds `top_p` of the mass, renormalised."""
    order = np.argsort(-odds, kind="stable")
    before = np.cumsum(odds[order]) - odds[order]
    kept = np.zeros_like(odds)
    chosen = order[before < top_p]
    kept[chosen] = odds[chosen]
    normal: NDArray[np.float64] = kept / kept.sum()
    return normal
