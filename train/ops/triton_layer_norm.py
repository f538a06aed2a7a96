"""LayerNorm with the residual sum before it, one kernel each way and a short one that adds up the gradients of weight
and bias; the backend `triton`.

Shapes: N rows, C columns, P programs. A program takes one row after another, its weights in registers. Widths of the
towers, such as 1152 = 1024 + 128, are far from the next power of two but a sum of two; so a row is a main part and a
tail. With one row at a time the sums over both are scalars: sums of several rows would have a layout for each part, and
the larger part would go through shared memory for them.
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
from torch.autograd.function import once_differentiable

from train.ops.triton_tiles import as_rows, num_sms

FORWARD, BACKWARD = 32, 32  # elements of the main part for each thread; 1152 columns need no more than a warp
FORWARD_WARPS, BACKWARD_WARPS = 16, 8  # on a multiprocessor, as many as registers leave room for
FORWARD_STAGES, BACKWARD_STAGES = 2, 2  # rows that are on their way from memory at once, and one
STAGED_BYTES = 2**15  # of a row of three tensors; longer ones leave no room in shared memory
SUM_ROWS, SUM_COLUMNS = 128, 32  # of the tile that adds up what programs leave


@dataclass(frozen=True)
class RowTile:
    """main, tail: columns, powers of two, tail may be 0; warps of a program."""

    main: int
    tail: int
    warps: int

    def stages(self, stages: int, itemsize: int) -> int:
        """How far ahead rows are loaded. stages: for rows that are not too long; itemsize: bytes of an element."""
        return stages if 3 * (self.main + self.tail) * itemsize <= STAGED_BYTES else 1

    def programs(self, rows: int, warps: int, device: torch.device) -> int:
        """At most one for a row. warps: on a multiprocessor."""
        return min(rows, max(1, warps // self.warps) * num_sms(device))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s), both like x: s = x + residual (x itself without one), y = (s - mean(s)) / std(s) * weight + bias.

    x, residual: [..., C]; weight, bias: [C]. The sum is rounded to x's dtype first; all else is float32, rounded once.
    The variance is that of the differences from the mean. Results have the same bits at every run.
    """
    flat = None if residual is None else as_rows(residual)
    y, total = _LayerNorm.apply(as_rows(x), weight.contiguous(), bias.contiguous(), eps, flat)
    return (y, total) if x.dim() == 2 else (y.view(x.shape), total.view(x.shape))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        mean, inverse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        if rows:
            tile = row_tile(width, FORWARD)
            _layer_norm_forward_kernel[(tile.programs(rows, FORWARD_WARPS, x.device),)](
                x, None if residual is None else residual.contiguous(), weight, bias, y, total, mean, inverse, rows,
                eps, WIDTH=width, ADD=residual is not None, MAIN=tile.main, TAIL=tile.tail,
                STAGES=tile.stages(FORWARD_STAGES, x.element_size()), num_warps=tile.warps,
            )  # fmt: skip
        ctx.save_for_backward(total, weight, bias, mean, inverse)
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)  # where the sum goes nowhere else, no zeros are made, read and added
        return y, total.view_as(total) if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, bias, mean, inverse = ctx.saved_tensors
        if dy is None:
            return dtotal, torch.zeros_like(weight), torch.zeros_like(bias), None, dtotal if ctx.added else None
        rows, width = total.shape
        dx = torch.empty_like(total)
        dweight, dbias = (torch.empty_like(t) if rows else torch.zeros_like(t) for t in (weight, bias))
        sums = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if rows:
            tile = row_tile(width, BACKWARD)
            programs = tile.programs(rows, BACKWARD_WARPS, total.device)
            parts = torch.empty(2, programs, width, dtype=torch.float32, device=total.device) if sums else None
            _layer_norm_backward_kernel[(programs,)](
                total, weight, mean, inverse, dy.contiguous(), None if dtotal is None else dtotal.contiguous(), dx,
                parts, rows, WIDTH=width, ADD=dtotal is not None, SUMS=sums, MAIN=tile.main, TAIL=tile.tail,
                STAGES=tile.stages(BACKWARD_STAGES, total.element_size()), num_warps=tile.warps,
            )  # fmt: skip
            if sums:
                _layer_norm_parts_kernel[(triton.cdiv(width, SUM_COLUMNS), 2)](
                    parts, dweight, dbias, programs, width, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
                )
        return dx, dweight if sums else None, dbias if sums else None, None, dx if ctx.added else None


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward_kernel(
    x, residual, weight, bias, y, total, mean, inverse, rows, eps, WIDTH: tl.constexpr, ADD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    END: tl.constexpr = MAIN + TAIL
    column = tl.arange(0, MAIN)
    factors = _read(weight, column, WIDTH, MAIN)
    shifts = _read(bias, column, WIDTH, MAIN)
    if TAIL:
        column2 = MAIN + tl.arange(0, TAIL)
        factors2 = _read(weight, column2, WIDTH, END)
        shifts2 = _read(bias, column2, WIDTH, END)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * WIDTH
        values = _read(x + start, column, WIDTH, MAIN)
        if TAIL:
            values2 = _read(x + start, column2, WIDTH, END)
        if ADD:
            values = _add(values, residual + start, total + start, column, WIDTH, MAIN)
            if TAIL:
                values2 = _add(values2, residual + start, total + start, column2, WIDTH, END)
        sums = tl.sum(values, 0)
        if TAIL:
            sums += tl.sum(values2, 0)
        middle = sums / WIDTH
        values = _within(values - middle, column, WIDTH, MAIN)
        squares = tl.sum(values * values, 0)
        if TAIL:
            values2 = _within(values2 - middle, column2, WIDTH, END)
            squares += tl.sum(values2 * values2, 0)
        scale = tl.rsqrt(squares / WIDTH + eps)
        tl.store(mean + row, middle)
        tl.store(inverse + row, scale)
        _write(y + start, values * scale * factors + shifts, column, WIDTH, MAIN)
        if TAIL:
            _write(y + start, values2 * scale * factors2 + shifts2, column2, WIDTH, END)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_backward_kernel(
    total, weight, mean, inverse, dy, dtotal, dx, parts, rows, WIDTH: tl.constexpr, ADD: tl.constexpr,
    SUMS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dtotal + scale * (g - mean(g) - n * mean(g * n)) with g = dy * w, n = (total - mean) * scale; parts
    [2, P, C]: of each program, sums of dy * n and of dy."""
    END: tl.constexpr = MAIN + TAIL
    column = tl.arange(0, MAIN)
    factors = _read(weight, column, WIDTH, MAIN)
    acc = tl.zeros((MAIN,), tl.float32)
    shift_acc = tl.zeros((MAIN,), tl.float32)
    if TAIL:
        column2 = MAIN + tl.arange(0, TAIL)
        factors2 = _read(weight, column2, WIDTH, END)
        acc2 = tl.zeros((TAIL,), tl.float32)
        shift_acc2 = tl.zeros((TAIL,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * WIDTH
        middle = tl.load(mean + row)
        scale = tl.load(inverse + row)
        normal = _within(_read(total + start, column, WIDTH, MAIN) - middle, column, WIDTH, MAIN) * scale
        gradient = _read(dy + start, column, WIDTH, MAIN)
        if TAIL:
            normal2 = _within(_read(total + start, column2, WIDTH, END) - middle, column2, WIDTH, END) * scale
            gradient2 = _read(dy + start, column2, WIDTH, END)
        if SUMS:
            acc += gradient * normal
            shift_acc += gradient
            if TAIL:
                acc2 += gradient2 * normal2
                shift_acc2 += gradient2
        gradient *= factors
        sums = tl.sum(gradient, 0)
        along = tl.sum(gradient * normal, 0)
        if TAIL:
            gradient2 *= factors2
            sums += tl.sum(gradient2, 0)
            along += tl.sum(gradient2 * normal2, 0)
        change = scale * (gradient - sums / WIDTH - normal * (along / WIDTH))
        if ADD:
            change += _read(dtotal + start, column, WIDTH, MAIN)
        _write(dx + start, change, column, WIDTH, MAIN)
        if TAIL:
            change2 = scale * (gradient2 - sums / WIDTH - normal2 * (along / WIDTH))
            if ADD:
                change2 += _read(dtotal + start, column2, WIDTH, END)
            _write(dx + start, change2, column2, WIDTH, END)
    if SUMS:
        at = parts + tl.program_id(0) * WIDTH
        shift_at = at + tl.num_programs(0) * WIDTH
        _write(at, acc, column, WIDTH, MAIN)
        _write(shift_at, shift_acc, column, WIDTH, MAIN)
        if TAIL:
            _write(at, acc2, column2, WIDTH, END)
            _write(shift_at, shift_acc2, column2, WIDTH, END)


@triton.jit
def _read(source, column, WIDTH: tl.constexpr, END: tl.constexpr):
    """float32 of columns of a row, 0 behind the row's end; END: the first column behind those asked for."""
    if END > WIDTH:
        return tl.load(source + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    else:
        return tl.load(source + column).to(tl.float32)


@triton.jit
def _write(target, values, column, WIDTH: tl.constexpr, END: tl.constexpr):
    values = values.to(target.dtype.element_ty)
    if END > WIDTH:
        tl.store(target + column, values, mask=column < WIDTH)
    else:
        tl.store(target + column, values)


@triton.jit
def _within(values, column, WIDTH: tl.constexpr, END: tl.constexpr):
    """values, 0 behind the row's end."""
    if END > WIDTH:
        return tl.where(column < WIDTH, values, 0.0)
    else:
        return values


@triton.jit
def _add(values, residual, total, column, WIDTH: tl.constexpr, END: tl.constexpr):
    """float32 of the sum, which is stored in the dtype of total and goes on as rounded to it."""
    values = (values + _read(residual, column, WIDTH, END)).to(total.dtype.element_ty)
    _write(total, values, column, WIDTH, END)
    return values.to(tl.float32)


@triton.jit
def _layer_norm_parts_kernel(parts, dweight, dbias, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of parts [2, P, C] over the programs; axis 1 of the grid: weight, bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = parts + tl.program_id(1) * programs * width
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & (column < width)[None, :]
        acc += tl.load(source + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    found = tl.sum(acc, 0)
    if tl.program_id(1) == 0:
        tl.store(dweight + column, found.to(dweight.dtype.element_ty), mask=column < width)
    else:
        tl.store(dbias + column, found.to(dbias.dtype.element_ty), mask=column < width)


def row_tile(width: int, elements: int) -> RowTile:
    """The tile for a row of `width`. elements: of the main part, for each thread."""
    whole = triton.next_power_of_2(width)
    main, tail = whole, 0
    if whole > width and triton.next_power_of_2(width - whole // 2) < whole // 2:
        main, tail = whole // 2, triton.next_power_of_2(width - whole // 2)
    return RowTile(main, tail, max(1, min(16, main // (32 * elements))))
