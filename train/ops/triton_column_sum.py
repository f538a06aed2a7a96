"""Sums over the rows of a matrix, such as the gradient of a bias. Shapes: N rows, C columns, P programs for a block of
columns.

Two stages, without atomics, so that results have the same bits at every run: each program adds up every P-th tile of
its columns, and a short kernel adds up what programs leave. Few rows take one stage.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_tiles import INTERPRETED, num_sms


@dataclass(frozen=True)
class ColumnTile:
    """rows, columns: of a tile; warps of a program; programs: at most, for each multiprocessor; least: tiles that are
    worth a program; stages: tiles that are on their way from memory at once, and one."""

    rows: int
    columns: int
    warps: int
    programs: int
    least: int = 4
    stages: int = 1

    def grid(self, rows: int, width: int, device: torch.device) -> tuple[int, int]:
        """(blocks of columns, P)."""
        blocks, tiles = triton.cdiv(width, self.columns), triton.cdiv(rows, self.rows)
        wanted = max(1, self.programs * num_sms(device) // blocks)
        return blocks, min(wanted, triton.cdiv(tiles, self.least))


SUM = ColumnTile(32, 128, 4, 16)
PARTS = ColumnTile(128, 32, 4, 1)  # adds up what programs leave
SMALL, SMALL_PARTS = ColumnTile(4, 8, 1, 4, 2), ColumnTile(4, 8, 1, 1)  # under the interpreter


def column_sum(x: Tensor) -> Tensor:
    """[C] in x's dtype of x [N, C]: the sum over the rows in float32, rounded once."""
    found: Tensor = _ColumnSum.apply(x) if x.requires_grad else _column_sum(x)
    return found


class _ColumnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return _column_sum(x)

    @staticmethod
    def backward(ctx: Any, dsum: Tensor) -> Tensor:
        return dsum.expand(ctx.shape)


def _column_sum(x: Tensor) -> Tensor:
    rows, width = x.shape
    if not rows or not width:
        return x.new_zeros(width)
    x = dense_rows(x)
    tile = SMALL if INTERPRETED.value else SUM
    grid = tile.grid(rows, width, x.device)
    out, parts = sums_and_parts(grid[1], width, x)
    _column_sum_kernel[grid](
        x, parts, rows, width, x.stride(0), ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return add_parts(parts, out)


def dense_rows(x: Tensor) -> Tensor:
    """x, or a copy where columns do not lie beside one another."""
    return x if x.stride(1) == 1 else x.contiguous()


def sums_and_parts(programs: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(sums [C] to be, float32 [P, C] for what programs leave), the same tensor where one program adds all up."""
    out = torch.empty(width, dtype=like.dtype, device=like.device)
    return out, out if programs == 1 else torch.empty(programs, width, dtype=torch.float32, device=like.device)


def add_parts(parts: Tensor, out: Tensor) -> Tensor:
    """out, filled with the sums of the parts where it is not the only part."""
    if parts is not out:
        programs, width = parts.shape
        tile = SMALL_PARTS if INTERPRETED.value else PARTS
        _column_sum_kernel[(triton.cdiv(width, tile.columns), 1)](
            parts, out, programs, width, width, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _column_sum_kernel(
    x, sums, rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """sums [P, C]: of every P-th tile of x."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    store_sums(sums, acc, column, width)


@triton.jit
def store_sums(sums, acc, column, width):
    """What a program adds up: its row of sums [P, C]."""
    found = tl.sum(acc, 0).to(sums.dtype.element_ty)
    tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, found, mask=column < width)
