"""Pixtral's tower and projector in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.reference.feed_forward import activate, gated_mlp
from vtx.exporter.reference.parts import TowerWeights, attended, rotated


class PixtralReference:
    """The tower and projector of a model by their weights, in float32."""

    def __init__(self, config: ModelConfig, parts: TowerWeights) -> None:
        self._c = config
        self._parts = parts

    def tokens(self, pixels: Tensor) -> Tensor:
        """One image [3, height, width] to its tokens [tokens, hidden], row by row."""
        c = self._c
        v = self._c.vision
        linear = self._parts.linear
        grid = F.conv2d(pixels[None], self._parts.read("vision.patch_conv.weight"), stride=v.patch)[0]
        high, wide = grid.shape[1:]
        rates = v.theta ** (-torch.arange(0, v.hidden // v.heads, 2).float() / (v.hidden // v.heads))
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
        angles = torch.cat((row[:, None] * rates[::2], column[:, None] * rates[1::2]), 1)
        states = [self._parts.norm(grid.flatten(1).T, "vision.ln_pre")]
        for layer in range(max(c.feature_layers)):
            states.append(self._block(states[-1], f"vision.transformer.layers.{layer}", angles))
        features = torch.cat([states[number] for number in c.feature_layers], -1)
        if v.shuffle > 1:
            normed = self._parts.norm(features, "projector.norm", c.projector_norm_eps)
            planes = normed.T.reshape(1, -1, high, wide)
            squares = F.unfold(planes, v.shuffle, stride=v.shuffle)[0].T
            features = linear(squares, "projector.patch_merger.merging_layer")
        hidden = activate(linear(features, "projector.linear_1"), c.projector_activation)
        return linear(hidden, "projector.linear_2")

    def _block(self, x: Tensor, name: str, angles: Tensor) -> Tensor:
        v = self._c.vision
        linear = self._parts.linear
        y = self._parts.norm(x, f"{name}.attention_norm")
        q, k, w = (
            linear(y, f"{name}.attention.{part}_proj").reshape(len(x), v.heads, -1).transpose(0, 1) for part in "qkv"
        )
        y = attended(rotated(q, angles), rotated(k, angles), w).transpose(0, 1).flatten(1)
        x = x + linear(y, f"{name}.attention.o_proj")
        y = self._parts.norm(x, f"{name}.ffn_norm")
        return x + gated_mlp(y, f"{name}.feed_forward", v.activation, linear)
