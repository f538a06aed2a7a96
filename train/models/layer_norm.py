"""The norm of the vision and audio towers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from train.ops.registry import Ops


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016), with the addition before it."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.compute: Callable[..., tuple[Tensor, Tensor]] = ops.layer_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of s, s), where s = x + residual. Who goes on with the s of a norm without residual spares the backward
        pass an addition of its own."""
        return self.compute(x, self.weight, self.bias, self.eps, residual)
