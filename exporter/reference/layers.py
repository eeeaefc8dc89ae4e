"""One layer of a decoder in plain PyTorch, and the functions that towers have in common with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.reference.native import rotated

LayerWeights = Callable[[str], Tensor | None]


def decoder_layer(
    c: TextConfig, x: Tensor, positions: Tensor, weights: LayerWeights,
    see: Callable[[Tensor, Tensor], None] | None = None, feed: Callable[[str, Tensor], None] | None = None, *,
    cache: list[Tensor] | None = None, groups: Tensor | None = None, layer: int = 1, given: Tensor | None = None,
    shared: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """One layer of the llama family over hidden states [batch, n, hidden] at `positions` [n]; causal among these.

    Positions of three parts are [n, 3]. Tokens whose `groups` [n] are equal and not -1 see each other both ways.

    `see` gets the rotated queries and keys, `feed` each matrix's name and its inputs [n, in]. `cache` holds the keys
    and values before those of the new tokens, which are added to it. `given` [n, width]: inputs of layer `layer`.
    `shared`: the keys and values of another layer, which it reads instead of its own, and their positions; None: the
    last ones up to its own.
    """
    width, own = c.heads_of(layer), shared is None

    def weight(name: str) -> Tensor:
        found = weights(name)
        assert found is not None, name
        return found

    def linear(y: Tensor, name: str) -> Tensor:
        if feed:
            feed(name, y[0])
        return F.linear(y, weight(f"{name}.weight"), weights(f"{name}.bias"))

    def heads(y: Tensor) -> Tensor:
        return y.reshape(*y.shape[:2], -1, width).transpose(1, 2)

    y = rms(x, weight("input_layernorm.weight"), c.eps)
    if weights("conv.in_proj.weight") is not None:
        first, gate, last = linear(y, "conv.in_proj").chunk(3, -1)
        columns = F.pad((first * last).transpose(1, 2), (c.conv_taps - 1, 0))
        if cache is not None:
            columns = torch.cat((cache[0], columns[..., c.conv_taps - 1 :]), 2) if cache else columns
            cache[:] = [columns]
        mixed = F.conv1d(columns, weight("conv.conv.weight"), weights("conv.conv.bias"), groups=c.hidden)
        x = x + linear(gate * mixed[..., -x.shape[1] :].transpose(1, 2), "conv.out_proj")
        return x + _mlp(c, x, weight, linear)
    parts = [heads(linear(y, f"self_attn.{part}_proj")) for part in ("qkv" if own else "q")]
    for number, name in enumerate("qk"[: len(parts)]):
        normed = rms(parts[number], weight(f"self_attn.{name}_norm.weight"), c.eps) if c.qk_norm else parts[number]
        parts[number] = rotate(c, normed, positions, layer)
    at: Tensor | None
    if shared is None:
        q, k, v = parts
        v = F.rms_norm(v, v.shape[-1:], None, c.eps) if c.v_norm else v
        at = positions
        if cache is not None:
            k, v = (torch.cat((*cache[i : i + 1], new), 2) for i, new in enumerate((k, v)))
            cache[:] = k, v
            at = positions if k.shape[2] == len(positions) else None
    else:
        (q,), (k, v, at) = parts, shared
    sharing = c.heads // c.kv_heads
    k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
    if see:
        see(q, k)
    both_ways = groups is not None and q.shape[2] > 1 and bool((groups >= 0).any())
    if c.sliding is None and own and not both_ways:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=c.scale(layer))
    else:
        far = positions[:, None] - (torch.arange(k.shape[2]) - k.shape[2] + 1 + positions[-1] if at is None else at)
        seen = far >= 0
        if both_ways:
            assert groups is not None
            seen |= (groups[:, None] == groups) & (groups[:, None] >= 0)
        if c.sliding is not None and c.slides(layer):
            seen &= far < c.sliding.window
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=c.scale(layer))
    y = linear(y.transpose(1, 2).flatten(2), "self_attn.o_proj")
    before = "post_attention_layernorm"
    if c.post_norms:
        y, before = rms(y, weight(f"{before}.weight"), c.eps), "pre_feedforward_layernorm"
    x = x + y
    y = _mlp(c, x, weight, linear, before)
    x = x + (rms(y, weight("post_feedforward_layernorm.weight"), c.eps) if c.post_norms else y)
    if given is not None:
        gated = activate(linear(x, "per_layer_input_gate"), c.activation) * given
        x = x + rms(linear(gated, "per_layer_projection"), weight("post_per_layer_input_norm.weight"), c.eps)
    return x * weight("layer_scalar") if c.layer_scale else x


def _mlp(
    c: TextConfig, x: Tensor, weight: Callable[[str], Tensor], linear: Callable[[Tensor, str], Tensor],
    norm: str = "post_attention_layernorm",
) -> Tensor:  # fmt: skip
    y = rms(x, weight(f"{norm}.weight"), c.eps)
    return linear(activate(linear(y, "mlp.gate_proj"), c.activation) * linear(y, "mlp.up_proj"), "mlp.down_proj")


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(c: TextConfig, x: Tensor, positions: Tensor, layer: int) -> Tensor:
    rope = c.sliding.rope if c.sliding is not None and c.slides(layer) else c.rope
    own = positions[:, rope.axes] if positions.ndim > 1 else positions[:, None]
    return rotated(x, own.float() * torch.tensor(rope.frequencies), rope.scale)


def activate(x: Tensor, name: str) -> Tensor:
    from transformers.activations import ACT2FN

    function: Any = ACT2FN[name]
    out: Tensor = function(x)
    return out
