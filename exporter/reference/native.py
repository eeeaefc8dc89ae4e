"""A tower of images at native resolution in plain PyTorch: patches in raster order, windows by their positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.tools.model.vision import VisionConfig

BASE = 10_000.0
Function = Callable[[Tensor, str], Tensor]


class NativeReference:
    """The tower by the model's functions: weights by canonical name, activations, norms and products, in float32."""

    def __init__(
        self,
        vision: VisionConfig,
        weight: Callable[[str], Tensor],
        activate: Function,
        norm: Function,
        linear: Function,
    ) -> None:
        self._v = vision
        self._w = weight
        self._activate = activate
        self._norm = norm
        self._linear = linear

    def tokens(self, pixels: Tensor) -> list[Tensor]:
        """One image [3, height, width] to its tokens [tokens, hidden], row by row, and its maps, which are alike."""
        v = self._v
        side = self._v.shuffle
        kernel = self._w("vision.patch_embed.proj.weight")
        still = torch.stack([pixels] * kernel.shape[2], 1)[None]
        bias = self._w("vision.patch_embed.proj.bias") if v.patch_bias else None
        grid = F.conv3d(still, kernel, bias, stride=kernel.shape[2:])[0, :, 0]  # [hidden, rows, columns]
        high, wide = grid.shape[1:]
        if v.position_grid is not None:
            table = self._w("vision.pos_embed.weight").T.reshape(1, v.hidden, v.position_grid, v.position_grid)
            grid = grid + F.interpolate(table, (high, wide), mode="bilinear", align_corners=True)[0]
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
        x = grid.flatten(1).T
        windows = []  # the patches of each
        if v.window is not None:
            window = row // v.window * len(column) + column // v.window
            windows = [torch.nonzero(window == number)[:, 0] for number in sorted({*window.tolist()})]
        half = v.hidden // v.heads // 2
        rates = BASE ** (-torch.arange(0, half, 2).float() / half)
        angles = torch.cat((row[:, None] * rates, column[:, None] * rates), 1)  # [patches, head_dim / 2]
        maps = list[Tensor]()

        def squares(x: Tensor) -> Tensor:
            parts = x.reshape(high // side, side, wide // side, side, -1).transpose(1, 2)
            return parts.reshape(high // side * (wide // side), -1)

        def merged(x: Tensor, name: str) -> Tensor:
            return self._linear(self._activate(self._linear(x, f"{name}.mlp.0"), "gelu"), f"{name}.mlp.2")

        for layer in range(v.layers):
            groups = windows if v.window is not None and layer not in v.full_blocks else [torch.arange(len(x))]
            x = self._block(x, f"vision.blocks.{layer}", angles, groups)
            if layer in v.maps:
                name = f"vision.deepstack_merger_list.{len(maps)}"
                maps.append(merged(self._norm(squares(x), f"{name}.ln_q"), name))
        return [merged(squares(self._norm(x, "vision.merger.ln_q")), "vision.merger"), *maps]

    def _block(self, x: Tensor, name: str, angles: Tensor, groups: list[Tensor]) -> Tensor:
        v = self._v
        qkv = self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, w = (part.reshape(len(x), v.heads, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
        q = rotated(q, angles)
        k = rotated(k, angles)
        y = torch.empty_like(x)
        for group in groups:
            output = attended(q[:, group], k[:, group], w[:, group])
            y[group] = output.transpose(0, 1).flatten(1)
        x = x + self._linear(y, f"{name}.attn.proj")
        y = self._norm(x, f"{name}.norm2")
        mlp = f"{name}.mlp"
        if v.gated:
            gate = self._activate(self._linear(y, f"{mlp}.gate_proj"), v.activation)
            return x + self._linear(gate * self._linear(y, f"{mlp}.up_proj"), f"{mlp}.down_proj")
        return x + self._linear(self._activate(self._linear(y, f"{mlp}.fc1"), v.activation), f"{mlp}.fc2")


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of each of [heads, n, head_dim] to all of them.

    With an axis for images, since PyTorch's kernel without the matrix of scores [heads, n, n] wants one: for an image
    of Gemma 4 the scores and their softmax take 610 MB.
    """
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]


def rotated(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    a, b = x.chunk(2, -1)
    cos = angles.cos() * scale
    sin = angles.sin() * scale
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
