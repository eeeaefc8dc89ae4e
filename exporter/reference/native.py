"""A tower of images at their own resolution, plainly: patches in raster order, and who attends to whom by its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.config import VisionConfig

BASE = 10_000.0
Weight = Callable[[str], Tensor]
Activate = Callable[[Tensor, str], Tensor]


class NativeTower:
    """The tower with weights by canonical name, in float32."""

    def __init__(self, vision: VisionConfig, weight: Weight, activate: Activate) -> None:
        self._v, self._w, self._activate = vision, weight, activate

    def tokens(self, pixels: Tensor) -> Tensor:
        """One image [3, height, width] to its tokens [tokens, hidden], row by row."""
        v, side = self._v, self._v.shuffle
        kernel = self._w("vision.patch_embed.proj.weight")
        still = torch.stack([pixels] * kernel.shape[2], 1)[None]
        grid = F.conv3d(still, kernel, stride=kernel.shape[2:])[0, :, 0]  # [hidden, rows, columns]
        high, wide = grid.shape[1:]
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
        x = grid.flatten(1).T
        groups = self._groups(row, column)
        for layer in range(v.layers):
            seen = groups if v.window is not None and layer not in v.full_blocks else [torch.arange(len(x))]
            x = self._block(x, f"vision.blocks.{layer}", self._angles(row, column), seen)
        x = self._norm(x, "vision.merger.ln_q").reshape(high // side, side, wide // side, side, -1)
        x = self._linear(x.transpose(1, 2).reshape(high // side * (wide // side), -1), "vision.merger.mlp.0")
        return self._linear(self._activate(x, "gelu"), "vision.merger.mlp.2")

    def _groups(self, row: Tensor, column: Tensor) -> list[Tensor]:
        """The numbers of the patches of each window."""
        if self._v.window is None:
            return []
        window = row // self._v.window * len(column) + column // self._v.window
        return [torch.nonzero(window == number)[:, 0] for number in sorted({*window.tolist()})]

    def _angles(self, row: Tensor, column: Tensor) -> Tensor:
        """[patches, head_dim / 2]: by the row, then by the column."""
        half = self._v.hidden // self._v.heads // 2
        rates = BASE ** (-torch.arange(0, half, 2).float() / half)
        return torch.cat((row[:, None] * rates, column[:, None] * rates), 1)

    def _block(self, x: Tensor, name: str, angles: Tensor, groups: list[Tensor]) -> Tensor:
        v = self._v
        qkv = self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, w = (part.reshape(len(x), v.heads, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
        q, k = _turned(q, angles), _turned(k, angles)
        y = torch.empty_like(x)
        for own in groups:
            seen = F.scaled_dot_product_attention(q[:, own], k[:, own], w[:, own])
            y[own] = seen.transpose(0, 1).flatten(1)
        x = x + self._linear(y, f"{name}.attn.proj")
        return x + self._mlp(self._norm(x, f"{name}.norm2"), f"{name}.mlp")

    def _mlp(self, y: Tensor, name: str) -> Tensor:
        v = self._v
        if v.gated:
            gate = self._activate(self._linear(y, f"{name}.gate_proj"), v.activation)
            return self._linear(gate * self._linear(y, f"{name}.up_proj"), f"{name}.down_proj")
        return self._linear(self._activate(self._linear(y, f"{name}.fc1"), v.activation), f"{name}.fc2")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self._w(f"{name}.weight"), self._v.eps
        if self._v.rms_norm:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return F.layer_norm(x, x.shape[-1:], weight, self._w(f"{name}.bias"), eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w(f"{name}.weight"), self._w(f"{name}.bias"))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
