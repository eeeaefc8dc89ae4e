"""One layer of a decoder in plain PyTorch, and the functions that towers have in common with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.reference.feed_forward import LayerWeights, activate, gated_mlp, mix_experts
from vtx.exporter.reference.parts import rms, rotated

See = Callable[[Tensor, Tensor], None]
Feed = Callable[[str, Tensor], None]

SharedKV = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and their positions


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of layer `layer` beside hidden states [batch, n, hidden].

    `positions` are [n], or [n, 3] of three parts. Tokens whose `groups` [n] are equal and not -1 see each other both
    ways. `cache` holds the keys and values before those of the new tokens, which are added to it. `given` [n, width]:
    the layer's inputs of its own. `shared`: the keys and values of another layer, which it reads instead of its own;
    without positions, these are the last ones up to its own.
    """

    positions: Tensor
    layer: int = 1
    cache: list[Tensor] | None = None
    groups: Tensor | None = None
    given: Tensor | None = None
    shared: SharedKV | None = None


def decoder_layer(
    c: TextConfig,
    x: Tensor,
    inputs: LayerInputs,
    weights: LayerWeights,
    see: See | None = None,
    feed: Feed | None = None,
) -> Tensor:
    """One layer of the llama family over hidden states [batch, n, hidden]; causal among these.

    `see` gets the rotated queries and keys, `feed` each matrix's name and its inputs [n, in].
    """

    def weight(name: str) -> Tensor:
        tensor = weights(name)
        assert tensor is not None, name
        return tensor

    def linear(y: Tensor, name: str) -> Tensor:
        if feed:
            feed(name, y.flatten(0, -2))
        return F.linear(y, weight(f"{name}.weight"), weights(f"{name}.bias"))

    def feed_forward(x: Tensor, norm: str = "post_attention_layernorm") -> Tensor:
        y = rms(x, weight(f"{norm}.weight"), c.eps)
        mixture = c.mixture_of(inputs.layer)
        if mixture is None:
            return gated_mlp(y, "mlp", c.activation, linear)
        return mix_experts(c, mixture, y, weights, linear)

    y = rms(x, weight("input_layernorm.weight"), c.eps)
    if weights("conv.in_proj.weight") is not None:
        y = linear(_short_convolution(c, linear, weights, y, inputs.cache), "conv.out_proj")
    elif weights("linear_attn.A_log") is not None:
        y = linear(_delta_rule(c, linear, weight, y, inputs.cache), "linear_attn.out_proj")
    else:
        y = linear(_attention(c, y, inputs, weight, linear, see), "self_attn.o_proj")
    before = "post_attention_layernorm"
    if c.post_norms:
        y = rms(y, weight(f"{before}.weight"), c.eps)
        before = "pre_feedforward_layernorm"
    x = x + y
    y = feed_forward(x, before)
    x = x + (rms(y, weight("post_feedforward_layernorm.weight"), c.eps) if c.post_norms else y)
    if inputs.given is not None:
        gated = activate(linear(x, "per_layer_input_gate"), c.activation) * inputs.given
        x = x + rms(linear(gated, "per_layer_projection"), weight("post_per_layer_input_norm.weight"), c.eps)
    return x * weight("layer_scalar") if c.layer_scale else x


