"""PyramidDrop on random settings and layouts: ids, logits, tokens and slots are those of the plain statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.exported import DEVICES, THREADS, Models
from tests.support.pyramiddrop import CASES, EXPORTED, drawn
from tests.support.reduced import STEPS, TOLERANCE, Talk
from tests.support.reference import Reference
from tests.support.statement import Statement
from tests.support.tiny import Tiny, prompt_messages
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

pytestmark = pytest.mark.dialects("ort", "plain")


@pytest.fixture(scope="module")
def on(models: Models) -> Callable[[Tiny, str], Model]:
    """The bundle of a checkpoint on a device, loaded once."""

    @cache
    def loaded(tiny: Tiny, device: str) -> Model:
        model = models(tiny, (4,), "fp32", (EXPORTED,))
        return model if device == "cpu" else load(model.bundle.folder, device=device, threads=THREADS)

    return loaded


@pytest.mark.sampled(29)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", CASES)
def test_random_settings_equal_the_statement(
    on: Callable[[Tiny, str], Model], reference: Callable[..., Reference], number: int, device: str
) -> None:
    case = drawn(number)
    talk, judge = Talk(on(case.tiny, device)), reference(case.tiny)
    for method in (case.method, replace(case.method, k=4)):  # the second runs on what the first has left
        messages = prompt_messages(case.question, len(case.images))
        wanted = Statement(judge).answer(judge.inputs(messages, case.images), method, STEPS)
        found = talk.ask(messages, case.images, method, STEPS)
        sure = int((wanted.logits.topk(2).values.diff().abs()[:, 0] > 2 * TOLERANCE).int().cumprod(0).sum())
        assert found.ids[:sure] == wanted.ids[:sure]
        np.testing.assert_allclose(found.logits[: sure + 1], wanted.logits[: sure + 1].numpy(), atol=TOLERANCE, rtol=0)
        left = found.kept if method.k is None else {n: kept for n, kept in found.kept.items() if n < 3}
        assert left == {n: kept for n, kept in wanted.kept.items() if method.k is None or n < 3}
        assert list(found.done.slots) == wanted.slots
