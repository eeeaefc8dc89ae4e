"""The reference agrees with transformers, and the tiny checkpoints are fit to tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


@pytest.mark.parametrize("k", [-1, 0, 1, 9])
def test_k_outside_two_to_n_is_refused(reference: References, k: int) -> None:
    model = reference(Tiny())
    with pytest.raises(ValueError, match="2 to 8"):
        model.greedy(ask(model), k, 1)


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


def test_inputs_refuses_images_without_a_placeholder(reference: References) -> None:
    with pytest.raises(ValueError, match="more than the placeholders"):
        reference(Tiny()).inputs(prompt_messages(QUESTION), [random_image(1), random_image(2)])


def test_earlier_turns_stand_in_the_prompt(reference: References) -> None:
    model = reference(Tiny(tokenizer="bytes"))
    answered = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
    turns = [*prompt_messages("what?"), answered, *prompt_messages("and how many?", images=0)]
    text = model.tokenizer.decode(model.inputs(turns, [random_image(1)])["input_ids"][0]).replace("<image>", "")
    assert text == "USER: \nwhat? ASSISTANT: red</s>USER: and how many? ASSISTANT:"


@pytest.mark.parametrize(
    "tiny", [FAMILIES["llama-head_dim-rope"], FAMILIES["mistral-siglip-tied"], FAMILIES["qwen2-clip"]]
)
@pytest.mark.parametrize("names", ["saved", "new"])
def test_tensor_and_config_names_of_every_age_load_to_the_same_model(
    reference: References, tiny: Tiny, names: Any
) -> None:
    hub, other = reference(replace(tiny, names="hub")), reference(replace(tiny, names=names, shards=3))
    assert _config(hub) == _config(other)
    torch.testing.assert_close(
        dict(hub.model.state_dict()), dict(other.model.state_dict()), atol=0, rtol=0, equal_nan=False
    )
    # Equal weights at other addresses may meet other kernels (unaligned rows), so the last bits may differ.
    assert (hub.logits(ask(hub), None) - other.logits(ask(other), None)).abs().max() < TOLERANCE


def _config(model: Reference) -> dict[str, Any]:
    found: dict[str, Any] = model.model.config.to_dict()
    for part in (found, found["text_config"], found["vision_config"]):
        for key in ("transformers_version", "dtype", "ignore_index", "_name_or_path", "architectures"):
            part.pop(key, None)
    return found


@pytest.mark.parametrize("tiny", [Tiny(), Tiny(vision="siglip", tied=True, names="new"), Tiny(names="saved", shards=3)])
def test_every_tensor_of_a_checkpoint_is_loaded_and_none_is_missing(
    tiny_checkpoint: Callable[..., Path], tiny: Tiny
) -> None:
    from transformers import LlavaForConditionalGeneration

    load: Any = LlavaForConditionalGeneration.from_pretrained
    _, info = load(tiny_checkpoint(tiny), output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("place", ["jinja", "chat_template.json", "tokenizer_config", "processor_config"])
def test_the_template_is_found_in_every_place(reference: References, place: Any) -> None:
    model, usual = reference(Tiny(template_place=place)), reference(Tiny())
    assert torch.equal(ask(model)["input_ids"], ask(usual)["input_ids"])


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "longrope"])
def test_rope_variants_change_the_logits(reference: References, rope: Any) -> None:
    plain, scaled = reference(Tiny()), reference(Tiny(rope=rope))
    assert (plain.logits(ask(plain), None) - scaled.logits(ask(scaled), None)).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_checkpoints_are_rounded_and_finite(
    reference: References, tiny_checkpoint: Callable[..., Path], dtype: Any
) -> None:
    wide, narrow = reference(Tiny()), Reference(tiny_checkpoint(Tiny(dtype=dtype)), getattr(torch, dtype))
    found = narrow.logits(ask(narrow), None)
    assert narrow.model.lm_head.weight.dtype == getattr(torch, dtype)
    torch.testing.assert_close(found, wide.logits(ask(wide), None), atol=0.8, rtol=0)


def test_a_checkpoint_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    one, same, other = (make(tmp_path / name, Tiny(), seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (same / file.name).read_bytes(), file.name
    weights = "model.safetensors"
    assert (one / weights).read_bytes() != (other / weights).read_bytes()


@pytest.mark.parametrize("tiny", [Tiny(), Tiny(tokenizer="bytes")])
def test_text_survives_the_tokenizer(reference: References, tiny: Tiny) -> None:
    tokenizer = reference(tiny).tokenizer
    assert len(tokenizer) == tiny.vocab
    for text in ["How many red shapes are there?", "déjà vu 🙂 日本"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
