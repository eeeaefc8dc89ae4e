"""K with a rest stated plainly over transformers' layers: full attention matrices, no cache, nothing reused."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.reference import Greedy, Inputs, Reference


@torch.inference_mode()
def chosen_rest(reference: Reference, inputs: Inputs, k: int, count: int) -> list[int]:
    """The `count` image rows of the prompt that its last row attends to most in layer K - 1, mean over heads."""
    rows, is_image = reference.prompt(inputs)
    weights = list[torch.Tensor]()

    def note(_: Any, __: Any, output: Any) -> None:
        weights.append(output[1])

    layer = reference.decoder.layers[k - 2]
    hook = layer.self_attn.register_forward_hook(note)
    try:
        layers = reference.decoder.layers[: k - 1]
        reference.run(layers, rows * reference.scale, reference.positions(inputs))
    finally:
        hook.remove()
    received = weights[0][0].mean(0)[-1, is_image].tolist()
    ranked = sorted(range(len(received)), key=lambda row: -received[row])
    return sorted(ranked[:count])


@torch.inference_mode()
def rest_answer(reference: Reference, inputs: Inputs, k: int, rest: list[int], n: int) -> Greedy:
    """The greedy answer of `n` ids of which, from layer K on, no row sees image rows but the `rest`, by number."""
    rows, is_image = reference.prompt(inputs)
    gone = is_image.clone()
    gone[torch.nonzero(is_image)[rest, 0]] = False
    return reference.answer(rows, gone, reference.positions(inputs), (), k, n)
