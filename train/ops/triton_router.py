"""A router's choice of experts, and what its load-balancing loss (arXiv:2101.03961) needs, in one kernel each way per
operation; the backend `triton`.

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
CHOICE_ELEMENTS = 2048  # where a program keeps several tiles in registers for many steps


def topk_softmax(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], expert ids int64 [T, k]) of logits [T, E]: softmax over all experts in float32, the k
    greatest in descending order, divided by their sum with normalize. The ids have no gradient.

    Experts are compared by their logits, the lower expert first among equal ones. A NaN counts as the greatest, as with
    torch.topk: the weights of its row are NaN, its ids are k different experts. ValueError: k is not in [1, E].
    """
    if not 0 < k <= logits.shape[1]:
        raise ValueError(f"{k} of {logits.shape[1]} experts cannot be chosen")
    return _TopkSoftmax.apply(logits.contiguous(), k, normalize)


def router_statistics(logits: Tensor, expert_ids: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """(counts, prob_sums), float32 [E], of the first num_valid rows: how often each expert was chosen (no gradient),
    and the sum of the softmax probabilities. logits: [T, E]; expert_ids: int64 [T, k] in [0, E)."""
    return _RouterStatistics.apply(logits.contiguous(), expert_ids.contiguous(), num_valid)


class _TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
        block, tile = _tile(experts, CHOICE_ELEMENTS)
        if rows:
            _topk_softmax_kernel[(triton.cdiv(rows, tile),)](
                logits, weights, ids, rows, experts, k, triton.next_power_of_2(k), normalize, ROWS=tile, BLOCK=block
            )
        # divided by their sum they are the softmax of the chosen logits alone, so that nothing else counts
        ctx.save_for_backward(weights if normalize else logits, ids)
        ctx.shape, ctx.dtype, ctx.normalize = logits.shape, logits.dtype, normalize
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        source, ids = ctx.saved_tensors
        rows, experts = ctx.shape
        dlogits = torch.empty(rows, experts, dtype=ctx.dtype, device=ids.device)
        block, tile = _tile(experts, CHOICE_ELEMENTS)
        if rows:
            _topk_softmax_backward_kernel[(triton.cdiv(rows, tile),)](
                source, ids, dweights.contiguous(), dlogits, rows, experts, ids.shape[1], ctx.normalize, tile, block
            )
        return dlogits, None, None


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


@triton.jit(do_not_specialize=["rows"])
def _topk_softmax_kernel(
    logits,
    weights,
    ids,
    rows,
    experts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """K times the greatest logit that is left, its probability and its column; SLOTS: K as a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    mask = (row < rows)[:, None] & (column < experts)[None, :]
    x = tl.load(logits + row.to(tl.int64)[:, None] * experts + column[None, :], mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # inf - inf is NaN again, and comparing stays possible
    top = tl.where(row < rows, tl.max(x, 1), 0.0)
    best = tl.full((ROWS, SLOTS), float("-inf"), tl.float32)
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    # a mask of its own, as a logit may be -inf, too: of a row with k experts or more, one is always left
    left = tl.zeros((ROWS, BLOCK), tl.int32) + (column < experts).to(tl.int32)[None, :]
    for j in tl.static_range(K):
        value = tl.max(tl.where(left != 0, x, float("-inf")), 1)
        expert = tl.min(tl.where((left != 0) & (x == value[:, None]), column[None, :], BLOCK), 1)
        left = tl.where(column[None, :] == expert[:, None], 0, left)
        best = tl.where(slot[None, :] == j, value[:, None], best)
        chosen = tl.where(slot[None, :] == j, expert[:, None], chosen)
    valid = (row < rows)[:, None] & (slot < K)[None, :]
    powers = tl.where(valid, tl.exp(best - top[:, None]), 0.0)
    total = tl.sum(powers if NORMALIZE else tl.exp(x - top[:, None]), 1)
    at = row.to(tl.int64)[:, None] * K + slot[None, :]
    tl.store(weights + at, powers / tl.where(row < rows, total, 1.0)[:, None], mask=valid)
    tl.store(ids + at, chosen.to(tl.int64), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _topk_softmax_backward_kernel(
    source,
    ids,
    dweights,
    dlogits,
    rows,
    experts,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dlogits = p * (d - sum(p * d)), d that of the chosen weights and 0 elsewhere. source: with NORMALIZE the weights,
    which are p, 0 elsewhere; or the logits, whose softmax is p."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    d = tl.zeros((ROWS, BLOCK), tl.float32)
    if NORMALIZE:
        p = tl.zeros((ROWS, BLOCK), tl.float32)
    else:
        p = _softmax(source, row, column, rows, experts)
    for j in tl.static_range(K):
        at = row.to(tl.int64) * K + j
        here = column[None, :] == tl.load(ids + at, mask=row < rows, other=-1)[:, None]
        d = tl.where(here, tl.load(dweights + at, mask=row < rows, other=0.0)[:, None], d)
        if NORMALIZE:
            p = tl.where(here, tl.load(source + at, mask=row < rows, other=0.0)[:, None], p)
    change = p * (d - tl.sum(p * d, 1)[:, None])
    at = dlogits + row.to(tl.int64)[:, None] * experts + column[None, :]
    tl.store(at, change.to(dlogits.dtype.element_ty), mask=(row < rows)[:, None] & (column < experts)[None, :])


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


def _tile(experts: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """(columns, rows) of a tile; both powers of two."""
    block = triton.next_power_of_2(experts)
    return block, max(1, min(32, elements // block))
