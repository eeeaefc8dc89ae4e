"""Every method on random settings, layouts and questions: the plain statement's answers, in both runtimes.

`VTX_METHOD_CASES=40 pytest tests/runtime/session/test_random_methods.py` asks 40 of each method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support import cpp
from tests.support.exported import DEVICES, THREADS, Models
from tests.support.fixtures import References
from tests.support.near import assert_near
from tests.support.random_methods import CASES, EXPORTED, drawn
from tests.support.reduced import STEPS, TOLERANCE, Talk, word
from tests.support.statement import Statement
from tests.support.tiny import Tiny, prompt_messages
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

pytestmark = pytest.mark.dialects("ort", "plain")
K = 4


@pytest.fixture(scope="module")
def on(models: Models) -> Callable[[Tiny, str], Model]:
    """The bundle of a checkpoint on a device, loaded once."""

    @cache
    def loaded(tiny: Tiny, device: str) -> Model:
        model = models(tiny, (K,), "fp32", EXPORTED[tiny])
        return model if device == "cpu" else load(model.bundle.folder, device=device, threads=THREADS)

    return loaded


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_answers_equal_the_statement_on_every_engine(
    on: Callable[[Tiny, str], Model], reference: References, name: str, number: int
) -> None:
    case = drawn(name, number)
    judge, messages = reference(case.tiny), prompt_messages(case.question, len(case.images))
    inputs = judge.inputs(messages, case.images)
    for method in (case.method, replace(case.method, k=K)):  # the second runs on what the first has left
        wanted = Statement(judge).answer(inputs, method, STEPS)
        sure = int((wanted.logits.topk(2).values.diff().abs()[:, 0] > 2 * TOLERANCE).int().cumprod(0).sum())
        for device in DEVICES:
            found = Talk(on(case.tiny, device)).ask(messages, case.images, method, STEPS)
            assert found.ids[:sure] == wanted.ids[:sure], device
            logits = wanted.logits[: sure + 1].numpy()
            assert_near(found.logits[: sure + 1], logits, TOLERANCE)
            assert list(found.done.slots) == wanted.slots, device
            # Where nothing leaves there is no cut; slots would tell one that is missing.
            assert method.k is not None or {n: wanted.kept[n] for n in found.kept} == found.kept, device


@pytest.mark.slow
@cpp.needs_cpp
@pytest.mark.parametrize(("name", "number"), CASES[::2])
def test_answers_of_libvtx_equal_those_of_python(
    on: Callable[[Tiny, str], Model], tmp_path: Path, name: str, number: int
) -> None:
    case, device = drawn(name, number), DEVICES[CASES.index((name, number)) // 2 % len(DEVICES)]
    model, paths = on(case.tiny, device), [tmp_path / f"{place}.png" for place in range(len(case.images))]
    for path, image in zip(paths, case.images, strict=True):
        image.save(path)
    questions, spec = (case.question, "red?", case.question), word(case.method)
    for k in ("none", K):
        cpp.assert_asked_equal(model, paths, questions, "--device", device, k=k, reduce=spec, max_new_tokens=6)
