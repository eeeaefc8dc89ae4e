"""FastViTHD in plain PyTorch: images to the states of the places of its last stage."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.parts import TowerWeights
from vtx.tools.model.vision import VisionConfig

PLAIN = 3  # stages without attention
HEAD = 32


class ConvolutionalReference:
    """The tower by its weights, in float32."""

    def __init__(self, vision: VisionConfig, parts: TowerWeights) -> None:
        self._v = vision
        self._w = parts.read
        self._norm = parts.norm
        self._linear = parts.linear

    def states(self, pixels: Tensor) -> Tensor:
        """Images [images, 3, side, side] to [images, tokens, hidden], row by row."""
        x = F.gelu(self._convolved(pixels, "stem.0", stride=2))
        x = F.gelu(self._convolved(x, "stem.1", stride=2))
        x = F.gelu(self._convolved(x, "stem.2"))
        for stage, blocks in enumerate(self._v.stage_blocks):
            name = f"stages.{stage}"
            if stage > 0:
                x = F.gelu(self._convolved(x, f"{name}.downsample.proj.0", stride=2))
                x = F.gelu(self._convolved(x, f"{name}.downsample.proj.1"))
            if stage >= PLAIN:
                x = self._convolved(x, f"{name}.pos_emb")
            for block in range(blocks):
                x = self._block(x, f"{name}.blocks.{block}", attends=stage >= PLAIN)
        x = self._convolved(x, "final_conv")
        gate = x.mean((2, 3), keepdim=True)
        gate = F.relu(F.conv2d(gate, *self._pair("final_conv.se.fc1")))
        gate = F.conv2d(gate, *self._pair("final_conv.se.fc2")).sigmoid()
        return F.gelu(x * gate).flatten(2).transpose(1, 2)

    def _block(self, x: Tensor, name: str, *, attends: bool) -> Tensor:
        if attends:
            rows = x.flatten(2).transpose(1, 2)
            qkv = self._linear(self._norm(rows, f"vision.{name}.norm"), f"vision.{name}.token_mixer.qkv")
            q, k, w = (part.reshape(*part.shape[:2], -1, HEAD).transpose(1, 2) for part in qkv.chunk(3, -1))
            output = F.scaled_dot_product_attention(q, k, w).transpose(1, 2).flatten(2)
            y = self._linear(output, f"vision.{name}.token_mixer.proj").transpose(1, 2).reshape(x.shape)
            x = x + self._w(f"vision.{name}.layer_scale_1.gamma") * y
        else:
            x = self._convolved(x, f"{name}.token_mixer")
        kernel = self._w(f"vision.{name}.mlp.conv.conv.weight")
        y = F.conv2d(x, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))
        of = f"vision.{name}.mlp.conv.bn"
        mean, variance, scale, shift = (
            self._w(f"{of}.{part}") for part in ("running_mean", "running_var", "weight", "bias")
        )
        y = F.batch_norm(y, mean, variance, scale, shift, eps=self._v.eps)
        y = F.conv2d(F.gelu(F.conv2d(y, *self._pair(f"{name}.mlp.fc1"))), *self._pair(f"{name}.mlp.fc2"))
        return x + self._w(f"vision.{name}.layer_scale{'_2' * attends}.gamma") * y

    def _convolved(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        """A convolution that sees each channel alone where its kernel has one, else all of them."""
        kernel, bias = self._pair(f"{name}.reparam_conv")
        return F.conv2d(x, kernel, bias, stride, kernel.shape[-1] // 2, groups=x.shape[1] // kernel.shape[1])

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._w(f"vision.{name}.weight"), self._w(f"vision.{name}.bias")
