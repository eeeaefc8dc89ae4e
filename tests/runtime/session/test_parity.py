"""The exported bundle answers as transformers does, and at K as the plain PyTorch statement of VTW does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.support.exported import KS, THREADS, Models, greedy, prompt
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.checkpoint.spec import config_of
from vtx.exporter.graphs.activations import ACTIVATIONS, activate
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.dialects import make_dialect
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.ort.library import session_options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.report.golden import check_golden

STEPS = 16
TOLERANCE = 1e-4
# Three times the largest difference seen over these variants, 4.3e-2: weights and KV are rounded, logits reach 12.
FP16_TOLERANCE = 0.13
KV_BYTES = {"fp32": 4, "fp16": 2}

VARIANTS = {
    "llama-clip-gqa-hub": Tiny(),
    "llama-clip-mha-one-kv-per-head": Tiny(kv_heads=4, projector_act="relu", theta=5e5),
    "llama-clip-one-kv-head": Tiny(kv_heads=1, feature_layer=-1, projector_act="silu"),
    "llama-siglip-biases": Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True, names="saved"),
    "llama-wide-heads-llama3-layers": Tiny(head_dim=24, rope="llama3", feature_layer=(-2, -1), names="new"),
    "llama-narrow-heads-sharded": Tiny(head_dim=8, shards=3, tied=True, projector_act="quick_gelu"),
    "llama-linear-positive-layer": Tiny(rope="linear", feature_layer=2, projector_act="gelu_pytorch_tanh"),
    "llama-bytes-template-in-json": Tiny(tokenizer="bytes", template_place="chat_template.json", select="full"),
    "mistral-clip-linear-new": Tiny(text="mistral", rope="linear", feature_layer=-1, names="new", tokenizer="bytes"),
    "mistral-siglip-tied": Tiny(text="mistral", vision="siglip", select="full", head_dim=24, tied=True, kv_heads=4),
    "mistral-window-sharded-hub": Tiny(text="mistral", sliding_window=192, shards=2, projector_bias=False),
    "qwen2-clip-full-no-bias": Tiny(
        text="qwen2", select="full", projector_bias=False, tokenizer="bytes", theta=1e6, names="saved"
    ),
    "qwen2-siglip-tied-mha": Tiny(text="qwen2", vision="siglip", select="full", tied=True, kv_heads=4, shards=2),
    "vipllava-names-as-saved": Tiny(family="vipllava", feature_layer=(-2, -1, 1), names="saved"),
    "vipllava-mha": Tiny(family="vipllava", feature_layer=(-1, 2), kv_heads=4),
    "qwen3-clip-biases": Tiny(text="qwen3", attention_bias=True, head_dim=24, rope="yarn"),
    "fastvlm": FAST_VLM,
    "fastvlm-llama-tied-mha": replace(FAST_VLM, text="llama", tied=True, names="saved", image=128, kv_heads=4),
    "qwen2-siglip-three-layers": Tiny(
        text="qwen2", vision="siglip", feature_layer=(1, 2, -1), vision_act="gelu", rope="dynamic"
    ),
}  # fmt: skip
PROMPTS = {
    "one-image": (1, "What is the colour of the square in the picture?"),
    "one-image-short": (1, "red?"),
    "two-images": (2, "which picture is red and how many circle shapes are there on the left of the image?"),
    "text-only": (0, "describe the shape"),
}


# One variant is asked all prompts, the others about two images; of each family and tower one of them at every change.
QUICK = {
    "llama-siglip-biases",
    "mistral-clip-linear-new",
    "qwen2-siglip-three-layers",
    "qwen3-clip-biases",
    "vipllava-mha",
}


def pairs() -> Iterator[Any]:
    """The first variant with every prompt, each other with two images, most of them marked slow."""
    for variant, tiny in VARIANTS.items():
        first = variant == "llama-clip-gqa-hub"
        for name in PROMPTS if first else ("two-images",):
            marks = () if first or variant in QUICK else pytest.mark.slow
            yield pytest.param(tiny, PROMPTS[name], id=f"{variant}-{name}", marks=marks)


@pytest.mark.parametrize(("tiny", "question"), list(pairs()))
def test_a_bundle_answers_as_transformers_and_at_k_as_the_statement(
    models: Models, reference: Callable[..., Reference], tiny: Tiny, question: tuple[int, str]
) -> None:
    model, judge = models(tiny), reference(tiny)
    count, words = question
    images = [random_image(seed, (80 - 30 * seed, 60)) for seed in range(count)]
    messages = prompt_messages(words, count)
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
    ids, logits = judge.generate_hf(inputs, STEPS)
    for k in (None, *KS) if count else (None,):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS)
        assert wanted.margin > 2 * TOLERANCE, "this prompt proves nothing: two tokens are too close"
        assert found.ids == wanted.ids
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
        assert found.done.k == k
        assert list(found.done.slots) == judge.kv_slots(inputs, k)
        vision = count * tiny.vision_tokens
        full_layers = k - 1 if k else tiny.layers
        assert list(found.done.vision_kept) == [vision] * full_layers + [0] * (tiny.layers - full_layers)
        if k is None:
            assert found.ids == ids
            np.testing.assert_allclose(found.logits, logits.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("k", [None, *KS])
def test_images_with_text_between_them_all_leave_at_k(
    models: Models, reference: Callable[..., Reference], k: int | None
) -> None:
    model, judge, images = models(), reference(Tiny()), [random_image(1), random_image(2)]
    said = {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}
    messages = [*prompt_messages("what shape is there?"), said, *prompt_messages("and in the other image?")]
    inputs, asked = judge.inputs(messages, images), prompt(model, messages, images)
    found = greedy(model, asked, k, STEPS)
    wanted = judge.greedy(inputs, k, STEPS, guess=found.ids)
    assert found.ids == wanted.ids
    np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=TOLERANCE, rtol=0)
    assert list(found.done.slots) == judge.kv_slots(inputs, k)
    assert found.done.vision_tokens == 32


@pytest.mark.parametrize("k", KS)
def test_a_text_question_is_the_same_at_every_k(models: Models, k: int) -> None:
    model = models()
    asked = prompt(model, prompt_messages("describe the shape", 0), [])
    full, cut = greedy(model, asked, None, STEPS), greedy(model, asked, k, STEPS)
    assert cut.done.k is None
    assert np.array_equal(full.logits, cut.logits)


@pytest.mark.parametrize("precision", KV_BYTES)
@pytest.mark.parametrize("k", [None, *KS])
def test_the_answer_reports_what_it_kept(
    models: Models, reference: Callable[..., Reference], k: int | None, precision: str
) -> None:
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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=list(VARIANTS))
def test_an_fp16_bundle_stays_within_its_tolerance(
    models: Models, reference: Callable[..., Reference], tiny: Tiny
) -> None:
    """Along the reference's own answer, so that one narrow choice does not part the two."""
    model, judge = models(tiny, precision="fp16"), reference(tiny)
    words = PROMPTS["one-image"][1]
    inputs = judge.inputs(prompt_messages(words), [random_image(0)])
    asked = prompt(model, prompt_messages(words), [random_image(0)])
    clear = 0
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=FP16_TOLERANCE, rtol=0)
        first, second = wanted.logits.topk(2).values.T
        sure = (first - second > 2 * FP16_TOLERANCE).numpy()
        clear += int(sure.sum())
        assert np.array_equal(np.array(found.ids)[sure], np.array(wanted.ids)[sure])
    assert clear > 2 * STEPS, "too few choices are clear enough to prove anything"


