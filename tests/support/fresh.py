"""Fresh single answers: what every consumer of conversations is held to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from vtx.runtime.api.answer import Answer
from vtx.runtime.api.images import Picture
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options

Setting = tuple[int | str | None, str]  # K and reductions
NAMES = ("one.png", "two.png", "three.png")
NEITHER: Setting = (None, "none")
EXACT = ("text", "token_ids", "stopped", "k", "reduce", "vision_tokens_kept", "kv_slots")
TOLERANCE = 1e-4  # of log probabilities, where caches were reused


@dataclass
class FreshAnswers:
    """Answers of conversations that nothing else is asked in; `images` by name."""

    model: Model
    images: Mapping[str, Picture]
    options: Options
    _known: dict[Any, Answer] = field(default_factory=dict)

    def __call__(self, names: Sequence[str], question: str, setting: Setting) -> Answer:
        known = tuple(names), question, setting
        if known not in self._known:
            with self.model.open([self.images[name] for name in names]) as conversation:
                k, reduce = setting
                self._known[known] = conversation.ask(question, k, self.options, reduce=reduce)
        return self._known[known]

    def check(self, result: Mapping[str, Any], names: Sequence[str], question: str, setting: Setting) -> None:
        """Raise AssertionError where a result, as `vtx-run --json` prints it, is not the fresh answer."""
        wanted = self(names, question, setting).to_dict()
        asked = f"{question!r} about {names} at {setting}"
        for name in EXACT:
            value = list(wanted[name]) if isinstance(wanted[name], tuple) else wanted[name]
            assert result[name] == value, f"{name} of {asked}"
        if self.options.logprobs:
            assert result["logprobs"] == pytest.approx(wanted["logprobs"], abs=TOLERANCE, rel=0), asked

    def differ(self, *asked: tuple[Sequence[str], str, Setting]) -> bool:
        """Whether no two of these answers could be taken for each other."""
        found = [self(*one).logprobs for one in asked]
        assert all(found), "log probabilities tell answers apart where the tokens do not"
        return all(a != pytest.approx(b, abs=10 * TOLERANCE, rel=0) for n, a in enumerate(found) for b in found[:n])


def shuffled(
    seed: int,
    count: int,
    images: Sequence[str],
    questions: Sequence[str],
    settings: Sequence[Setting] = ((None, "none"),),
) -> list[tuple[list[str], str, Setting]]:
    """Random questions, half of them about the images of the one before, each at a setting of its own."""
    rng, asked = random.Random(seed), list[tuple[list[str], str, Setting]]()
    for _ in range(count):
        names = asked[-1][0] if asked and rng.random() < 0.5 else rng.sample(list(images), rng.randint(0, 2))
        asked.append((names, rng.choice(list(questions)), rng.choice(list(settings))))
    return asked
