"""Reductions in every family and text model: the statement is transformers', and bundles answer as the statement."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.exported import Models
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.parity import STEPS
from tests.support.reduced import Talk, word
from tests.support.reference import Reference
from tests.support.statement import Method, Statement
from tests.support.tiny import Tiny, prompt_messages, random_image

KS = (3, 5)
TOLERANCE = 1e-4
QUESTIONS = ("What is the colour of the square in the picture?", "how many red shapes are there?", "left?")
QWEN3 = Tiny(text="qwen3", attention_bias=True, head_dim=24, rope="yarn")
INTERNVL = Tiny(
    family="internvl", vision="internvl", text="qwen3", tokenizer="bytes", names="saved", feature_layer=-1, context=512,
    image=112,
)  # fmt: skip
WITHIN = {
    "withdrawal": Method(k=5),
    "fastv": Method(fastv=(2, 0.5)),
    "fastv, then withdrawal": Method(fastv=(2, 0.5), k=5),
    "dart": Method(dart=(8, 2, 2, 2)),
    "dart, released order": Method(dart=(8, 2, 2, 2), dart_order="code", k=5),
    "dart before layer 1": Method(dart=(6, 0, 2, 2)),
    "cdpruner": Method(cdpruner=(5, "embedding")),
    "pyramiddrop": Method(pyramiddrop=(0.6, (1, 3)), k=5),
}
PATCHES = {
    "cls": Method(cls_keep=0.5, k=3),
    "mustdrop": Method(key=0.2, layers=(2, 4), gamma=0.06, alpha=0.05),
    "mustdrop as released": Method(
        key=0.2, layers=(2, 4), gamma=0.06, alpha=0.05, positions="renumber", order="merged-first", keys="last-block"
    ),
}  # fmt: skip
FAMILIES = {
    "qwen3": (QWEN3, WITHIN | PATCHES),
    "qwen3, internvl": (INTERNVL, WITHIN),
    "qwen2": (Tiny(text="qwen2", select="full"), WITHIN | PATCHES),
    "mistral": (Tiny(text="mistral", head_dim=24, tied=True, rope="longrope"), WITHIN | PATCHES),
    "vipllava": (Tiny(family="vipllava", feature_layer=(-2, -1, 1)), WITHIN | PATCHES),
    "video_llava": (Tiny(family="video_llava", context=768), WITHIN),
    "fast_vlm": (FAST_VLM, WITHIN),
    "llava_next_video": (Tiny(family="llava_next_video", context=512), WITHIN),
}
CASES = [
    pytest.param(tiny, way, id=f"{name}, {kind}")
    for name, (tiny, ways) in FAMILIES.items()
    for kind, way in ways.items()
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_statement_is_transformers_and_at_k_the_withdrawal(reference: Callable[..., Reference], name: str) -> None:
    judge = reference(FAMILIES[name][0])
    inputs = judge.inputs(prompt_messages(QUESTIONS[0]), [random_image(4)])
    whole, cut, (ids, logits) = (
        Statement(judge).answer(inputs, Method(), STEPS), Statement(judge).answer(inputs, Method(k=5), STEPS),
        judge.generate_hf(inputs, STEPS),
    )  # fmt: skip
    assert whole.ids == ids
    np.testing.assert_allclose(whole.logits, logits, atol=TOLERANCE, rtol=0)
    wanted = judge.greedy(inputs, 5, STEPS)
    assert cut.ids == wanted.ids
    np.testing.assert_allclose(cut.logits, wanted.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tiny", "method"), CASES)
def test_a_bundle_answers_as_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, method: Method
) -> None:
    ways = next(ways for known, ways in FAMILIES.values() if known == tiny)
    specs = tuple(dict.fromkeys(word(way) for way in ways.values() if word(way) != "none"))
    model, judge = models(tiny, KS, "fp32", specs), reference(tiny)
    for question in QUESTIONS:
        messages, images = prompt_messages(question), [random_image(4)]
        wanted = Statement(judge).answer(judge.inputs(messages, images), method, STEPS)
        if wanted.margin > 2 * TOLERANCE:
            break
    found = Talk(model).ask(messages, images, method, STEPS)
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    assert list(found.done.slots) == wanted.slots
    last = list(range(sum(len(image.rows) for image in wanted.images)))
    for layer, kept in sorted(wanted.kept.items()):
        assert found.kept.get(layer, last) == kept
        last = kept
    assert min(wanted.vision) < wanted.images[0].placeholders or min(wanted.vision) < tiny.vision_tokens