def test_the_norm_of_a_projector_is_in_the_reference_and_the_manifest(models: Models) -> None:
    model, plain = models(VARIANTS["vipllava-mha"]), models()
    assert all(check.passed for check in check_golden(model))
    stated = [json.loads((m.bundle.folder / "vtx.json").read_bytes())["model"]["projector"] for m in (model, plain)]
    assert stated[0]["norm_eps"] == model.manifest.model.projector.norm_eps == 1e-5
    assert "norm_eps" not in stated[1], "bundles without it stay as they were"
    assert config_of(model.manifest).projector_norm_eps == 1e-5


def test_one_stage_equals_five(models: Models) -> None:
    whole, cut = models(ks=()), models()
    for count, words in PROMPTS.values():
        images = [random_image(seed) for seed in range(count)]
        asked = [prompt(model, prompt_messages(words, count), images) for model in (whole, cut)]
        one, five = greedy(whole, asked[0], None, STEPS), greedy(cut, asked[1], None, STEPS)
        assert one.ids == five.ids
        np.testing.assert_allclose(one.logits, five.logits, atol=TOLERANCE / 10, rtol=0)


def test_a_variant_answers_the_same_whatever_else_was_prebuilt(models: Models) -> None:
    image, messages = random_image(2), prompt_messages(PROMPTS["one-image"][1])
    found = [greedy(model, prompt(model, messages, [image]), 5, STEPS) for model in (models(), models(ks=(5,)))]
    assert found[0].ids == found[1].ids
    np.testing.assert_allclose(found[0].logits, found[1].logits, atol=TOLERANCE / 10, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("precision", KV_BYTES)
def test_narrow_checkpoints_are_exported_at_either_precision(
    models: Models, reference: Callable[..., Reference], dtype: Any, precision: str
) -> None:
    tiny = Tiny(dtype=dtype)
    model, judge = models(tiny, precision=precision), reference(tiny)  # the reference widens the weights
    messages = prompt_messages(PROMPTS["one-image"][1])
    inputs, asked = judge.inputs(messages, [random_image(0)]), prompt(model, messages, [random_image(0)])
    tolerance = TOLERANCE if precision == "fp32" else FP16_TOLERANCE
    for k in (None, 3):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        np.testing.assert_allclose(found.logits, wanted.logits.numpy(), atol=tolerance, rtol=0)


def test_several_images_are_encoded_as_one_by_one(models: Models, reference: Callable[..., Reference]) -> None:
    model: Model = models()
    pixels = [model.loaded.prepare(random_image(seed)).pixels[None] for seed in range(3)]
    together = model.backend.vision(np.concatenate(pixels)).hidden
    np.testing.assert_allclose(
        together, np.concatenate([model.backend.vision(p).hidden for p in pixels]), atol=1e-5, rtol=0
    )
    features = reference().model.model.get_image_features(pixel_values=torch.from_numpy(np.concatenate(pixels)))
    wanted = torch.cat(list(features.pooler_output)).detach().numpy()
    np.testing.assert_allclose(together, wanted, atol=1e-5, rtol=0)


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
