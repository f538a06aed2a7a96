"""GELU, one kernel each way; the backward one adds up the gradient of the bias before it on its way.

Of N rows and C columns in bfloat16 the backward pass reads 4 N C bytes and writes 2 N C; apart, the sum would read
2 N C again.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_column_sum import SMALL, ColumnTile, add_parts, dense_rows, store_sums, sums_and_parts
from train.ops.triton_tiles import INTERPRETED

BLOCK, WARPS = 4096, 8  # of the forward pass, which takes a dense tensor as one long row
BACKWARD = ColumnTile(16, 128, 4, 16)


def gelu_forward(x: Tensor, approximate: str) -> Tensor:
    """gelu(x) in float32, rounded once; x dense; approximate: none or tanh."""
    out, size = torch.empty_like(x), x.numel()
    if size:
        _gelu_forward_kernel[(triton.cdiv(size, BLOCK),)](
            x, out, size, TANH=approximate == "tanh", BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def gelu_backward(x: Tensor, dout: Tensor, approximate: str, *, sums: bool) -> tuple[Tensor, Tensor | None]:
    """(dx [N, C], the sum of its rows [C] before they are rounded) of x [N, C], dense, and the gradient of gelu(x);
    sums: whether they are wanted."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, x.new_zeros(width) if sums else None
    dout = dense_rows(dout)
    tile = SMALL if INTERPRETED.value else BACKWARD
    grid = tile.grid(rows, width, x.device)
    out, parts = sums_and_parts(grid[1], width, x) if sums else (None, None)
    _gelu_backward_kernel[grid](
        x, dout, dx, parts, rows, width, dout.stride(0), TANH=approximate == "tanh", SUMS=sums, ROWS=tile.rows,
        COLUMNS=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return dx, None if out is None or parts is None else add_parts(parts, out)


@triton.jit
def _gelu_parts(x, TANH: tl.constexpr):
    """(g, g') of float32 x, where gelu(x) = x * g. As (1 + tanh(u)) / 2 = sigmoid(2 u), the approximation takes one
    exponential."""
    if TANH:
        square = x * x
        # 2 * sqrt(2 / pi) * (x + 0.044715 x^3)
        gate = tl.sigmoid(x * (1.5957691216057308 + 0.0713548162726 * square))
        slope = gate * (1.0 - gate) * (1.5957691216057308 + 0.2140644488178 * square)
    else:
        gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return gate, slope


@triton.jit
def _gelu_forward_kernel(x, out, size, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    gate, _ = _gelu_parts(values, TANH)
    tl.store(out + at, (values * gate).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gelu_backward_kernel(
    x, dout, dx, parts, rows, width, stride_dout, TANH: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dout * (g + x * g'); parts [P, C]: the sums of every P-th tile of it."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < width)[None, :]
        at = row * width + column[None, :]
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        given = tl.load(dout + row * stride_dout + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate, slope = _gelu_parts(values, TANH)
        change = given * (gate + values * slope)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=mask)
        if SUMS:
            acc += change
    if SUMS:
        store_sums(parts, acc, column, width)
