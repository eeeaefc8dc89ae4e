"""Engines built and run on this machine's own GPU; `make test-gpu`. Elsewhere every test is skipped in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import IGNORE, export
from tests.support.exported import THREADS, greedy, prompt
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.tools.tensorrt.build import build_engines, plan_engines
from vtx.tools.tensorrt.targets import find_target, load_tensorrt

pytestmark = pytest.mark.gpu
TOLERANCE = {"fp32": 1e-3, "fp16": 6e-2, "int8": 6e-2, "int4": 6e-2}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def bundle(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A tiny bundle with engines for this GPU."""
    try:
        target = find_target("this")
        module, release = load_tensorrt(target)
    except DeviceError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("gpu") / request.param
    made = export(tiny_checkpoint(Tiny(layers=4)), folder, (2, 3), request.param)
    list(build_engines(plan_engines(made, target, release, module.__version__, release.dialect), IGNORE))
    return made


@pytest.mark.parametrize("k", [None, 2, 3])
def test_answers_are_those_of_onnxruntime_on_the_cpu(k: int | None, bundle: Bundle) -> None:
    ours, reference = (load(bundle.folder, device=device, threads=THREADS) for device in ("tensorrt", "cpu"))
    for number in range(3):
        images, messages = [random_image(number)], prompt_messages("How many circle shapes are there?")
        want = greedy(reference, prompt(reference, messages, images), k, 8)
        got = greedy(ours, prompt(ours, messages, images), k, 8, forced=want.ids)
        largest = np.abs(want.logits).max()
        np.testing.assert_allclose(got.logits, want.logits, atol=TOLERANCE[bundle.manifest.precision] * largest)


def test_a_second_question_on_the_image_is_answered_as_a_first_one(bundle: Bundle) -> None:
    model = load(bundle.folder, device="tensorrt", threads=THREADS)
    with model.open([random_image(1)]) as image:
        answers = [image.ask("red?", k).token_ids for k in ("none", 2, "none", 3, 2)]
    assert answers[0] == answers[2]
    assert answers[1] == answers[4]
