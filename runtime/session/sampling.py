"""From logits to a token: bias and penalties, then greedy, or temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.checks import check_number, check_whole
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.generator import SplitMix

LEAST_PENALTY = 1e-3
NOT_FINITE = "the logits of this answer are not finite numbers; export with --precision bf16 or fp32"
MAX_BIASES = 1024
Likely: TypeAlias = tuple[tuple[int, float], ...]  # token ids, the likeliest first, with their log probabilities


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in.

    `repetition_penalty` above 1 makes tokens of the prompt and of the answer so far less likely; 1 does nothing.
    `presence_penalty` is subtracted from the logits of the answer's tokens so far, `frequency_penalty` once for each
    time; `logit_bias` (token id, number) is added. `min_p` leaves in tokens at least this probable, as a share of the
    most likely one's; 0 all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "0 (greedy) or a positive number", least=0)
        check_number("top-p", self.top_p, "above 0 and at most 1", least=0, most=1)
        if self.top_p == 0:
            raise RequestError("top-p is 0; it must be above 0 and at most 1")
        check_whole("top-k", self.top_k, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        check_number("min_p", self.min_p, "a share from 0 to 1", least=0, most=1)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), "a number from -2 to 2", least=-2, most=2)
        if not isinstance(self.logit_bias, tuple) or len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias must be a tuple of at most {MAX_BIASES} pairs of a token id and a number")
        for token, bias in self.logit_bias:
            check_whole("a token of logit_bias", token, 0)
            check_number(f"the bias of token {token}", bias, "a number from -100 to 100", least=-100, most=100)
        penalty = f"a number from {LEAST_PENALTY} to 1000, 1 for none"
        check_number("repetition_penalty", self.repetition_penalty, penalty, least=LEAST_PENALTY, most=1000)


class Sampler:
    """Draws the tokens of one answer; the same seed gives the same answer. `prompt_ids` count as repetitions too."""

    def __init__(self, settings: Sampling, prompt_ids: Iterable[int] = ()) -> None:
        self._settings = settings
        self._used = {int(token) for token in prompt_ids} if settings.repetition_penalty != 1 else set[int]()
        self._given = Counter[int]()
        self.generator = SplitMix(settings.seed)
        added = (settings.presence_penalty, settings.frequency_penalty, settings.logit_bias)
        self._adds = added != (0, 0, ())
        # It chooses the largest logit as the model gives them.
        self.greedy = settings.temperature == 0 and settings.repetition_penalty == 1 and not self._adds

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Token id for logits [vocab]. Raises BundleError: the largest is not a number."""
        s = self._settings
        penalty = np.float32(self._settings.repetition_penalty)
        if self._adds:
            logits = logits.copy()
            for token, bias in s.logit_bias:
                if token >= len(logits):
                    raise RequestError(f"logit_bias names token {token}; the model has {len(logits):,}, from 0 on")
                logits[token] += np.float32(bias)
            for token, times in self._given.items():
                logits[token] -= np.float32(s.presence_penalty + times * s.frequency_penalty)
        if penalty != 1:
            tokens = np.array([token for token in self._used if token < len(logits)], np.int64)
            logits = logits.copy()
            with np.errstate(over="ignore"):
                logits[tokens] = np.where(logits[tokens] < 0, logits[tokens] * penalty, logits[tokens] / penalty)
        token = self._draw(logits)
        if not self.greedy:
            self._used.add(token)
            self._given[token] += 1
        return token

    def _draw(self, logits: NDArray[np.float32]) -> int:
        s = self._settings  # the first that is not a number, if there is one
        best = int(logits.argmax())
        most = float(logits[best])
        check_finite(most)
        if s.temperature == 0:
            return best
        with np.errstate(over="ignore"):
            scores = (logits.astype(np.float64) - most) / s.temperature
        if 0 < s.top_k < len(scores):
            scores[scores < np.partition(scores, -s.top_k)[-s.top_k]] = -np.inf
        odds = np.exp(scores)
        odds /= odds.sum()
        if s.top_p < 1:  # the smallest set of most likely tokens that holds this mass
            order = np.argsort(-odds, kind="stable")
            before = np.cumsum(odds[order]) - odds[order]
            odds[order[before >= s.top_p]] = 0
            odds /= odds.sum()
        if s.min_p > 0:
            odds[odds < s.min_p * odds.max()] = 0
            odds /= odds.sum()
        return self.generator.choice(odds)


def check_finite(most: float) -> None:
    """Raise BundleError unless the largest logit is a number: others may be left out as minus infinity."""
    if not math.isfinite(most):
        raise BundleError(NOT_FINITE)


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """The natural logarithm of a token's probability under logits [vocab], as the model gives them."""
    return float(log_softmax(logits)[token])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logarithms of the probabilities of all tokens under logits [..., vocab], as the model gives them."""
    most = logits.max(axis=-1, keepdims=True)
    check_finite(float(most.sum()))
    scores = logits.astype(np.float64) - most
    normed: NDArray[np.float64] = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return normed


def most_likely(logits: NDArray[np.float32], count: int) -> Likely:
    """The `count` most likely tokens under logits [vocab], the likeliest first, with their log probabilities."""
    scores = log_softmax(logits)
    return tuple((int(token), float(scores[token])) for token in np.argsort(-scores, kind="stable")[:count])
