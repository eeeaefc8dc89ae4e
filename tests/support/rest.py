"""K with a rest stated plainly over transformers' layers: full attention matrices, no cache, nothing reused."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.families.gemma import gemma3_logits
from tests.support.reference import Greedy, Inputs, Reference


def chosen_rest(reference: Reference, inputs: Inputs, k: int, count: int) -> list[int]:
    """The `count` image rows of the prompt that its last row attends to most in layer K - 1, mean over heads."""
    received = attention_to_image(reference, inputs, k)
    ranked = sorted(range(len(received)), key=lambda row: -received[row])
    return sorted(ranked[:count])


@torch.inference_mode()
def attention_to_image(reference: Reference, inputs: Inputs, k: int) -> list[float]:
    """The attention that each image row of the prompt gets from its last row in layer K - 1, mean over heads."""
    rows, is_image = reference.prompt(inputs)
    weights = list[torch.Tensor]()

    def note(_: Any, __: Any, output: Any) -> None:
        weights.append(output[1])

    hook = reference.decoder.layers[k - 2].self_attn.register_forward_hook(note)
    try:
        reference.next_logits(rows, is_image, None, reference.positions(inputs), reference.maps(inputs))
    finally:
        hook.remove()
    received: list[float] = weights[0][0].mean(0)[-1, is_image].tolist()
    return received


@torch.inference_mode()
def rest_answer(reference: Reference, inputs: Inputs, k: int, rest: list[int], n: int) -> Greedy:
    """The greedy answer of `n` ids of which, from layer K on, no row sees image rows but the `rest`, by number."""
    rows, is_image = reference.prompt(inputs)
    ids, logits = list[int](), list[torch.Tensor]()
    while len(ids) < n:
        answered = reference.decoder.embed_tokens(torch.tensor([ids], dtype=torch.int64))
        before = torch.cat([rows, answered], 1) if ids else rows
        logits.append(_last_logits(reference, inputs, before, is_image, k, rest))
        ids.append(int(logits[-1].argmax()))
    return Greedy(ids, torch.stack(logits), logits[0])


def _last_logits(
    reference: Reference, inputs: Inputs, rows: torch.Tensor, is_image: torch.Tensor, k: int, rest: list[int]
) -> torch.Tensor:
    """The logits [vocab] after all `rows`, those of the prompt, of which `is_image` tells the image's, and more."""
    answered = rows.shape[1] - len(is_image)
    start, maps = reference.positions(inputs), reference.maps(inputs)
    later = (start.max() + 1 + torch.arange(answered)).expand(*start.shape[:-1], answered)
    positions = torch.cat([start, later], -1)
    is_image = torch.cat([is_image, torch.zeros(answered, dtype=torch.bool)])
    stays = ~is_image
    stays[torch.nonzero(is_image)[rest, 0]] = True
    if reference.kind == "gemma3":
        return gemma3_logits(reference.model, rows, is_image, {k: stays})
    rows = rows * reference.scale
    for number, layer in enumerate(reference.decoder.layers, 1):
        if number == k:
            rows, positions, is_image = rows[:, stays], positions[..., stays], is_image[stays]
            maps = [each[rest] for each in maps]
        rows = reference.run([layer], rows, positions, answered)
        if number <= len(maps):
            rows[0, is_image] += maps[number - 1]
    out: torch.Tensor = reference.model.lm_head(reference.decoder.norm(rows[:, -1:]))[0, 0]
    return out.float()
