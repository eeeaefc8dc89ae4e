"""The feed-forward of a decoder's layer in plain PyTorch: an MLP, or experts of which one is read at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.runtime.bundle.safetensors import EVERY
from vtx.tools.model.mixture import Mixture

Linear = Callable[[Tensor, str], Tensor]


class LayerWeights(Protocol):
    """The weights of a layer by their names in it, None for one that it lacks; of the experts' matrices some rows."""

    def __call__(self, name: str, rows: slice = EVERY, /) -> Tensor | None: ...


def activate(x: Tensor, name: str) -> Tensor:
    from transformers.activations import ACT2FN

    function: Any = ACT2FN[name]
    out: Tensor = function(x)
    return out


def gated_mlp(x: Tensor, name: str, activation: str, linear: Linear) -> Tensor:
    return linear(
        activate(linear(x, f"{name}.gate_proj"), activation) * linear(x, f"{name}.up_proj"), f"{name}.down_proj"
    )


def mix_experts(c: TextConfig, m: Mixture, x: Tensor, weights: LayerWeights, linear: Linear) -> Tensor:
    """The experts' feed-forward of hidden states [batch, n, hidden]."""
    tokens = x.flatten(0, -2)
    shares, chosen = linear(tokens, "mlp.gate").softmax(-1).topk(m.active, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    mixed = tokens.new_zeros(tokens.shape)

    def product(inputs: Tensor, part: str, expert: int, height: int) -> Tensor:
        matrix = weights(f"mlp.experts.{part}_proj.weight", slice(expert * height, (expert + 1) * height))
        assert matrix is not None, part
        return F.linear(inputs, matrix)

    for expert in sorted({*chosen.flatten().tolist()}):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        inputs = tokens[rows]
        gate = activate(product(inputs, "gate", expert, m.ffn), c.activation)
        outputs = product(gate * product(inputs, "up", expert, m.ffn), "down", expert, c.hidden)
        mixed[rows] += outputs * shares[rows, places, None]
    if m.shared:
        gate = linear(tokens, "mlp.shared_expert_gate").sigmoid()
        mixed += gate * gated_mlp(tokens, "mlp.shared_expert", c.activation, linear)
    return mixed.reshape(x.shape)
