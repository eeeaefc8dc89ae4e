"""FastVLM's convolutional tower at every precision, in every dialect and on OpenVINO; and what it cannot give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.dialects import DialectBackend
from tests.support.exported import Models, greedy, prompt
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.parity import STEPS, assert_chat_as_reference, assert_later_equal_fresh, assert_near_reference
from tests.support.reference import Reference
from tests.support.tiny import prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import UnsupportedModelError
from vtx.runtime.report.golden import check_golden

pytestmark = pytest.mark.dialects(*DIALECTS)

QUESTION = "What is the colour of the square in the picture?"
KS = (3, 5)


def test_the_golden_vectors_hold(models: Models) -> None:
    checks = list(check_golden(models(FAST_VLM, KS)))
    assert len(checks) == 6
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("k", [None, 5])
def test_later_questions_and_chats_are_answered_as_if_asked_alone(
    models: Models, reference: Callable[..., Reference], k: int | None
) -> None:
    images = [random_image(0, (150, 60)), random_image(1)]
    assert_later_equal_fresh(models(FAST_VLM, KS), images, k)
    assert_chat_as_reference(models(FAST_VLM, KS), reference(FAST_VLM), images, k)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.02), ("bf16", 0.02), ("int8", 0.8), ("int4", 6.0)])
def test_logits_are_near_those_of_transformers_at_every_precision(
    models: Models, reference: Callable[..., Reference], precision: str, most: float
) -> None:
    tiny = replace(FAST_VLM, dtype="bfloat16")
    model, messages = models(tiny, (3,), precision), prompt_messages(QUESTION)
    assert_near_reference(model, reference(tiny), messages, [random_image(0)], most)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["ort-cuda", "plain", "trt", "trt10"])
def test_graphs_of_other_dialects_compute_the_same(models: Models, dialect: str) -> None:
    model, images = models(FAST_VLM, KS), [random_image(0), random_image(1)]
    other, messages = Model(model.bundle, DialectBackend(model.bundle, dialect), 0), prompt_messages(QUESTION, 2)
    for k in (None, 5):
        wanted, found = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (model, other))
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-4, rtol=0)


def test_openvino_gives_the_same_answers(models: Models) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    model, options, images = models(FAST_VLM, KS), Options(STEPS, ignore_eos=True), [random_image(0), random_image(1)]
    with load(model.bundle.folder, device="openvino", threads=1) as other:
        for k in (None, 5):
            answers = [m.open(images).ask(QUESTION, k, options) for m in (model, other)]
            assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize(
    "spec", ["cls", "lsm", "hiprune", "visionzip", "mustdrop:layers=2/4,tau=off", "mustdrop:layers=2/4,key=0"]
)
def test_what_looks_into_a_tower_of_patches_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, spec: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no class token|tower is convolutional"):
        export(tiny_checkpoint(FAST_VLM), tmp_path / "bundle", reductions=(spec,))
