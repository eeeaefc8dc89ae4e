"""A tower's norms and products in plain PyTorch, by the canonical names of their weights, and what decoders share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class TowerWeights:
    """The weights of a tower, which `names` lists, and its epsilon."""

    read: Read
    names: Collection[str]
    eps: float

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """A layer norm, or an RMS norm if it has no bias."""
        weight = self.read(f"{name}.weight")
        if f"{name}.bias" not in self.names:
            return rms(x, weight, eps or self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, self.read(f"{name}.bias"), eps or self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.read(f"{name}.bias") if f"{name}.bias" in self.names else None
        return F.linear(x, self.read(f"{name}.weight"), bias)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


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
