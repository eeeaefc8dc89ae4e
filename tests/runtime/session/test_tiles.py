"""Images in tiles against transformers, and at K and under reductions against the plain statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.dialects import DialectBackend
from tests.support.exported import Models, greedy, prompt
from tests.support.families.internvl import INTERNVL
from tests.support.families.llava_next import GRANITE, LLAVA_NEXT
from tests.support.families.llava_onevision import ONEVISION, onevision_of_another_scale
from tests.support.families.smolvlm import SMOLVLM
from tests.support.parity import (
    STEPS,
    TOLERANCE,
    assert_answers_as_reference,
    assert_later_equal_fresh,
    assert_near_reference,
)
from tests.support.reduced import Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import ContextError, RequestError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden

pytestmark = pytest.mark.dialects(*DIALECTS)

WIDE, HIGH = (150, 60), (40, 90)
VARIANTS = {
    "grouped": LLAVA_NEXT,
    "multi-head, names as saved": Tiny(family="llava_next", context=512, kv_heads=4, names="saved", text="mistral"),
    "state-dict names, sharded": Tiny(family="llava_next", context=512, names="new", shards=3),
}
VARIANTS |= {
    "granite vision, grouped": GRANITE,
    "granite vision, multi-head, biases, names as saved": replace(
        GRANITE, kv_heads=4, attention_bias=True, mlp_bias=True, tied=False, names="saved", feature_layer=(1, -1)
    ),
}
VARIANTS |= {
    "internvl, grouped": INTERNVL,
    "internvl, multi-head, biases": replace(INTERNVL, kv_heads=4, attention_bias=True, text="llama", shards=2),
}
VARIANTS |= {
    "onevision, grouped": ONEVISION,
    "onevision, multi-head, names as saved": replace(ONEVISION, kv_heads=4, names="saved", tied=True),
}
VARIANTS |= {
    "smolvlm, grouped": SMOLVLM,
    "idefics3, multi-head, tied": replace(SMOLVLM, family="idefics3", kv_heads=4, tied=True, names="hub", shards=2),
}


def named(tiny: Tiny) -> str:
    return "granite vision" if tiny.text == "granite" else tiny.family


QUESTION = "What is the colour of the square in the picture?"


@pytest.mark.covering(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shapes", [(WIDE,), (HIGH,), (HIGH, WIDE)], ids=["wide", "high", "both"])
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_a_bundle_answers_as_transformers_and_at_k_as_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, shapes: tuple[tuple[int, int], ...]
) -> None:
    images = [random_image(seed, shape) for seed, shape in enumerate(shapes)]
    assert_answers_as_reference(models(tiny, (3, 5)), reference(tiny), prompt_messages(QUESTION, len(images)), images)


def test_several_images_of_onevision_answer_as_transformers_at_another_scale_of_pixel_values(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = onevision_of_another_scale(tiny_checkpoint(ONEVISION), tmp_path / "checkpoint")
    folder = export(checkpoint, tmp_path / "bundle", (3, 5), dialects=ORT).folder
    images = [random_image(0, WIDE), random_image(1, HIGH)]
    with load(folder, device="cpu", threads=1) as model:
        assert_answers_as_reference(model, Reference(checkpoint), prompt_messages(QUESTION, 2), images)


@pytest.mark.parametrize("tiny", [LLAVA_NEXT, GRANITE, ONEVISION, INTERNVL, SMOLVLM], ids=named)
@pytest.mark.parametrize("k", [None, 5])
def test_later_questions_equal_fresh_runs(models: Models, k: int | None, tiny: Tiny) -> None:
    assert_later_equal_fresh(models(tiny, (3, 5)), [random_image(0, WIDE), random_image(1, HIGH)], k)


METHODS = {
    "fastv": Method(fastv=(2, 0.5)),
    "cls": Method(cls_keep=0.5),
    "mustdrop": Method(key=0.2, layers=(2, 4), gamma=0.015, alpha=0.01),
    "cdpruner": Method(cdpruner=(7, "embedding")),
    "cdpruner without text": Method(cdpruner=(5, "none")),
    "divprune": Method(divprune=20),
    "visionzip": Method(visionzip=(4, 2)),
    "hiprune": Method(hiprune=(8, 0.7, 1)),
    "dart": Method(dart=(24, 2, 2, 2)),
    "dart before layer 1": Method(dart=(24, 0, 2, 2)),
}


CASES = [(LLAVA_NEXT, name) for name in METHODS]
CASES += [(ONEVISION, name) for name in ("fastv", "dart")]
CASES += [(GRANITE, name) for name in ("fastv", "cdpruner", "dart", "dart before layer 1")]
CASES += [(INTERNVL, name) for name in ("fastv", "cdpruner", "divprune", "dart")]
CASES += [(INTERNVL, "dart before layer 1")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tiny", "name"), CASES, ids=[f"{named(tiny)}, {name}" for tiny, name in CASES])
def test_reductions_equal_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, name: str
) -> None:
    method = METHODS[name]
    model, judge = models(tiny, (), "fp32", (word(method),)), reference(tiny)
    images, messages = [random_image(0, HIGH), random_image(1, WIDE)], prompt_messages(QUESTION, 2)
    wanted = Statement(judge).answer(judge.inputs(messages, images), method, STEPS)
    found = Talk(model).ask(messages, images, method, STEPS)
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    assert found.kept == wanted.kept
    assert list(found.done.slots) == wanted.slots
    assert min(wanted.vision) < sum(image.placeholders for image in wanted.images), "nothing left"


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["ort-cuda", "plain", "trt", "trt10"])
def test_graphs_of_other_dialects_compute_the_same(models: Models, dialect: str) -> None:
    """SmolVLM's tower ends in a norm, and its projector stands behind a pixel shuffle."""
    model, images = models(SMOLVLM, (3, 5)), [random_image(0, WIDE), random_image(1, HIGH)]
    other, messages = Model(model.bundle, DialectBackend(model.bundle, dialect), 0), prompt_messages(QUESTION, 2)
    for k in (None, 5):
        wanted, found = (greedy(m, prompt(m, messages, images), k, STEPS) for m in (model, other))
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits, atol=1e-4, rtol=0)


