"""A tower's norms and products in plain PyTorch, by the canonical names of their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from vtx.exporter.reference.layers import rms

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