def _attention(
    c: TextConfig,
    y: Tensor,
    inputs: LayerInputs,
    weight: Callable[[str], Tensor],
    linear: Callable[[Tensor, str], Tensor],
    see: See | None,
) -> Tensor:
    """The attention of normed hidden states to each other, [batch, n, heads * head_dim], before the projection."""
    positions = inputs.positions
    shared = inputs.shared
    width = c.heads_of(inputs.layer)
    projected = [linear(y, f"self_attn.{part}_proj") for part in ("qkv" if shared is None else "q")]
    gate: Tensor | None = None
    if c.head_gates:
        gate = linear(y, "self_attn.g_proj").sigmoid().repeat_interleave(width, -1)
    if c.gated:
        halves = projected[0].reshape(*y.shape[:2], c.heads, 2, width)
        projected[0] = halves[..., 0, :].flatten(2)
        gate = halves[..., 1, :].flatten(2).sigmoid()
    parts = _heads(c, projected, inputs, weight)
    k, v, at = _appended(c, parts[1], parts[2], positions, inputs.cache) if shared is None else shared
    q = parts[0]
    k = k.repeat_interleave(c.heads // c.kv_heads, 1)
    v = v.repeat_interleave(c.heads // c.kv_heads, 1)
    if see:
        see(q, k)
    several = q.shape[2] > 1
    groups = inputs.groups
    if groups is not None and not (several and (groups >= 0).any()):
        groups = None
    if c.sliding is None and c.attention_softcap is None and shared is None and groups is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=several, scale=c.scale(inputs.layer))
    else:
        visible = _visible(c, inputs.layer, positions, at, k.shape[2], groups)
        y = _attend(c, q, k, v, visible, inputs.layer)
    y = y.transpose(1, 2).flatten(2)
    return y if gate is None else y * gate


def _heads(
    c: TextConfig, parts: Sequence[Tensor], inputs: LayerInputs, weight: Callable[[str], Tensor]
) -> list[Tensor]:
    """Queries, and keys and values if given, as [batch, heads, n, head_dim]; the first two normed and rotated."""
    width = c.heads_of(inputs.layer)
    heads = [part.reshape(*part.shape[:2], -1, width).transpose(1, 2) for part in parts]
    for number, name in enumerate("qk"[: len(heads)]):
        normed = heads[number]
        if c.qk_norm:
            normed = rms(normed, weight(f"self_attn.{name}_norm.weight"), c.eps)
        if c.head_order:
            normed = normed[..., c.head_order]
        heads[number] = rotate(c, normed, inputs.positions, inputs.layer)
    return heads


def _attend(c: TextConfig, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, layer: int) -> Tensor:
    """Attention [batch, heads, n, head_dim] to the keys that are `visible` [n, keys]."""
    if c.attention_softcap is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=c.scale(layer))
    products = q @ k.transpose(2, 3) * c.scale(layer)
    bounded = c.attention_softcap * torch.tanh(products / c.attention_softcap)
    return bounded.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def _appended(
    c: TextConfig, k: Tensor, v: Tensor, positions: Tensor, cache: list[Tensor] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with those of the cache before them, which it then holds, and the positions of all if known."""
    v = F.rms_norm(v, v.shape[-1:], None, c.eps) if c.v_norm else v
    if cache is None:
        return k, v, positions
    k, v = (torch.cat((*cache[i : i + 1], new), 2) for i, new in enumerate((k, v)))
    cache[:] = k, v
    return k, v, positions if k.shape[2] == len(positions) else None


def _visible(
    c: TextConfig, layer: int, positions: Tensor, at: Tensor | None, keys: int, groups: Tensor | None
) -> Tensor:
    """The keys that each query sees, [n, keys] bool: they are at positions `at`; tokens of a group see each other."""
    if at is None:
        at = torch.arange(keys) - keys + 1 + positions[-1]
    far = positions[:, None] - at
    visible = far >= 0
    if groups is not None:
        visible |= (groups[:, None] == groups) & (groups[:, None] >= 0)
    if c.sliding is not None and c.slides(layer):
        visible &= far < c.sliding.window
    return visible


def _short_convolution(
    c: TextConfig,
    linear: Callable[[Tensor, str], Tensor],
    weights: LayerWeights,
    x: Tensor,
    cache: list[Tensor] | None,
) -> Tensor:
    """The gated convolution of LFM2 over a token and those before it; `cache` holds its inputs so far."""
    first, gate, last = linear(x, "conv.in_proj").chunk(3, -1)
    columns = F.pad((first * last).transpose(1, 2), (c.conv_taps - 1, 0))
    if cache is not None:
        columns = torch.cat((cache[0], columns[..., c.conv_taps - 1 :]), 2) if cache else columns
        cache[:] = [columns]
    kernel = weights("conv.conv.weight")
    assert kernel is not None, "conv.conv.weight"
    mixed = F.conv1d(columns, kernel, weights("conv.conv.bias"), groups=c.hidden)
    return gate * mixed[..., -x.shape[1] :].transpose(1, 2)


def _delta_rule(
    c: TextConfig,
    linear: Callable[[Tensor, str], Tensor],
    weight: Callable[[str], Tensor],
    x: Tensor,
    cache: list[Tensor] | None,
) -> Tensor:
    """The gated delta rule of normed hidden states [batch, n, hidden], a token at a time: [batch, n, values].

    `cache` holds what was convolved of earlier tokens, and the matrices behind them.
    """
    d = c.delta
    batch, count, _ = x.shape
    assert d is not None
    columns = F.pad(linear(x, "linear_attn.in_proj_qkv").transpose(1, 2), (c.conv_taps - 1, 0))
    matrices = x.new_zeros(batch, d.value_heads, d.key_dim, d.value_dim)
    if cache:
        columns = torch.cat((cache[0], columns[..., c.conv_taps - 1 :]), 2)
        matrices = cache[1]
    mixed = F.conv1d(columns, weight("linear_attn.conv1d.weight"), groups=d.channels)[..., -count:]

    def heads(part: Tensor) -> Tensor:
        by_head = part.reshape(batch, count, d.key_heads, d.key_dim)
        return by_head.repeat_interleave(d.value_heads // d.key_heads, 2)

    q, k, v = torch.tensor_split(activate(mixed, c.activation).transpose(1, 2), (d.keys, 2 * d.keys), -1)
    q = heads(q)
    k = heads(k)
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    v = v.reshape(batch, count, d.value_heads, d.value_dim)
    rates = linear(x, "linear_attn.in_proj_b").sigmoid()
    steps = F.softplus(linear(x, "linear_attn.in_proj_a") + weight("linear_attn.dt_bias"))
    decay = torch.exp(-weight("linear_attn.A_log").exp() * steps)[..., None, None]
    outputs = list[Tensor]()
    for n in range(count):
        matrices = matrices * decay[:, n]
        stored = (matrices * k[:, n, :, :, None]).sum(2)
        matrices = matrices + k[:, n, :, :, None] * ((v[:, n] - stored) * rates[:, n, :, None])[:, :, None]
        outputs.append((matrices * q[:, n, :, :, None]).sum(2) * d.key_dim**-0.5)
    if cache is not None:
        cache[:] = columns[..., columns.shape[-1] - c.conv_taps + 1 :], matrices
    z = linear(x, "linear_attn.in_proj_z").reshape(v.shape)
    return (rms(torch.stack(outputs, 1), weight("linear_attn.norm.weight"), c.eps) * F.silu(z)).flatten(2)


def rotate(c: TextConfig, x: Tensor, positions: Tensor, layer: int) -> Tensor:
    rope = c.sliding.rope if c.sliding is not None and c.slides(layer) else c.rope
    three_part = positions[:, rope.axes] if positions.ndim > 1 else positions[:, None]
    return rotated(x, three_part.float() * torch.tensor(rope.frequencies), rope.scale)
