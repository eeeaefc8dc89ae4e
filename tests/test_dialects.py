"""Every dialect's graphs answer as the PyTorch statement does, run by onnxruntime's CPU provider."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.dialects import DialectBackend
from tests.exported import KS, Checkpoints, Models, greedy, policy, prompt
from tests.reference import Reference
from tests.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.model import Model
from vtx.runtime.names import DIALECTS
from vtx.runtime.session import Session

STEPS = 12
TOLERANCES = {"fp32": 1e-4, "fp16": 0.13}  # on logits that reach 12; fp16 as in test_parity
OTHERS = tuple(name for name in DIALECTS if name != "ort")  # which all other tests run
VARIANTS = {
    "clip-gqa": Tiny(),
    "clip-mha": Tiny(kv_heads=4, projector_act="quick_gelu", feature_layer=(-2, -1)),
    "clip-one-kv-head-llama3": Tiny(kv_heads=1, head_dim=24, rope="llama3", tied=True),
    "siglip-biases": Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True),
    "qwen2-siglip-mha": Tiny(text="qwen2", vision="siglip", kv_heads=4, vision_act="gelu"),
}
WORDS = "What is the colour of the square in the picture?"
Get = Callable[..., Model]


@pytest.fixture(scope="module")
def dialect_models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Get:
    """`models(dialect, tiny, precision)`: that bundle, run in that dialect."""
    models = Models(tmp_path_factory.mktemp("dialects"), tiny_checkpoint)

    @cache
    def get(dialect: str, tiny: Tiny = Tiny(), precision: str = "fp32") -> Model:  # noqa: B008 - frozen
        bundle = models(tiny, KS, precision).bundle
        return Model(bundle, DialectBackend(bundle, dialect), 0)

    return get


@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_a_dialect_answers_as_the_statement_at_every_k(
    dialect_models: Get, reference: Callable[..., Reference], tiny: Tiny, precision: str, dialect: str
) -> None:
    model, judge, image = dialect_models(dialect, tiny, precision), reference(tiny), random_image(0)
    messages = prompt_messages(WORDS)
    inputs, asked = judge.inputs(messages, [image]), prompt(model, messages, [image])
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCES[precision], rtol=0)
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        if precision == "fp32":
            assert wanted.margin > 2 * TOLERANCES["fp32"], "this prompt proves nothing: two tokens are too close"
            assert found.ids == wanted.ids


@pytest.mark.parametrize("dialect", OTHERS)
def test_a_second_question_goes_on_from_the_slots_that_were_kept(
    dialect_models: Get, reference: Callable[..., Reference], dialect: str
) -> None:
    model, judge, images = dialect_models(dialect), reference(Tiny()), [random_image(seed) for seed in (0, 1)]
    session = Session(model.backend, model.manifest)
    for words, k in ((WORDS, None), ("how many red shapes are there?", 3), ("red?", None), (WORDS, 5)):
        messages = prompt_messages(words, 2)
        done = session.prefill(prompt(model, messages, images), policy(k))
        wanted = judge.greedy(judge.inputs(messages, images), k, 4)
        found = [done.logits, *(session.decode(token) for token in wanted.ids[:3])]
        np.testing.assert_allclose(np.stack(found), wanted.logits.numpy(), atol=TOLERANCES["fp32"], rtol=0)


@pytest.mark.parametrize("dialect", OTHERS)
@pytest.mark.parametrize("cuts", [(13,), (1, 2, 3, 7), tuple(range(1, 24))], ids=len)
def test_rows_in_chunks_equal_rows_at_once(dialect_models: Get, dialect: str, cuts: tuple[int, ...]) -> None:
    model = dialect_models(dialect)
    rows = np.random.default_rng(0).standard_normal((24, model.manifest.model.hidden), np.float32)
    positions = np.sort(np.random.default_rng(1).choice(200, 24, replace=False))  # not the slots
    whole = model.backend.stage(1, model.manifest.max_context).append(rows, positions)
    cache = model.backend.stage(1, model.manifest.max_context)
    cache.append(rows[::-1].copy(), positions)
    cache.keep(0)
    parts = [cache.append(r, p) for r, p in zip(np.split(rows, cuts), np.split(positions, cuts), strict=True)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5, rtol=0)
