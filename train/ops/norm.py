"""Root-mean-square normalisation (arXiv:1910.07467), with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y, s), both like x: s = x + residual (x itself without one), y = s / rms(s) * weight.

    x, residual: [..., H]; weight: [H]. Statistics in float32; the sum is rounded to x's dtype first.
    """
    total = x if residual is None else x + residual
    return (normalise(total, eps).to(x.dtype) * weight).to(x.dtype), total


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32 (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
