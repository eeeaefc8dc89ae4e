"""From logits to a token: repetition penalty, then greedy, or temperature, top-k and top-p, in transformers' order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.checks import check_number, check_whole
from vtx.runtime.errors import RequestError

LEAST_PENALTY = 1e-3
Likely: TypeAlias = tuple[tuple[int, float], ...]  # token ids, the likeliest first, with their log probabilities


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in.

    `repetition_penalty` above 1 makes tokens of the prompt and of the answer so far less likely; 1 does nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "0 (greedy) or a positive number", least=0)
        check_number("top-p", self.top_p, "above 0 and at most 1", least=0, most=1)
        if self.top_p == 0:
            raise RequestError("top-p is 0; it must be above 0 and at most 1")
        check_whole("top-k", self.top_k, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        penalty = f"a number from {LEAST_PENALTY} to 1000, 1 for none"
        check_number("repetition_penalty", self.repetition_penalty, penalty, least=LEAST_PENALTY, most=1000)


class Sampler:
    """Draws the tokens of one answer; the same seed gives the same answer. `prompt_ids` count as repetitions too."""

    def __init__(self, settings: Sampling, prompt_ids: Iterable[int] = ()) -> None:
        self._settings = settings
        self._used = {int(token) for token in prompt_ids} if settings.repetition_penalty != 1 else set[int]()

    @cached_property
    def rng(self) -> np.random.Generator:
        """Made when the first token is drawn: greedy answers need not wait for numpy's generators to be imported."""
        return np.random.default_rng(self._settings.seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Token id for logits [vocab]."""
        penalty = np.float32(self._settings.repetition_penalty)
        if penalty == 1:
            return self._draw(logits)
        used = np.array([token for token in self._used if token < len(logits)], np.int64)
        scores = logits.copy()
        with np.errstate(over="ignore"):
            scores[used] = np.where(scores[used] < 0, scores[used] * penalty, scores[used] / penalty)
        token = self._draw(scores)
        self._used.add(token)
        return token

    def _draw(self, logits: NDArray[np.float32]) -> int:
        s = self._settings
        if s.temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):
            scores = (logits.astype(np.float64) - float(logits.max())) / s.temperature
        if 0 < s.top_k < len(scores):
            scores[scores < np.partition(scores, -s.top_k)[-s.top_k]] = -np.inf
        odds = np.exp(scores)
        odds /= odds.sum()
        if s.top_p < 1:  # the smallest set of most likely tokens that holds this mass
            order = np.argsort(-odds, kind="stable")
            before = np.cumsum(odds[order]) - odds[order]
            odds[order[before >= s.top_p]] = 0
            odds /= odds.sum()
        return int(self.rng.choice(len(odds), p=odds))


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """The natural logarithm of a token's probability under logits [vocab], as the model gives them."""
    return float(log_softmax(logits)[token])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logarithms of the probabilities of all tokens under logits [..., vocab], as the model gives them."""
    scores = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normed: NDArray[np.float64] = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return normed


def most_likely(logits: NDArray[np.float32], count: int) -> Likely:
    """The `count` most likely tokens under logits [vocab], the likeliest first, with their log probabilities."""
    scores = log_softmax(logits)
    return tuple((int(token), float(scores[token])) for token in np.argsort(-scores, kind="stable")[:count])
