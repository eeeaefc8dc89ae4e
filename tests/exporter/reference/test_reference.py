"""Of the statement: a withdrawal hides the columns of the image; families' contract holds it to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fixtures import References
from tests.support.reference import Inputs, Reference
from tests.support.tiny import Tiny, prompt_messages, random_image

QUESTION = "What is the colour of the square in the picture?"
STEPS = 24
TOLERANCE = 1e-4


def ask(model: Reference, images: int = 1, question: str = QUESTION) -> Inputs:
    return model.inputs(prompt_messages(question, images), [random_image(seed) for seed in range(images)])


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 3])
def test_a_guess_changes_no_answer_of_the_statement(reference: References, k: int | None) -> None:
    family = reference(Tiny())
    inputs = ask(family)
    wanted = family.greedy(inputs, k, STEPS)
    for guess in (wanted.ids, [*wanted.ids[:2], wanted.ids[2] + 1, *wanted.ids[3:]], [7] * 50):
        family.answers.clear()
        found = family.greedy(inputs, k, STEPS, guess=guess)
        assert found.ids == wanted.ids
        torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=0)


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
