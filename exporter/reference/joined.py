"""Eagle-X5's five towers in plain PyTorch: pictures to the towers' features, side by side on one grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.graphs.joined import WHITE, eva_angles
from vtx.exporter.reference.parts import attended
from vtx.tools.model.towers.joined.clip import CLIP
from vtx.tools.model.towers.joined.convnext import CONVNEXT, STEM
from vtx.tools.model.towers.joined.eva02 import EVA
from vtx.tools.model.towers.joined.pix2struct import PIX2STRUCT
from vtx.tools.model.towers.joined.sam import SAM
from vtx.tools.model.vision import NECK_SQUARE, VisionConfig


class JoinedTowers:
    """The towers by the model's functions: weights by canonical name, and activations, in float32."""

    def __init__(
        self, vision: VisionConfig, weight: Callable[[str], Tensor], activate: Callable[[Tensor, str], Tensor]
    ) -> None:
        self._v = vision
        self._w = weight
        self._activate = activate

    def states(self, pixels: Tensor) -> Tensor:
        """Images [images, 3, side, side] to [images, tokens, hidden], row by row."""
        one: Mapping[str, Callable[[VisionConfig, Tensor], Tensor]] = {
            "clip": self._clip,
            "convnext": self._convnext,
            "sam": self._sam,
            "eva02": self._eva,
            "pix2struct": self._pix2struct,
        }
        images = []
        for image in pixels:
            parts = [one[tower.family](tower, image[None]) for tower in self._v.towers]
            images.append(torch.cat([_resized(part, self._v.grid)[0].flatten(1).T for part in parts], -1))
        return torch.stack(images)

    def _clip(self, v: VisionConfig, pixels: Tensor) -> Tensor:
        p = f"{CLIP}.embeddings"
        x = F.conv2d(_resized(pixels, v.image), self._w(f"{p}.patch_embedding.weight"), stride=v.patch)
        table = _grid(self._w(f"{p}.position_embedding.weight")[1:], v.position_grid or v.grid)
        if v.position_grid is not None:
            table = F.interpolate(table, (v.grid, v.grid), mode="bicubic", antialias=True)
        rows = self._norm((x + table)[0].flatten(1).T, f"{CLIP}.pre_layrnorm", v)
        for layer in range(v.layers):
            name = f"{CLIP}.encoder.layers.{layer}"
            y = self._norm(rows, f"{name}.layer_norm1", v)
            q, k, w = (_heads(self._linear(y, f"{name}.self_attn.{part}_proj"), v) for part in "qkv")
            rows = rows + self._linear(attended(q, k, w).transpose(0, 1).flatten(1), f"{name}.self_attn.out_proj")
            y = self._linear(self._norm(rows, f"{name}.layer_norm2", v), f"{name}.mlp.fc1")
            rows = rows + self._linear(self._activate(y, v.activation), f"{name}.mlp.fc2")
        return _grid(rows, v.grid)

    def _convnext(self, v: VisionConfig, pixels: Tensor) -> Tensor:
        def normed(x: Tensor, name: str) -> Tensor:
            return self._norm(x.permute(0, 2, 3, 1), name, v).permute(0, 3, 1, 2)

        x = normed(F.conv2d(pixels, *self._pair(f"{CONVNEXT}.stem.0"), stride=STEM), f"{CONVNEXT}.stem.1")
        for stage, blocks in enumerate(v.stage_blocks):
            p = f"{CONVNEXT}.stages.{stage}"
            if stage:
                x = F.conv2d(normed(x, f"{p}.downsample.0"), *self._pair(f"{p}.downsample.1"), stride=2)
            for name in (f"{p}.blocks.{number}" for number in range(blocks)):
                kernel, bias = self._pair(f"{name}.conv_dw")
                y = F.conv2d(x, kernel, bias, padding=kernel.shape[-1] // 2, groups=len(kernel))
                y = self._norm(y.permute(0, 2, 3, 1), f"{name}.norm", v)
                y = self._linear(self._activate(self._linear(y, f"{name}.mlp.fc1"), v.activation), f"{name}.mlp.fc2")
                x = x + (self._w(f"{name}.weight") * y).permute(0, 3, 1, 2)
        return x

    def _sam(self, v: VisionConfig, pixels: Tensor) -> Tensor:
        x = F.conv2d(pixels, *self._pair(f"{SAM}.patch_embed.projection"), stride=v.patch)[0].permute(1, 2, 0)
        x = x + self._w(f"{SAM}.pos_embed")[0]
        for layer in range(v.layers):
            name = f"{SAM}.layers.{layer}"
            table = [self._w(f"{name}.attn.position_embedding_{axis}") for axis in "hw"]

            def attention(y: Tensor, name: str = name, tables: list[Tensor] = table) -> Tensor:
                """Of [side, side, hidden], with a term of the scores for the distance of rows, and one of columns."""
                side = len(y)
                q, k, w = (_heads(part.flatten(0, 1), v) for part in self._linear(y, f"{name}.attn.qkv").chunk(3, -1))
                far = torch.arange(side)[:, None] - torch.arange(side) + side - 1
                down, across = (table[far] for table in tables)  # [of queries, of keys, head_dim]
                heads = []
                for head in range(v.heads):  # one at a time: scores of all would take gigabytes
                    square = q[head].reshape(side, side, -1)
                    by_row = torch.einsum("rcd,rkd->rck", square, down)
                    by_column = torch.einsum("rcd,ckd->rck", square, across)
                    terms = by_row[..., :, None] + by_column[..., None, :]
                    scores = q[head] @ k[head].T * q.shape[-1] ** -0.5 + terms.reshape(side**2, side**2)
                    heads.append(scores.softmax(-1) @ w[head])
                return self._linear(torch.cat(heads, -1), f"{name}.attn.proj").reshape(side, side, -1)

            window = None if layer in v.full_blocks else v.window
            x = x + _by_windows(self._norm(x, f"{name}.layer_norm1", v), window, attention)
            y = self._linear(self._norm(x, f"{name}.layer_norm2", v), f"{name}.mlp.lin1")
            x = x + self._linear(self._activate(y, v.activation), f"{name}.mlp.lin2")
        x = F.conv2d(x.permute(2, 0, 1)[None], self._w(f"{SAM}.neck.conv1.weight"))
        x = self._norm(x.permute(0, 2, 3, 1), f"{SAM}.neck.layer_norm1", v).permute(0, 3, 1, 2)
        return F.pixel_unshuffle(x, NECK_SQUARE)

    def _eva(self, v: VisionConfig, pixels: Tensor) -> Tensor:
        table = _grid(self._w(f"{EVA}.pos_embed")[0, 1:], v.position_grid or v.grid)
        if v.position_grid is not None:
            table = F.interpolate(table, (v.grid, v.grid), mode="bicubic")
        x = (F.conv2d(pixels, *self._pair(f"{EVA}.patch_embed.proj"), stride=v.patch) + table)[0].permute(1, 2, 0)
        for layer in range(v.layers):
            name = f"{EVA}.blocks.{layer}"

            def attention(y: Tensor, name: str = f"{name}.attn") -> Tensor:
                side = len(y)
                angles = torch.from_numpy(eva_angles(v, side)).repeat_interleave(2, -1)
                parts = []
                for part in "qkv":
                    bias = None if part == "k" else self._w(f"{name}.{part}_bias")
                    z = _heads(F.linear(y.flatten(0, 1), self._w(f"{name}.{part}_proj.weight"), bias), v)
                    if part != "v":
                        other = torch.stack((-z[..., 1::2], z[..., ::2]), -1).flatten(-2)
                        z = z * angles.cos() + other * angles.sin()
                    parts.append(z)
                seen = attended(parts[0], parts[1], parts[2]).transpose(0, 1).flatten(1)
                return self._linear(seen, f"{name}.proj").reshape(side, side, -1)

            window = None if layer in v.full_blocks else v.window
            x = x + _by_windows(self._norm(x, f"{name}.norm1", v), window, attention)
            y = self._norm(x, f"{name}.norm2", v)
            gate = self._activate(self._linear(y, f"{name}.mlp.w1"), v.activation)
            y = self._norm(gate * self._linear(y, f"{name}.mlp.w2"), f"{name}.mlp.ffn_ln", v)
            x = x + self._linear(y, f"{name}.mlp.w3")
        return x.permute(2, 0, 1)[None]

    def _pix2struct(self, v: VisionConfig, pixels: Tensor) -> Tensor:
        scale, shift = (torch.tensor(part)[:, None, None] for part in (v.pixel_scale, v.pixel_shift))
        x = (pixels * scale + shift) * WHITE
        deviation = max(float(x.std(correction=0)), x.numel() ** -0.5)
        x = F.interpolate((x - x.mean()) / deviation, (v.image, v.image), mode="bilinear", antialias=True)
        patches = x[0].reshape(3, v.grid, v.patch, v.grid, v.patch).permute(1, 3, 2, 4, 0).flatten(2)
        p = f"{PIX2STRUCT}.embeddings"
        rows, columns = (self._w(f"{p}.{axis}_embedder.weight")[1 : v.grid + 1] for axis in ("row", "column"))
        x = (F.linear(patches, *self._pair(f"{p}.patch_projection")) + rows[:, None] + columns).flatten(0, 1)
        for layer in range(v.layers):
            name = f"{PIX2STRUCT}.encoder.layer.{layer}"
            y = self._scaled(x, f"{name}.pre_attention_layer_norm", v)
            q, k, w = (
                _heads(F.linear(y, self._w(f"{name}.attention.{part}.weight")), v) for part in ("query", "key", "value")
            )
            seen = attended(q, k, w, scale=1.0).transpose(0, 1).flatten(1)
            x = x + F.linear(seen, self._w(f"{name}.attention.output.weight"))
            y = self._scaled(x, f"{name}.pre_mlp_layer_norm", v)
            gate = self._activate(F.linear(y, self._w(f"{name}.mlp.wi_0.weight")), v.activation)
            x = x + F.linear(gate * F.linear(y, self._w(f"{name}.mlp.wi_1.weight")), self._w(f"{name}.mlp.wo.weight"))
        return _grid(self._scaled(x, f"{PIX2STRUCT}.layernorm", v), v.grid)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._w(f"{name}.weight"), self._w(f"{name}.bias")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, *self._pair(name))

    def _norm(self, x: Tensor, name: str, v: VisionConfig) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self._pair(name), v.eps)

    def _scaled(self, x: Tensor, name: str, v: VisionConfig) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w(f"{name}.weight"), v.eps)


def _resized(x: Tensor, side: int) -> Tensor:
    """Planes [images, channels, rows, columns] as [images, channels, side, side]."""
    return x if x.shape[-1] == side else F.interpolate(x, (side, side), mode="bilinear", align_corners=True)


def _grid(rows: Tensor, side: int) -> Tensor:
    """[places, channels] as [1, channels, side, side]."""
    return rows.T.reshape(1, -1, side, side)


def _heads(x: Tensor, v: VisionConfig) -> Tensor:
    return x.reshape(*x.shape[:-1], v.heads, -1).transpose(0, 1)


def _by_windows(x: Tensor, window: int | None, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention of [side, side, hidden] within windows, filled with zeros that are attended to; None: of all to all."""
    if window is None:
        return attention(x)
    side = len(x)
    out = torch.empty_like(x)
    for top in range(0, side, window):
        for left in range(0, side, window):
            own = x[top : top + window, left : left + window]
            high, wide = own.shape[:2]
            seen = attention(F.pad(own, (0, 0, 0, window - wide, 0, window - high)))
            out[top : top + high, left : left + wide] = seen[:high, :wide]
    return out