def test_fastv_ranks_the_tokens_of_all_marked_tiles(models: Models, reference: Callable[..., Reference]) -> None:
    method = METHODS["fastv"]
    model, judge = models(SMOLVLM, (), "fp32", (word(method),)), reference(SMOLVLM)
    images, messages = [random_image(0, HIGH), random_image(1, WIDE)], prompt_messages(QUESTION, 2)
    wanted = Statement(judge).answer(judge.inputs(messages, images), method, STEPS)
    with model.open(images) as conversation:
        options = Options(STEPS, ignore_eos=True, logprobs=True)
        found = conversation.ask(QUESTION, None, options, reduce=word(method))
    assert list(found.token_ids) == wanted.ids
    chosen = [float(row[id]) for row, id in zip(wanted.logits.log_softmax(-1), wanted.ids, strict=True)]
    np.testing.assert_allclose(found.logprobs or (), chosen, atol=2 * TOLERANCE, rtol=0)
    assert list(found.stats.kv_slots) == wanted.slots


@pytest.mark.parametrize("spec", ["cdpruner", "dart:k=0", "divprune", "random"])
def test_what_leaves_out_tokens_before_the_decoder_is_refused_where_text_stands_among_them(
    tiny_checkpoint: Callable[..., Path], models: Models, tmp_path: Path, spec: str
) -> None:
    with pytest.raises(RequestError, match="this model has text between its tiles"):
        export(tiny_checkpoint(SMOLVLM), tmp_path / "bundle", reductions=(spec,))
    with pytest.raises(RequestError, match="this model has text between its tiles"):
        models(SMOLVLM, (3, 5)).loaded.policy(None, reduce=spec)


