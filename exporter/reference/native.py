"""A tower of images at native resolution in plain PyTorch: patches in raster order, windows by their positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.feed_forward import activate, gated_mlp
from vtx.exporter.reference.parts import TowerWeights, attended, rotated
from vtx.tools.model.vision import VisionModel


class NativeReference:
    """The tower of a model by its weights, in float32."""

    def __init__(self, model: VisionModel, parts: TowerWeights) -> None:
        self._c = model
        self._v = model.vision
        self._w = parts.read
        self._norm = parts.norm
        self._linear = parts.linear

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
            grid = grid + F.interpolate(table, (high, wide), mode="bilinear", align_corners=not v.half_pixel)[0]
        row, column = (part.flatten() for part in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
        x = grid.flatten(1).T
        x = self._norm(x, "vision.embedding_norm") if v.first_norm else x
        windows = []  # the patches of each
        if v.window is not None:
            window = row // v.window * len(column) + column // v.window
            windows = [torch.nonzero(window == number)[:, 0] for number in sorted({*window.tolist()})]
        half = v.hidden // v.heads // 2
        rates = v.theta ** (-torch.arange(0, half, 2).float() / half)
        angles = torch.cat((row[:, None] * rates, column[:, None] * rates), 1)  # [patches, head_dim / 2]
        maps = list[Tensor]()

        def squares(x: Tensor) -> Tensor:
            parts = x.reshape(high // side, side, wide // side, side, -1).transpose(1, 2)
            return parts.reshape(high // side * (wide // side), -1)

        def merged(x: Tensor, name: str) -> Tensor:
            inner = activate(self._linear(x, f"{name}.mlp.0"), self._c.projector_activation)
            return self._linear(inner, f"{name}.mlp.2")

        for layer in range(v.layers):
            groups = windows if v.window is not None and layer not in v.full_blocks else [torch.arange(len(x))]
            name = f"vision.blocks.{layer}"
            if layer in v.convolved:
                mixed = self._convolved(self._norm(x, f"{name}.norm1"), f"{name}.conv", (high, wide))
            else:
                mixed = self._attended(self._norm(x, f"{name}.norm1"), f"{name}.attn", angles, groups)
            x = self._expanded(x + mixed, name)
            if layer in v.maps:
                name = f"vision.deepstack_merger_list.{len(maps)}"
                maps.append(merged(self._norm(squares(x), f"{name}.ln_q"), name))
        x = self._norm(x, "vision.post_layernorm") if v.post_norm else x
        if v.downsampled:
            return [self._downsampled(squares(x))]
        return [
            merged(squares(self._norm(x, "vision.merger.ln_q", self._c.projector_norm_eps)), "vision.merger"),
            *maps,
        ]

    def _attended(self, x: Tensor, name: str, angles: Tensor, groups: list[Tensor]) -> Tensor:
        """Attention of normed states [patches, hidden] within each of the groups."""
        v = self._v
        width = v.hidden // v.heads
        if v.kv_heads is None:
            parts = [*self._linear(x, f"{name}.qkv").chunk(3, -1)]
        else:
            parts = [self._linear(x, f"{name}.{part}_proj") for part in "qkv"]
        q, k, w = (part.reshape(len(x), -1, width).transpose(0, 1) for part in parts)
        if v.head_norms:
            q = self._norm(q, f"{name}.q_norm")
            k = self._norm(k, f"{name}.k_norm")
        q = rotated(q, angles)
        k, w = (part.repeat_interleave(v.heads // len(part), 0) for part in (rotated(k, angles), w))
        y = torch.empty_like(x)
        for group in groups:
            output = attended(q[:, group], k[:, group], w[:, group])
            y[group] = output.transpose(0, 1).flatten(1)
        return self._linear(y, f"{name}.proj")

    def _convolved(self, x: Tensor, name: str, grid: tuple[int, int]) -> Tensor:
        first, last, inner = self._linear(x, f"{name}.in_proj").chunk(3, -1)
        kernel = self._w(f"{name}.spatial_conv.weight")
        planes = (first * inner).T.reshape(-1, *grid)
        mixed = F.conv2d(planes, kernel, padding="same", groups=len(kernel))
        return self._linear(last * mixed.flatten(1).T, f"{name}.out_proj")

    def _downsampled(self, squares: Tensor) -> Tensor:
        v = self._v
        kernel = self._w("vision.downsample.weight")
        joined = squares.reshape(len(squares), v.shuffle**2, v.hidden).transpose(1, 2).flatten(1)
        states = F.linear(joined, kernel.flatten(1), self._w("vision.downsample.bias"))
        normed = self._norm(
            self._linear(states, "vision.merger.proj"),
            "vision.merger.post_projection_norm",
            self._c.projector_norm_eps,
        )
        states = activate(normed, self._c.projector_activation)
        return gated_mlp(states, "vision.merger", v.activation, self._linear)

    def _expanded(self, x: Tensor, name: str) -> Tensor:
        """States with those of a block's MLP added."""
        v = self._v
        y = self._norm(x, f"{name}.norm2")
        mlp = f"{name}.mlp"
        if v.gated:
            return x + gated_mlp(y, mlp, v.activation, self._linear)
        return x + self._linear(activate(self._linear(y, f"{mlp}.fc1"), v.activation), f"{mlp}.fc2")
