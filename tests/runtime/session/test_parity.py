"""The exported bundle answers as transformers does, and at K as the plain PyTorch statement of VTW does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.support.contract import FAMILIES
from tests.support.exported import KS, THREADS, Models, greedy, prompt
from tests.support.fixtures import References
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.spec import config_of
from vtx.exporter.graphs.activations import ACTIVATIONS, activate
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects import make_dialect
from vtx.runtime.api.options import Options
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.report.golden import check_golden

STEPS = 16
TOLERANCE = 1e-4
# Three times the largest difference seen over these variants, 4.3e-2: weights and KV are rounded, logits reach 12.
FP16_TOLERANCE = 0.13
KV_BYTES = {"fp32": 4, "fp16": 2}

PROMPTS = {
    "one-image": (1, "What is the colour of the square in the picture?"),
    "one-image-short": (1, "red?"),
    "two-images": (2, "which picture is red and how many circle shapes are there on the left of the image?"),
    "text-only": (0, "describe the shape"),
}


@pytest.mark.parametrize("k", KS)
def test_a_text_question_is_the_same_at_every_k(models: Models, k: int) -> None:
    model = models()
    asked = prompt(model, prompt_messages("describe the shape", 0), [])
    full, cut = greedy(model, asked, None, STEPS), greedy(model, asked, k, STEPS)
    assert cut.done.k is None
    assert np.array_equal(full.logits, cut.logits)


@pytest.mark.parametrize("precision", KV_BYTES)
@pytest.mark.parametrize("k", [None, *KS])
def test_the_answer_reports_what_it_kept(models: Models, reference: References, k: int | None, precision: str) -> None:
    tiny, words = Tiny(), "how many red shapes are there?"
    judge, image = reference(tiny), random_image(3)
    inputs = judge.inputs(prompt_messages(words), [image])
    with models(tiny, precision=precision).open(image) as conversation:
        answer = conversation.ask(words, k, Options(max_new_tokens=STEPS, ignore_eos=True))
    stats, slots = answer.stats, judge.kv_slots(inputs, k)
    if precision == "fp32":
        assert list(answer.token_ids) == judge.greedy(inputs, k, STEPS).ids
    assert list(stats.kv_slots) == slots
    assert stats.kv_bytes == sum(slots) * 2 * tiny.kv_heads * 16 * KV_BYTES[precision]
    assert stats.vision_tokens_kept == tuple(16 if k is None or layer < k else 0 for layer in range(1, 9))
    assert (stats.k, stats.full_layers, stats.exit_layer) == ((k, k - 1, k - 1) if k else (None, 8, None))
    assert (stats.prompt_tokens, stats.vision_tokens) == (slots[0], 16)


def test_the_norm_of_a_projector_is_in_the_reference_and_the_manifest(models: Models) -> None:
    model, plain = models(FAMILIES["vipllava"].variants[1]), models()
    assert all(check.passed for check in check_golden(model))
    stated = [
        json.loads((m.bundle.folder / "vtx.json").read_bytes())["model"]["parts"]["vision"] for m in (model, plain)
    ]
    assert [part.get("projector_norm_eps") for part in stated] == [1e-5, None]
    assert config_of(model.manifest).projector_norm_eps == 1e-5


def test_one_stage_equals_five(models: Models) -> None:
    whole, cut = models(ks=()), models()
    for count, words in PROMPTS.values():
        images = [random_image(seed) for seed in range(count)]
        asked = [prompt(model, prompt_messages(words, count), images) for model in (whole, cut)]
        one, five = greedy(whole, asked[0], None, STEPS), greedy(cut, asked[1], None, STEPS)
        assert one.ids == five.ids
        assert_near(one.logits, five.logits, TOLERANCE / 10)


def test_a_variant_answers_the_same_whatever_else_was_prebuilt(models: Models) -> None:
    image, messages = random_image(2), prompt_messages(PROMPTS["one-image"][1])
    found = [greedy(model, prompt(model, messages, [image]), 5, STEPS) for model in (models(), models(ks=(5,)))]
    assert found[0].ids == found[1].ids
    assert_near(found[0].logits, found[1].logits, TOLERANCE / 10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", KV_BYTES)
def test_narrow_checkpoints_are_exported_at_either_precision(
    models: Models, reference: References, dtype: Any, precision: str
) -> None:
    tiny = Tiny(dtype=dtype)
    model, judge = models(tiny, precision=precision), reference(tiny)  # the reference widens the weights
    messages = prompt_messages(PROMPTS["one-image"][1])
    inputs, asked = judge.inputs(messages, [random_image(0)]), prompt(model, messages, [random_image(0)])
    tolerance = TOLERANCE if precision == "fp32" else FP16_TOLERANCE
    for k in (None, 3):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert_near(found.logits, wanted.logits, tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_equals_transformers(name: str, dialect: str, tmp_path: Path) -> None:
    import onnxruntime
    from transformers.activations import ACT2FN

    builder = Builder("activation", {}, tmp_path, make_dialect(dialect, "fp32", 1))
    x = builder.input("x", ir.DataType.FLOAT, ["n"])
    y = builder.op("Identity", activate(builder, x, name))  # `linear` gives its input back
    builder.output(y, "y", ir.DataType.FLOAT, ["n"])
    builder.write(tmp_path / "activation.onnx")
    options = session_options(onnxruntime, THREADS)
    session = onnxruntime.InferenceSession(tmp_path / "activation.onnx", options, providers=["CPUExecutionProvider"])
    values = np.concatenate([np.linspace(-20, 20, 4001), [0, -0.0, 1e-6, -1e-6, 88, -88]]).astype(np.float32)
    function: Any = ACT2FN[name]
    wanted = function(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(session.run(None, {"x": values})[0], wanted, atol=2e-6, rtol=2e-6)
