"""Moving rows between token order and expert order: pure bandwidth, one program per token, no atomics."""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_moe_routing import Routing


@triton.jit(do_not_specialize=["tokens"])
def _spread_kernel(
    source, rows, row_of_slot, ends, tokens, width, K: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    """The first programs take a token each, the others clear an expert's padding rows."""
    pid = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    if pid < tokens:
        token = pid.to(tl.int64)
        values = tl.load(source + token * width + column, mask=mask)
        for j in tl.static_range(K):
            row = tl.load(row_of_slot + token * K + j)
            tl.store(rows + row.to(tl.int64) * width + column, values, mask=mask & (row >= 0))
    else:
        end = tl.load(ends + pid - tokens)
        for row in range(end, (end + ALIGN - 1) // ALIGN * ALIGN):
            at = rows + tl.cast(row, tl.int64) * width + column
            tl.store(at, tl.zeros((BLOCK,), rows.dtype.element_ty), mask=mask)


@triton.jit
def _gather_sum_kernel(
    rows, weights, out, row_of_slot, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(row_of_slot + token * K + j)
        mask = (column < width) & (row >= 0)
        values = tl.load(rows + row.to(tl.int64) * width + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            acc += values * tl.load(weights + token * K + j)
        else:
            acc += values
    tl.store(out + token * width + column, acc.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _weight_sums_kernel(partial, out, row_of_slot, num_slots, num_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_slot + slot, mask=slot < num_slots, other=-1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(partial + part * num_rows + row, mask=row >= 0, other=0.0)
    tl.store(out + slot, acc, mask=slot < num_slots)


def spread(source: Tensor, routing: Routing) -> Tensor:
    """rows [M, W] of source [T, W]; padding rows are zero, those beyond the last expert's stay unwritten."""
    tokens, width = source.shape
    rows = source.new_empty(routing.rows, width)
    if tokens:
        block = triton.next_power_of_2(width)
        _spread_kernel[(tokens + routing.num_experts,)](
            source, rows, routing.row_of_slot, routing.ends, tokens, width,
            K=routing.k, ALIGN=routing.align, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return rows


def gather_sum(rows: Tensor, routing: Routing, weights: Tensor | None, tokens: int) -> Tensor:
    """[T, W]: the sum of each token's rows [M, W], weighted by weights float32 [T, k] when given; summed in float32."""
    width = rows.shape[1]
    out = rows.new_empty(tokens, width)
    if tokens:
        block = triton.next_power_of_2(width)
        _gather_sum_kernel[(tokens,)](
            rows, weights, out, routing.row_of_slot, width,
            K=routing.k, WEIGHTED=weights is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def weight_sums(partial: Tensor, routing: Routing, shape: tuple[int, int]) -> Tensor:
    """float32 [T, k] of partial float32 [parts, M]: the sum over the parts for each slot, 0 where it was skipped."""
    out = partial.new_empty(shape, dtype=torch.float32)
    if out.numel():
        _weight_sums_kernel[(triton.cdiv(out.numel(), 1024),)](
            partial, out, routing.row_of_slot, out.numel(), routing.rows, PARTS=partial.shape[0], BLOCK=1024
        )
    return out


def _warps(block: int) -> int:
    """16 bytes of bfloat16 for each thread and load."""
    return min(16, max(1, block // 256))
