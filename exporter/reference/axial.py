"""Gemma 4's tower in plain PyTorch: patches with a position on each axis, whose means over squares are tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.feed_forward import gated_mlp
from vtx.exporter.reference.parts import TowerWeights, attended, rotated
from vtx.tools.model.vision import VisionConfig

BASE = 100.0


class AxialReference:
    """The tower by its weights, in float32."""

    def __init__(self, vision: VisionConfig, parts: TowerWeights) -> None:
        self._v = vision
        self._w = parts.read

    def states(self, pixels: Tensor) -> Tensor:
        """One image [3, height, width], from 0 to 1, to the normed means [tokens, hidden] that are projected."""
        v = self._v
        high, wide = (side // v.patch for side in pixels.shape[1:])
        patches = (2 * (pixels - 0.5)).reshape(3, high, v.patch, wide, v.patch).permute(1, 3, 2, 4, 0)
        by_column, by_row = self._w("vision.position_embedding_table")
        x = F.linear(patches.reshape(high, wide, -1), self._w("vision.patch_embed.weight"))
        x = (x + by_column[:wide] + by_row[:high, None]).flatten(0, 1)
        for layer in range(v.layers):
            name = f"vision.encoder.layers.{layer}"
            y = self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", high, wide)
            x = x + self._norm(y, f"{name}.post_attention_layernorm")
            y = self._norm(x, f"{name}.pre_feedforward_layernorm")
            y = gated_mlp(y, f"{name}.mlp", v.activation, self._linear)
            x = x + self._norm(y, f"{name}.post_feedforward_layernorm")
        side = v.shuffle
        means = x.reshape(high // side, side, wide // side, side, -1).mean((1, 3)).flatten(0, 1) * v.hidden**0.5
        if v.standardised:
            means = (means - self._w("vision.std_bias")) * self._w("vision.std_scale")
        return self._norm(means)

    def _attention(self, y: Tensor, name: str, high: int, wide: int) -> Tensor:
        v = self._v
        width = self._v.hidden // self._v.heads
        q, k, w = (self._linear(y, f"{name}.{part}_proj").reshape(len(y), v.heads, width) for part in "qkv")
        q = self._norm(q, f"{name}.q_norm")
        k = self._norm(k, f"{name}.k_norm")
        w = self._norm(w)
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
        rates = BASE ** (-torch.arange(0, width // 2, 2).float() / (width // 2))
        axes = [(at[:, None] * rates)[:, None] for at in (column, row)]

        def turned(x: Tensor) -> Tensor:
            halves = zip(x.chunk(2, -1), axes, strict=True)
            return torch.cat([rotated(half, angles) for half, angles in halves], -1).transpose(0, 1)

        output = attended(turned(q), turned(k), w.transpose(0, 1), scale=1.0)
        return self._linear(output.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if not self._v.clipped:
            return F.linear(x, self._w(f"{name}.linear.weight"))
        low, high, least, most = (
            self._w(f"{name}.{bound}") for bound in ("input_min", "input_max", "output_min", "output_max")
        )
        return F.linear(x.clamp(low, high), self._w(f"{name}.linear.weight")).clamp(least, most)

    def _norm(self, x: Tensor, name: str | None = None) -> Tensor:
        weight = None if name is None else self._w(f"{name}.weight")
        return F.rms_norm(x, x.shape[-1:], weight, self._v.eps)
