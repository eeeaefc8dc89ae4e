"""Towers of equal blocks in plain PyTorch: CLIP's, SigLIP's, InternVL's, and SigLIP 2's at native resolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.feed_forward import activate
from vtx.exporter.reference.parts import TowerWeights, rms
from vtx.tools.model.towers.encoder import LAYER_SCALES
from vtx.tools.model.vision import MERGED, VisionConfig


class EncoderReference:
    """A tower whose weights' names begin with `name`, of which the `used` first blocks run."""

    def __init__(self, vision: VisionConfig, parts: TowerWeights, name: str, used: int) -> None:
        self._v = vision
        self._parts = parts
        self._name = name
        self._used = used

    def states(self, pixels: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
        """The embeddings [views, tokens, hidden] and the outputs of the blocks, and the patches' grid at the end."""
        x, (high, wide) = self._embedded(pixels)
        states = [x]
        for layer in range(self._used):
            x = self._block(states[-1], f"{self._name}.encoder.layers.{layer}")
            if layer + 1 == self._v.merged_after:
                x = self._merged(x, high, wide)
                high = high // MERGED
                wide = wide // MERGED
            states.append(x)
        return states, (high, wide)

    def _embedded(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The patches with their positions, behind a class token and registers if there are any, and their grid."""
        v = self._v
        w = self._parts.read
        name = f"{self._name}.embeddings"
        kernel = w(f"{name}.patch_embedding.weight")
        bias = w(f"{name}.patch_embedding.bias") if not v.pre_norm else None
        if v.naflex and not v.nearest:
            kernel = kernel.reshape(-1, v.patch, v.patch, 3).permute(0, 3, 1, 2)
        x = F.conv2d(pixels.to(kernel.device), kernel, bias, stride=v.patch)
        high, wide = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        if v.class_token and not v.registers:
            x = torch.cat((w(f"{name}.class_embedding").expand(len(x), 1, -1), x), 1)
        x = x + self._positions(w(f"{name}.position_embedding.weight"), high, wide)
        if v.pre_norm:
            x = self._parts.norm(x, "vision.pre_layrnorm")
        if v.registers:
            before = torch.cat((w(f"{name}.class_embedding")[None], w(f"{name}.registers")))
            x = torch.cat((before.expand(len(x), -1, -1), x), 1)
        return x, (high, wide)

    def _positions(self, table: Tensor, high: int, wide: int) -> Tensor:
        """The table [..., positions, hidden] for a grid of patches, resized if it has another grid."""
        v = self._v
        side = self._v.position_grid
        if side is None:
            return table
        if v.nearest:
            edges = torch.arange(1 / side, 1.0, 1 / side)
            down, across = (torch.bucketize(torch.arange(n) / n, edges, right=True) for n in (high, wide))
            return table[(down[:, None] * side + across).flatten()]
        if v.naflex:
            square = table.T.reshape(1, v.hidden, side, side)
            stretched = F.interpolate(square, (high, wide), mode="bilinear", antialias=True)
            return stretched.flatten(2).transpose(1, 2)
        first = int(v.class_token)
        grid = table[:, first:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, (v.grid, v.grid), mode="bicubic", align_corners=False)
        return torch.cat((table[:, :first], grid.flatten(2).transpose(1, 2)), 1)

    def _merged(self, x: Tensor, high: int, wide: int) -> Tensor:
        """The hidden states [views, patches, hidden] of a grid of patches, one patch for each square."""
        name = "vision.vit_merger"
        views = len(x)
        linear = self._parts.linear
        squares = x.reshape(views, high // MERGED, MERGED, wide // MERGED, MERGED, -1).transpose(2, 3)
        squares = squares.reshape(-1, MERGED**2, self._v.hidden)
        squares = squares + self._attention(squares, name)
        joined = self._parts.norm(squares.flatten(1), f"{name}.pre_norm")
        y = linear(activate(linear(joined, f"{name}.linear_1"), "gelu_pytorch_tanh"), f"{name}.linear_2")
        return (y + squares.mean(1)).reshape(views, -1, self._v.hidden)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        v = self._v
        y = self._parts.norm(x, f"{name}.layer_norm1")
        qkv = [self._parts.linear(y, f"{name}.self_attn.{part}_proj") for part in "qkv"]
        if v.qk_norm:
            for number, part in enumerate("qk"):
                qkv[number] = rms(qkv[number], self._parts.read(f"{name}.self_attn.{part}_norm.weight"), v.eps)
        q, k, w = (part.reshape(*y.shape[:2], v.heads, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, w).transpose(1, 2).flatten(2)
        return self._parts.linear(y, f"{name}.self_attn.out_proj")

    def _block(self, x: Tensor, name: str) -> Tensor:
        v = self._v
        linear = self._parts.linear
        scales = [self._parts.read(f"{name}.{scale}") for scale in LAYER_SCALES] if v.layer_scale else [1.0, 1.0]
        x = x + scales[0] * self._attention(x, name)
        y = linear(self._parts.norm(x, f"{name}.layer_norm2"), f"{name}.mlp.fc1")
        return x + scales[1] * linear(activate(y, v.activation), f"{name}.mlp.fc2")
