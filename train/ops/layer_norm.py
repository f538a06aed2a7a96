"""Layer normalisation (arXiv:1607.06450), with the residual sum before it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s), both like x: s = x + residual (x itself without one), y = (s - mean(s)) / std(s) * weight + bias.

    x, residual: [..., C]; weight, bias: [C]. std: the root of the variance (of all C, not C - 1) + eps. Statistics in
    float32 (float64 stays); the sum is rounded to x's dtype first.
    """
    total = x if residual is None else x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total
