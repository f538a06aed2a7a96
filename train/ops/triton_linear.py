"""Linear layers of the towers whose gradient of the bias is made by Triton, alone or with GELU's; the backend `triton`.
Products are torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.ops import recorded
from train.ops.triton_column_sum import column_sum
from train.ops.triton_gelu import gelu_backward, gelu_forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kept: bool = False) -> Tensor:
    """x @ weight.T + bias. x: [..., in]; weight: [out, in]; bias: [out]; kept: whether a block that is computed again
    may keep the result. Where the bias has no gradient it is torch's."""
    trained = bias is not None and bias.requires_grad
    return recorded.linear(x, weight, bias, column_sum if trained else None, kind="projection" if kept else None)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(x @ weight.T + bias); approximate: none or tanh. Keeps x and what GELU is of, as torch does."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate {approximate!r}: none or tanh")
    out: Tensor = _LinearGelu.apply(x, weight, bias, approximate)
    return out


class _LinearGelu(torch.autograd.Function):
    """One node: rows are made of [..., in] inside, where a view is no node of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        before = F.linear(x, weight, bias).contiguous()
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, before)
        ctx.approximate = approximate
        return gelu_forward(before, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        rows = before.flatten(0, -2)
        change, dbias = gelu_backward(rows, dout.flatten(0, -2), ctx.approximate, sums=ctx.needs_input_grad[2])
        dx = None if weight is None else (change @ weight).view(*before.shape[:-1], weight.shape[1])
        dweight = None if x is None else change.t() @ x.flatten(0, -2)
        return dx, dweight, dbias, None
