"""The actions of a model with an expert, in plain PyTorch: no graph, no cache that lasts; and its golden vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.reference.feed_forward import gated_mlp
from vtx.exporter.reference.golden import golden_ids
from vtx.exporter.reference.model import Reference, Sample
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.prompt.text import Text
from vtx.runtime.report import golden

SEED = 20


def actions_of(
    reference: Reference,
    sample: Sample,
    ks: Sequence[int | None],
    state: Tensor,
    noise: Tensor,
    report: Callable[[int], None] = lambda _: None,
) -> dict[int | None, Tensor]:
    """The actions [horizon, width] at each K, for a normalised state [state] and noise [horizon, width]."""
    spec = reference.config.action
    assert spec is not None
    last = None
    if spec.state_in == "prompt":
        weight, bias = (reference.weight(f"head.state_proj.{part}") for part in ("weight", "bias"))
        last = F.linear(state[None], weight, bias)
    by_k = reference.prefix_keys_values(sample, ks, report, last)
    prompts = [by_k[k] for k in ks]
    count = len(sample.ids) + (last is not None)
    actions = noise.expand(len(ks), -1, -1)
    for step in range(spec.steps):
        time = 1 - step / spec.steps
        change = 1 / spec.steps
        actions = actions - change * _velocity(reference, prompts, state, actions, time, count)
    return dict(zip(ks, actions, strict=True))


def _velocity(
    reference: Reference,
    prompts: Sequence[Sequence[tuple[Tensor, Tensor]]],
    state: Tensor,
    actions: Tensor,
    time: float,
    count: int,
) -> Tensor:
    """The expert's answers for one moment, to several prompts of `count` positions, [prompts, horizon, width].

    Each weight is read once for all of them.
    """
    spec = reference.config.action
    text = reference.config.text
    weight = reference.weight
    assert spec is not None

    def linear(x: Tensor, name: str, bias: str | None = None) -> Tensor:
        return F.linear(x, weight(f"head.{name}.weight"), None if bias is None else weight(f"head.{name}.bias"))

    def heads(x: Tensor, name: str) -> Tensor:
        return linear(x, name).reshape(*x.shape[:2], -1, text.head_dim).transpose(1, 2)

    half = spec.hidden // 2
    horizon = actions.shape[1]
    periods = spec.min_period * (spec.max_period / spec.min_period) ** torch.linspace(0, 1, half)
    angles = 1 / periods * 2 * math.pi * time
    moment = torch.cat((angles.sin(), angles.cos()))
    x = linear(actions, "action_in_proj", "bias")
    mixed = moment if spec.adaptive else torch.cat((x, moment.expand(len(actions), horizon, -1)), -1)
    mixed = linear(F.silu(linear(mixed, "action_time_mlp_in", "bias")), "action_time_mlp_out", "bias")
    x = x if spec.adaptive else mixed
    if spec.state_in == "expert":
        x = torch.cat((linear(state[None], "state_proj", "bias").expand(len(actions), -1, -1), x), 1)
    rows = spec.rows

    def norm(x: Tensor, name: str) -> tuple[Tensor, Tensor | float]:
        """The normed rows, and the factor of what is added to `x` then."""
        if not spec.adaptive:
            return F.rms_norm(x, x.shape[-1:], weight(f"head.{name}.weight"), spec.eps), 1.0
        scale, shift, gate = linear(F.silu(mixed), f"{name}.dense", "bias").chunk(3)
        return F.rms_norm(x, x.shape[-1:], None, spec.eps) * (1 + scale) + shift, gate

    visible = _visible(rows, horizon, causal=spec.causal)
    for layer in range(text.layers):
        p = f"layers.{layer}"
        own = layer % spec.self_every == 0
        start = count if own else 0
        positions = torch.arange(start, start + rows)
        y, gate = norm(x, f"{p}.input_layernorm")
        q = reference.rotated(heads(y, f"{p}.self_attn.q_proj"), positions)
        attended = list[Tensor]()
        for number, prompt in enumerate(prompts):
            pair = prompt[layer]
            if own:
                k, v = (heads(y, f"{p}.self_attn.{part}_proj")[number] for part in "kv")
                pair = torch.cat((pair[0], reference.rotated(k, positions)), 1), torch.cat((pair[1], v), 1)
            else:
                flat = [part.transpose(0, 1).flatten(1)[None] for part in pair]
                k, v = (heads(part, f"{p}.self_attn.{name}_proj")[0] for part, name in zip(flat, "kv", strict=True))
                pair = k, v
            sharing = q.shape[1] // text.kv_heads
            keys, values = (part.repeat_interleave(sharing, 0) for part in pair)
            mask = F.pad(visible, (keys.shape[1] - rows, 0), value=True) if own else None
            y_of_prompt = F.scaled_dot_product_attention(q[number], keys, values, attn_mask=mask)
            attended.append(y_of_prompt.transpose(0, 1).flatten(1))
        x = x + gate * linear(torch.stack(attended), f"{p}.self_attn.o_proj")
        y, gate = norm(x, f"{p}.post_attention_layernorm")
        x = x + gate * gated_mlp(y, f"{p}.mlp", spec.activation, linear)
    return linear(norm(x[:, rows - horizon :], "norm")[0], "action_out_proj", "bias")


def _visible(rows: int, horizon: int, *, causal: bool) -> Tensor:
    """The expert's own rows that each of them sees, [rows, rows]: the state's row, if there is one, no action."""
    visible = torch.ones(rows, rows, dtype=torch.bool)
    visible[: rows - horizon, rows - horizon :] = False
    return visible.tril() if causal else visible


def record_golden_actions(
    path: Path,
    reference: Reference,
    text: Text,
    settings: ImageSettings,
    ks: Sequence[int | None],
    report: Callable[[int], None],
) -> None:
    """As `record_golden`, for a model that outputs actions: a fixed state and noise, and the actions at each K."""
    config = reference.config
    image = golden.golden_image()
    spec = reference.config.action
    assert spec is not None
    ids = golden_ids(text, config.layout)
    pixels = golden.golden_pixels(config.layout.views(image, settings))
    decoded = golden.decoded_ids(ids, config.image_token_id)
    rng = np.random.default_rng(SEED)
    state = rng.standard_normal(spec.state, np.float32)
    noise = rng.standard_normal((spec.horizon, spec.width), np.float32)
    with torch.inference_mode():
        features = reference.encode([image], settings)
        sample = Sample(decoded, features.first(golden.DECODED_TOKENS))
        actions = actions_of(reference, sample, ks, torch.from_numpy(state), torch.from_numpy(noise), report)
    tensors: dict[str, NDArray[np.generic]] = {
        "ids": ids,
        "pixels": pixels,
        "features": features.hidden[: golden.FEATURE_TOKENS].numpy(),
        golden.STATE: state,
        golden.NOISE: noise,
        **{golden.actions_key(k): a.numpy() for k, a in actions.items()},
    }
    write_safetensors(path, {n: np.ascontiguousarray(t) for n, t in tensors.items()}, {"reference": "plain PyTorch"})
