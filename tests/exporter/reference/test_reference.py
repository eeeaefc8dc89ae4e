"""The reference agrees with transformers, and the tiny checkpoints are fit to tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference import Inputs, Reference
from tests.support.tiny import Tiny, make, prompt_messages, random_image

QUESTION = "What is the colour of the square in the picture?"
STEPS = 24
TOLERANCE = 1e-4

FAMILIES = {
    "llama-clip": Tiny(),
    "llama-siglip-bias": Tiny(vision="siglip", select="full", attention_bias=True, kv_heads=4),
    "llama-head_dim-rope": Tiny(head_dim=24, rope="llama3", feature_layer=(-2, -1), projector_act="relu"),
    "mistral-clip": Tiny(text="mistral", rope="linear", feature_layer=-1, names="new", tokenizer="bytes"),
    "mistral-siglip-tied": Tiny(text="mistral", vision="siglip", head_dim=24, tied=True, kv_heads=4, names="saved"),
    "qwen2-clip": Tiny(text="qwen2", select="full", projector_bias=False, tokenizer="bytes", theta=1e6),
    "qwen2-siglip-tied": Tiny(text="qwen2", vision="siglip", select="full", tied=True, tokenizer="bytes", kv_heads=4),
}

References = Callable[..., Reference]


@pytest.fixture(scope="module", params=list(FAMILIES.values()), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest, reference: References) -> Reference:
    found: Reference = reference(request.param)
    return found


def ask(model: Reference, images: int = 1, question: str = QUESTION) -> Inputs:
    return model.inputs(prompt_messages(question, images), [random_image(seed) for seed in range(images)])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("images", [0, 1, 2])
def test_without_withdrawal_the_statement_answers_as_transformers_does(family: Reference, images: int) -> None:
    inputs = ask(family, images)
    ids, logits = family.generate_hf(inputs, STEPS)
    found = family.greedy(inputs, None, STEPS)
    assert found.margin > 10 * TOLERANCE
    assert found.ids == ids
    torch.testing.assert_close(found.logits, logits, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.prompt, logits[0], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 3])
def test_a_guess_changes_no_answer_of_the_statement(family: Reference, k: int | None) -> None:
    inputs = ask(family)
    wanted = family.greedy(inputs, k, STEPS)
    for guess in (wanted.ids, [*wanted.ids[:2], wanted.ids[2] + 1, *wanted.ids[3:]], [7] * 50):
        family.answers.clear()
        found = family.greedy(inputs, k, STEPS, guess=guess)
        assert found.ids == wanted.ids
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_answers_are_varied_and_follow_the_image(family: Reference) -> None:
    ids = family.greedy(ask(family), None, STEPS).ids
    other = family.inputs(prompt_messages(QUESTION), [random_image(7)])
    assert len(set(ids)) >= 5
    assert family.greedy(other, None, STEPS).ids != ids


def test_every_withdrawal_changes_an_image_prompt_and_no_text_prompt(family: Reference) -> None:
    image, text = ask(family), ask(family, images=0)
    for k in range(2, family.layers + 1):
        assert (family.logits(image, k) - family.logits(image, None)).abs().max() > 1000 * TOLERANCE
        torch.testing.assert_close(family.logits(text, k), family.logits(text, None), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
@pytest.mark.parametrize("images", [1, 2])
def test_withdrawal_equals_hiding_the_vision_columns_from_layer_k_on(
    reference: References, k: int, images: int
) -> None:
    model = reference(Tiny())
    inputs = ask(model, images)
    vision = inputs["input_ids"][0] == model.image_token

    def hide(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lowest = torch.finfo(torch.float32).min
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].masked_fill(vision, lowest)}

    layers = model.model.model.language_model.layers[k - 1 :]
    hooks = [layer.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]
    try:
        with torch.inference_mode():
            hidden = model.model(**inputs).logits[0, -1]
    finally:
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(model.logits(inputs, k), hidden, atol=TOLERANCE, rtol=0)


def test_withdrawn_answers_differ_in_their_ids(reference: References) -> None:
    model = reference(Tiny())
    answers = [model.greedy(ask(model), k, STEPS).ids for k in (None, 2, 3, 5, 8)]
    assert len({tuple(ids) for ids in answers}) == len(answers)


@pytest.mark.parametrize("images", [0, 1, 2])
def test_kv_slots_hold_vision_rows_before_k_alone(reference: References, images: int) -> None:
    model = reference(Tiny())
    inputs = ask(model, images)
    full = inputs["input_ids"].shape[1]
    assert model.kv_slots(inputs, None) == [full] * 8
    assert model.kv_slots(inputs, 4) == [full] * 3 + [full - images * Tiny().vision_tokens] * 5


def test_two_images_take_their_placeholders_in_order(reference: References) -> None:
    model = reference(Tiny())
    first, second = random_image(1), random_image(2)
    messages = prompt_messages(QUESTION, images=2)
    one, other = model.inputs(messages, [first, second]), model.inputs(messages, [second, first])
    torch.testing.assert_close(one["pixel_values"].flip(0), other["pixel_values"], atol=0, rtol=0)
    assert (model.logits(one, None) - model.logits(other, None)).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "longrope"])
def test_rope_variants_change_the_logits(reference: References, rope: Any) -> None:
    plain, scaled = reference(Tiny()), reference(Tiny(rope=rope))
    assert (plain.logits(ask(plain), None) - scaled.logits(ask(scaled), None)).abs().max() > 1000 * TOLERANCE


def test_a_checkpoint_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    one, same, other = (make(tmp_path / name, Tiny(), seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (same / file.name).read_bytes(), file.name
    weights = "model.safetensors"
    assert (one / weights).read_bytes() != (other / weights).read_bytes()
