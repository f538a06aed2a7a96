"""The adapters of experts as the kernels take them: of a rank that they know, the scale in the second factors.

Shapes: E experts, r rank, R rank of the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.ops.lora_types import ExpertLora

Factors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # low_a, gate_b, up_b, down_a, down_b
SMALLEST_RANK = 16


def kernel_factors(lora: ExpertLora, dtype: torch.dtype) -> Factors:
    """low_a [E or 1, 2R, H]: gate_a and then up_a; gate_b, up_b [E or 1, I, R] and down_b [E or 1, H, R] with the
    scale; down_a [E or 1, R, I]. One node of autograd, as many small ones take the host longer than the GPU."""
    gate = (lora.gate_a, lora.gate_b, lora.up_a, lora.up_b, lora.down_a, lora.down_b)
    found: Factors = _KernelFactors.apply(lora.scale, dtype, *gate)
    return found


class _KernelFactors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, dtype: torch.dtype, *factors: Tensor) -> Factors:
        ctx.scale = scale
        ctx.like = [(factor.shape, factor.dtype) for factor in factors]
        gate_a, gate_b, up_a, up_b, down_a, down_b = factors
        rank = gate_a.shape[1]
        extra = max(SMALLEST_RANK, triton.next_power_of_2(rank)) - rank
        low_a = torch.cat([_rows_filled(a.to(dtype), extra) for a in _as_many(gate_a, up_a)], 1)
        seconds = torch._foreach_mul([*_as_many(gate_b, up_b), down_b], scale)
        gate_b, up_b, down_b = (F.pad(b.to(dtype), (0, extra)) if extra else b.to(dtype) for b in seconds)
        down_a = _rows_filled(down_a.to(dtype), extra)
        return low_a, gate_b.contiguous(), up_b.contiguous(), down_a.contiguous(), down_b.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dlow_a, dgate_b, dup_b, ddown_a, ddown_b = gradients
        dgate_a, dup_a = dlow_a.chunk(2, 1)
        found = [dgate_a, dgate_b, dup_a, dup_b, ddown_a, ddown_b]
        found = [_like(d, *like) for d, like in zip(found, ctx.like, strict=True)]
        found[1::2] = torch._foreach_mul(found[1::2], ctx.scale)
        return None, None, *found


def _rows_filled(a: Tensor, extra: int) -> Tensor:
    return F.pad(a, (0, 0, 0, extra)) if extra else a


def _as_many(one: Tensor, other: Tensor) -> list[Tensor]:
    """Both of every expert where one of them is: the kernel takes gate and up alike."""
    count = max(len(one), len(other))
    return [factors.expand(count, -1, -1) for factors in (one, other)]


def _like(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Of the factor that was filled up, and shared."""
    gradient = gradient[:, : shape[1], : shape[2]]
    if shape[0] < len(gradient):
        gradient = gradient.sum(0, keepdim=True, dtype=torch.float32)
    return gradient.to(dtype)