def test_a_prompt_of_marked_tiles_says_which_number_of_them_would_fit(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = export(tiny_checkpoint(SMOLVLM), tmp_path / "bundle", (), max_context=90).folder
    images = [random_image(0, (112, 112))] * 2
    refused = pytest.raises(ContextError, match=r"40 of them for images, and 89 fit .* --max-tiles 4 .*fits")
    with load(folder, device="cpu", threads=1) as model, model.open(images) as conversation, refused:
        conversation.ask("red?")
    with load(folder, device="cpu", threads=1, max_tiles=4) as model, model.open(images) as conversation:
        assert conversation.ask("red?", None, Options(2)).stats.vision_tokens == 2 * 4


@pytest.mark.parametrize("spec", ["cls", "mustdrop:tau=off,layers=2/4", "lsm"])
def test_what_looks_at_single_patches_is_refused_where_a_token_has_four(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, spec: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="each token of this model covers 2 x 2 patches"):
        export(tiny_checkpoint(INTERNVL), tmp_path / "bundle", reductions=(spec,))


def test_merging_is_refused_at_export(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="joins its tiles into one grid; disable merging"):
        export(tiny_checkpoint(LLAVA_NEXT), tmp_path / "bundle", reductions=("lsm",))


def test_a_prompt_that_does_not_fit_says_which_number_of_tiles_would(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = export(tiny_checkpoint(LLAVA_NEXT), tmp_path / "bundle", (), max_context=120).folder
    images = [random_image(0, (112, 112))] * 2
    refused = pytest.raises(ContextError, match=r"176 of them for images, and 119 fit .* --max-tiles 4 .*fits")
    with load(folder, device="cpu", threads=1) as model, model.open(images) as conversation, refused:
        conversation.ask("red?")
    with load(folder, device="cpu", threads=1, max_tiles=4) as model, model.open(images) as conversation:
        assert conversation.ask("red?", None, Options(2)).stats.vision_tokens == 2 * (16 + 4 * 5)


def test_tiles_are_refused_where_images_have_none(models: Models) -> None:
    with pytest.raises(RequestError, match="sees each image in one piece"):
        load(models(Tiny(), (3, 5)).bundle.folder, device="cpu", max_tiles=2)


def test_a_fit_is_refused_where_images_come_in_tiles(models: Models) -> None:
    with pytest.raises(RequestError, match="in tiles"):
        models(LLAVA_NEXT, (3, 5)).open(random_image(0), fit="pad")


@pytest.mark.parametrize("tiny", [LLAVA_NEXT, GRANITE, ONEVISION, INTERNVL, SMOLVLM], ids=named)
def test_the_golden_vectors_hold(models: Models, tiny: Tiny) -> None:
    checks = list(check_golden(models(tiny, (3, 5))))
    assert len(checks) == 6
    assert all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 2e-3), ("bf16", 1e-2), ("int8", 0.06), ("int4", 0.4)])
def test_granites_multipliers_hold_at_every_precision(
    models: Models, reference: Callable[..., Reference], precision: str, most: float
) -> None:
    """They are in weights, which are rounded once multiplied; logits reach 4.2. Most seen: a third of the limits."""
    tiny = replace(GRANITE, dtype="bfloat16")
    model, messages = models(tiny, (3,), precision), prompt_messages(QUESTION)
    assert_near_reference(model, reference(tiny), messages, [random_image(0, WIDE)], most)


@pytest.mark.parametrize("tiny", [LLAVA_NEXT, GRANITE, INTERNVL, SMOLVLM], ids=named)
def test_openvino_gives_the_same_answers(models: Models, tiny: Tiny) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    model, options = models(tiny, (3, 5)), Options(STEPS, ignore_eos=True)
    images = [random_image(0, HIGH), random_image(1, WIDE)]
    with load(model.bundle.folder, device="openvino", threads=1) as other:
        for k in (None, 5):
            answers = [m.open(images).ask(QUESTION, k, options) for m in (model, other)]
            assert answers[0].token_ids == answers[1].token_ids
            assert answers[0].stats.kv_slots == answers[1].stats.kv_slots
