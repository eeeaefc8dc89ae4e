"""Muon in float32, matrices of one shape at a time: PyTorch's computes in bfloat16, which many processors emulate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

STEPS, MOMENTUM = 5, 0.95
A, B, C = 3.4445, -4.775, 2.0315  # of the Newton-Schulz iteration, as in torch.optim.Muon


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, about, of [count, rows, columns]."""
    x = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x if matrices.shape[1] <= matrices.shape[2] else x.mT


class Float32Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with Nesterov momentum and `adjust_lr_fn="match_rms_adamw"`."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes = defaultdict[torch.Size, list[nn.Parameter]](list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes[matrix.shape].append(matrix)
            for shape, matrices in shapes.items():
                moved = orthogonal(torch.stack([self._direction(matrix) for matrix in matrices]))
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for matrix, direction in zip(matrices, moved, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)

    def _direction(self, matrix: nn.Parameter) -> Tensor:
        assert matrix.grad is not None
        mean = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        mean.lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(mean, MOMENTUM)
