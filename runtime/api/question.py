"""One answer on its way: the question, and what has been computed and is to be given out of its answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.accepting import MAX_SCORED
from vtx.runtime.api.answer import Progress, PromptLogprob
from vtx.runtime.api.options import Options
from vtx.runtime.policies.base import Policy
from vtx.runtime.prompt.messages import Message
from vtx.runtime.session.sampling import Likely
from vtx.runtime.session.session import PrefillResult, Selection


@dataclass(frozen=True, slots=True)
class Question:
    """Messages that were checked, their token `ids`, and how they are answered.

    `after` is the question of a chat's first turn.
    """

    messages: Sequence[Message]
    ids: NDArray[np.int64]
    policy: Policy
    options: Options
    after: Selection | None = None

    @property
    def scored_choices(self) -> Sequence[str]:
        """The choices whose probabilities are computed, if the answer is one of few."""
        guide = self.options.guide
        choices = None if guide is None else guide.choices
        return () if choices is None or len(choices) > MAX_SCORED else choices


@dataclass(slots=True)
class AnswerRecord:
    """The tokens of an answer so far, and what is told of them beside their text.

    `imposed`: log probabilities of the tokens that a form imposed.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likely: list[Likely] = field(default_factory=list)
    imposed: list[float] = field(default_factory=list)
    seg_states: list[tuple[float, ...]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob | None] | None = None
    choices: dict[str, float] | None = None
    choices_mass: float | None = None

    def progress(self, start: int) -> Progress:
        """Its tokens from number `start` on."""
        return Progress(tuple(self.ids[start:]), tuple(self.logprobs[start:]), tuple(self.likely[start:]))


@dataclass(slots=True)
class AnswerCosts:
    """The computed parts of an answer, each with the seconds after which it was done; `vision`: those of its images."""

    prompt_tokens: int
    prompt: PrefillResult | None = None
    vision: float = 0.0
    start: float = field(default_factory=perf_counter)
    prefilled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def prefill(self, prompt: PrefillResult) -> None:
        """The prompt has been computed."""
        self.prompt = prompt
        self.prefilled = perf_counter() - self.start

    def decode(self) -> None:
        """A token has been computed."""
        self.last_token = perf_counter() - self.start
        self.first_token = self.first_token or self.last_token

    def seconds(self, tokens: int) -> dict[str, float]:
        """The seconds that each part of an answer of `tokens` tokens took."""
        return {
            "vision": self.vision,
            "prefill": max(0.0, self.prefilled - self.vision),
            "first_token": self.first_token,
            "decode_per_token": (self.last_token - self.first_token) / max(1, tokens - 1),
        }
