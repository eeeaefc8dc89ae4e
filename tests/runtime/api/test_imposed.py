"""What a form imposes is told: counts and log probabilities of llguidance's own masks, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.exported import Models
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.answer import UNLIKELY, Imposed
from vtx.runtime.api.model import Model
from vtx.runtime.prompt import guiding
from vtx.runtime.prompt.guiding import Grammars, Guide

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
QUESTION = "How many shapes are there?"
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["shape", "count"], "additionalProperties": False,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"schema": SHAPE}, "choices": {"choices": ("red", "red circle")}, "regex": {"regex": "[a-z]{3}!"},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(context=512, kv_heads=4), ks=(3,))


def expected(model: Model, guide: Guide, answer: Any) -> list[float]:
    """The log probabilities of the tokens for which the masks leave one, or leave the likeliest out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guiding, "GuidedAnswer", lambda matcher: matcher)  # llguidance's own object
        matcher: Any = Grammars(model.loaded.text, model.manifest.model.vocab).start(guide)
    imposed = list[float]()
    for token, logprob, likely in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        forced = matcher.compute_ff_tokens()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = set(forced[:1]) if forced else set(np.flatnonzero(bits).tolist())
        if len(allowed) == 1 or likely[0][0] not in allowed:
            imposed.append(logprob)
        assert matcher.consume_token(token)
    return imposed


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_imposed_is_what_the_masks_left_no_choice_of(model: Model, form: str, temperature: float) -> None:
    with model.open(random_image(1)) as image:
        answer = image.ask(
            QUESTION, logprobs=True, top_logprobs=1, temperature=temperature, seed=5, max_new_tokens=60, **FORMS[form]
        )
        free = image.ask(QUESTION, max_new_tokens=3)
    own = expected(model, Guide(**FORMS[form]), answer)
    imposed = answer.stats.imposed
    assert imposed is not None
    assert imposed.tokens == len(own) > 0
    assert imposed.mean_logprob == pytest.approx(sum(own) / len(own))
    assert imposed.least_logprob == pytest.approx(min(own))
    assert answer.to_dict()["imposed"]["tokens"] == len(own)
    assert free.stats.imposed is None
    assert "imposed" not in free.to_dict()


def test_unlikely_is_a_mean_below_the_limit() -> None:
    assert Imposed.of([]) == Imposed(0, None, None, unlikely=False)
    assert Imposed.of([UNLIKELY, UNLIKELY]) == Imposed(2, UNLIKELY, UNLIKELY, unlikely=False)
    below = Imposed.of([2 * UNLIKELY - 1, 0.0])
    assert below.unlikely
    assert below.least_logprob == 2 * UNLIKELY - 1
    assert "2 tokens" in below.in_words
    assert math.isclose(below.mean_logprob or 0, UNLIKELY - 0.5)
