"""RMSNorm with the residual sum before it, one kernel each way; the backend `triton`.

Shapes: N rows, H hidden size.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.ops.triton_tiles import as_rows, num_sms

ELEMENTS = 8192  # of a program's tile; several rows of a small hidden size


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y, s), both like x: s = x + residual (x itself without one), y = s / rms(s) * weight.

    x, residual: [..., H]; weight: [H]. The sum is rounded to x's dtype first; all else is float32, rounded once.
    """
    flat = None if residual is None else as_rows(residual)
    y, total = _RmsNorm.apply(as_rows(x), weight.contiguous(), eps, flat)
    return (y, total) if x.dim() == 2 else (y.view(x.shape), total.view(x.shape))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            block, tile = _tile(width)
            _forward_kernel[(triton.cdiv(rows, tile),)](
                x, None if residual is None else residual.contiguous(), weight, y, total, inverse, rows, width, eps,
                ADD=residual is not None, ROWS=tile, BLOCK=block, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(total, weight, inverse)
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)  # where the sum goes nowhere else, no zeros are made, read and added
        return y, total.view_as(total) if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        if dy is None:
            return dtotal, torch.zeros_like(weight), None, dtotal if ctx.added else None
        rows, width = total.shape
        dx = torch.empty_like(total)
        block, tile = _tile(width, ELEMENTS // 2)
        programs = max(1, min(triton.cdiv(rows, tile), 8 * num_sms(total.device)))
        parts = torch.zeros(programs, width, dtype=torch.float32, device=total.device)
        if rows:
            _backward_kernel[(programs,)](
                total, weight, inverse, dy.contiguous(), None if dtotal is None else dtotal.contiguous(), dx, parts,
                rows, width, ADD=dtotal is not None, ROWS=tile, BLOCK=block, num_warps=8,
            )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, dx if ctx.added else None


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, residual, weight, y, total, inverse, rows, width, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(inverse + row, scale, mask=row < rows)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + at, (values * scale[:, None] * factors[None, :]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    total, weight, inverse, dy, dtotal, dx, parts, rows, width, ADD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = dtotal + scale * (dy * w - n * mean(dy * w * n)) with n = total * scale; parts: sums of dy * n."""
    column = tl.arange(0, BLOCK)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(total + at, mask=mask, other=0.0).to(tl.float32) * scale
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        acc += gradient * normal
        gradient *= factors
        mean = tl.sum(gradient * normal, 1)[:, None] / width
        change = scale * (gradient - normal * mean)
        if ADD:
            change += tl.load(dtotal + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=mask)
    tl.store(parts + tl.program_id(0) * width + column, tl.sum(acc, 0), mask=column < width)


def _tile(width: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """(columns, rows) of a tile; both powers of two."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(32, elements // block))
