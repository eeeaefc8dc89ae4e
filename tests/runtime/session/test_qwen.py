"""Qwen2-VL, 2.5-VL and 3-VL: images native image resolution and positions of three parts, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import export
from tests.support.dialects import DialectBackend
from tests.support.exported import Models, greedy, prompt
from tests.support.families.qwen import QWEN2, QWEN3, QWEN25
from tests.support.parity import STEPS, TOLERANCE, assert_answers_as_reference, assert_later_equal_fresh
from tests.support.reduced import Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import ContextError, DeviceError, RequestError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden

pytestmark = pytest.mark.dialects(*DIALECTS)

WIDE, HIGH = (150, 60), (40, 90)  # 5 x 2 tokens and 1 x 3
VARIANTS = {
    "qwen2": QWEN2,
    "qwen2.5": QWEN25,
    "qwen2, tied, names as saved": replace(QWEN2, tied=True, names="saved", kv_heads=1),
    "qwen2.5, state-dict names, sharded": replace(QWEN25, names="new", shards=3, theta=1e6),
    "qwen3": QWEN3,
    "qwen3, one map, tied, names as saved": replace(
        QWEN3, maps=(2,), tied=True, names="saved", head_dim=24, attention_bias=True, theta=5e6
    ),
}
QUESTION = "What is the colour of the square in the picture?"


@pytest.mark.covering(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("shapes", [(WIDE,), (HIGH,), (HIGH, WIDE)], ids=["wide", "high", "both"])
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_a_bundle_answers_as_transformers_and_at_k_as_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, shapes: tuple[tuple[int, int], ...]
) -> None:
    images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
    assert_answers_as_reference(models(tiny, (3, 5)), reference(tiny), prompt_messages(QUESTION, len(images)), images)


def test_images_with_text_between_them_have_positions_of_their_own(
    models: Models, reference: Callable[..., Reference]
) -> None:
    model, judge, images = models(QWEN25, (3, 5)), reference(QWEN25), [random_image(1, WIDE), random_image(2, HIGH)]
    said = {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}
    messages = [*prompt_messages("what shape is there?"), said, *prompt_messages("and in the other image?")]
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    for k in (None, 5):
        found = greedy(model, asked, k, STEPS)
        wanted = judge.greedy(inputs, k, STEPS, guess=found.ids)
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [5, None])
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
def test_later_questions_equal_fresh_runs(models: Models, tiny: Tiny, k: int | None) -> None:
    assert_later_equal_fresh(models(tiny, (3, 5)), [random_image(0, WIDE)], k)


METHODS = {
    "fastv": Method(fastv=(2, 0.5)),
    "cdpruner": Method(cdpruner=(6, "embedding")),
    "dart": Method(dart=(8, 2, 2, 2)),
    "dart in the order of the code": Method(dart=(8, 2, 2, 2), dart_order="code"),
    "dart before layer 1": Method(dart=(8, 0, 2, 2)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tiny", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_reductions_equal_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, name: str
) -> None:
    method = METHODS[name]
    model, judge = models(tiny, (), "fp32", (word(method),)), reference(tiny)
    images, messages = [random_image(0, HIGH), random_image(1, (150, 120))], prompt_messages(QUESTION, 2)
    wanted = Statement(judge).answer(judge.inputs(messages, images), method, STEPS)
    found = Talk(model).ask(messages, images, method, STEPS)
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    assert found.kept == wanted.kept
    assert list(found.done.slots) == wanted.slots
    assert min(wanted.vision) < sum(image.placeholders for image in wanted.images), "nothing left"


@pytest.mark.parametrize(
    "spec", ["cls", "mustdrop:tau=off,layers=2/4", "lsm", "mustdrop:key=0,tau=off,layers=2/4,positions=renumber"]
)
def test_what_the_tower_or_the_positions_do_not_give_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, spec: str
) -> None:
    refused = "each token of this model covers 2 x 2 patches|positions of three parts, which cannot be renumbered"
    with pytest.raises(UnsupportedModelError, match=refused):
        export(tiny_checkpoint(QWEN2), tmp_path / "bundle", reductions=(spec,))


def test_a_prompt_that_does_not_fit_says_how_many_pixels_would(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = export(tiny_checkpoint(QWEN2), tmp_path / "bundle", (), max_context=80).folder
    images = [random_image(0, (160, 150))] * 2
    refused = pytest.raises(ContextError, match=r"60 of them for images, and 79 fit .* --max-pixels 22736 .*fits")
    with load(folder, device="cpu", threads=1) as model, model.open(images) as conversation, refused:
        conversation.ask("red?")
    with load(folder, device="cpu", threads=1, max_pixels=22736) as model, model.open(images) as conversation:
        assert conversation.ask("red?", None, Options(2)).stats.vision_tokens == 2 * 5 * 5
    for option in ({"max_tiles": 2}, {"fit": "pad"}, {"max_pixels": 700}):
        wanted = r"at native resolution|in one piece; use max_pixels|one token takes 28 x 28"
        with pytest.raises(RequestError, match=wanted):
            load(folder, device="cpu", **option)  # type: ignore[arg-type]


def test_images_of_equal_bytes_and_other_shapes_are_not_taken_for_each_other(models: Models) -> None:
    model = models(QWEN25, (3, 5))
    grey = random_image(0, (56, 56)).convert("L").point(lambda _: 9)
    wide, high = (model.loaded.prepare(grey.resize(size)) for size in ((112, 56), (56, 112)))
    assert wide.views.tobytes() == high.views.tobytes()
    assert wide.key != high.key


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3, QWEN2], ids=["qwen2.5", "qwen3", "qwen2"])
def test_the_golden_vectors_hold(models: Models, tiny: Tiny) -> None:
    checks = list(check_golden(models(tiny, (3, 5))))
    assert len(checks) == 6
    assert all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
def test_the_golden_vectors_hold_at_every_precision(models: Models, tiny: Tiny, precision: str) -> None:
    checks = list(check_golden(models(replace(tiny, tied=True), (3,), precision)))
    assert all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
def test_openvino_gives_the_same_answers(models: Models, tiny: Tiny) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    model, options = models(tiny, (3, 5)), Options(STEPS, ignore_eos=True)
    images = [random_image(0, HIGH), random_image(1, WIDE)]
    with load(model.bundle.folder, device="openvino", threads=1) as other:
        for k in (None, 3, 5):
            answers = [m.open(images).ask(QUESTION, k, options) for m in (model, other)]
            assert answers[0].token_ids == answers[1].token_ids
            assert answers[0].stats.kv_slots == answers[1].stats.kv_slots


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["ort-cuda", "plain", "trt", "trt10"])
@pytest.mark.parametrize("tiny", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
def test_graphs_of_other_dialects_compute_the_same(models: Models, tiny: Tiny, dialect: str) -> None:
    model = models(tiny, (3, 5))
    other, images = Model(model.bundle, DialectBackend(model.bundle, dialect), 0), [random_image(0, (150, 120))]
    messages = prompt_messages(QUESTION)
    for k in (None, 5):
        wanted, found = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (model, other))
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-4, rtol=0)


def test_tensorrt_asks_for_engines(models: Models) -> None:
    with pytest.raises(DeviceError, match="holds no engines; build them with: vtx-build"):
        load(models(QWEN25, (3, 5)).bundle.folder, device="tensorrt")
