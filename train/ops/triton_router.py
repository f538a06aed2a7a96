"""What the load-balancing loss needs of one router (arXiv:2101.03961), in one kernel each way; the backend `triton`.

Shapes: T rows, E experts, k chosen experts per row.
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

from train.ops.triton_tiles import num_sms

ELEMENTS = 4096  # of a program's tile


def router_statistics(logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """(counts, prob_sums), float32 [E], of the first num_valid rows: how often each expert was chosen (no gradient),
    and the sum of the softmax probabilities. logits: [T, E]; expert_ids: int64 [T, k] in [0, E)."""
    return _RouterStatistics.apply(logits.contiguous(), expert_ids.contiguous(), num_valid)


class _RouterStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
        experts = logits.shape[1]
        block, rows = _tile(experts)
        programs = max(1, min(triton.cdiv(num_valid, rows), 4 * num_sms(logits.device)))
        parts = torch.zeros(2, programs, experts, dtype=torch.float32, device=logits.device)
        if num_valid:
            _forward_kernel[(programs,)](
                logits,
                expert_ids,
                parts[0],
                parts[1],
                num_valid,
                experts,
                K=expert_ids.shape[1],
                ROWS=rows,
                BLOCK=block,
            )
        ctx.save_for_backward(logits)
        ctx.num_valid = num_valid
        counts, sums = parts.sum(1)
        ctx.mark_non_differentiable(counts)
        return counts, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, dsums: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        rows, experts = logits.shape
        dlogits = torch.empty_like(logits)
        block, tile = _tile(experts)
        if rows:
            _backward_kernel[(triton.cdiv(rows, tile),)](
                logits, dsums.contiguous(), dlogits, rows, ctx.num_valid, experts, ROWS=tile, BLOCK=block
            )
        return dlogits, None, None


@triton.jit
def _softmax(logits, row, column, limit, experts):
    """[ROWS, BLOCK] of float32; zeros in rows from limit on."""
    mask = (row < limit)[:, None] & (column < experts)[None, :]
    x = tl.load(logits + row.to(tl.int64)[:, None] * experts + column[None, :], mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.where(row < limit, tl.max(x, 1), 0.0)
    powers = tl.exp(x - top[:, None])
    return powers / tl.where(row < limit, tl.sum(powers, 1), 1.0)[:, None]


@triton.jit(do_not_specialize=["num_valid"])
def _forward_kernel(
    logits, expert_ids, counts, sums, num_valid, experts, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    chosen = tl.zeros((ROWS, BLOCK), tl.int32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_valid, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        total += _softmax(logits, row, column, num_valid, experts)
        for j in tl.static_range(K):
            expert = tl.load(expert_ids + row.to(tl.int64) * K + j, mask=row < num_valid, other=-1)
            chosen += (expert[:, None] == column[None, :]).to(tl.int32)
    at = tl.program_id(0) * experts + column
    tl.store(counts + at, tl.sum(chosen, 0).to(tl.float32), mask=column < experts)
    tl.store(sums + at, tl.sum(total, 0), mask=column < experts)


@triton.jit(do_not_specialize=["rows", "num_valid"])
def _backward_kernel(logits, dsums, dlogits, rows, num_valid, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dlogits = p * (d - sum(p * d)), zeros in rows from num_valid on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    p = _softmax(logits, row, column, num_valid, experts)
    d = tl.load(dsums + column, mask=column < experts, other=0.0)[None, :]
    change = p * (d - tl.sum(p * d, 1)[:, None])
    at = dlogits + row.to(tl.int64)[:, None] * experts + column[None, :]
    tl.store(at, change.to(dlogits.dtype.element_ty), mask=(row < rows)[:, None] & (column < experts)[None, :])


def _tile(experts: int) -> tuple[int, int]:
    """(columns, rows) of a tile; both powers of two."""
    block = triton.next_power_of_2(experts)
    return block, max(1, min(32, ELEMENTS // block))
