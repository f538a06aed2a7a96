"""Linear layers of the towers, alone and with the activation behind them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from train.ops import recorded


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kept: bool = False) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: [out, in]; bias: [out]; kept: whether a block that is computed again
    may keep the result, see `train.ops.recorded`."""
    return recorded.linear(x, weight, bias, kind="projection" if kept else None)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(x @ weight.T + bias) (arXiv:1606.08415). approximate: none = x * Phi(x), tanh = its approximation, as
    torch's."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)
