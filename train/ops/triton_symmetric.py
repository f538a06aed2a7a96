"""Symmetric products of many matrices at a time: the tiles on and below the diagonal are computed, the others are their
mirror images. Half the multiplications of `torch.bmm`.

One H200, float16, counted as if whole, against `bmm`: x x^T of [32, 1536, 2048] 1,120 and 760 TFLOP/s, of
[32, 1536, 1536] 1,072 and 746, of [64, 768, 768] 793 and 629, of [16, 2048, 2048] 1,210 and 768. Tiles of 64 x 128
reach three quarters of that.

A program has a tile of BM rows and 2 BM columns, in two squares; a square above the diagonal is left out, one below is
written twice. Shapes: B matrices; m the edge of the results.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from train.ops.triton_tiles import Tile, dot, num_sms, pick_tile

PRODUCTS = {  # n: twice m
    "hopper": Tile(128, 256, 64, 8, 3, persistent=1),
    "default": Tile(64, 128, 32, 4, 3),
    "float32": Tile(64, 128, 32, 4, 2),
    "interpreter": Tile(16, 32, 16, 4, 1, persistent=2),
}


def symmetric(
    x: Tensor,
    y: Tensor,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """[B, m, m] = beta added + alpha x y^T of x, y [B, m, K], for pairs whose result is symmetric: y is x, or both are
    symmetric and commute. Of the dtype of x, summed in float32, rounded once. Rows are contiguous and a multiple of 16
    bytes."""
    return _launch(x, y, alpha, added, beta, columns=False, tile=tile)


def gram_columns(x: Tensor, *, tile: Tile | None = None) -> Tensor:
    """[B, K, K] = x^T x of x [B, M, K]."""
    return _launch(x, x, 1.0, None, 0.0, columns=True, tile=tile)


def _launch(
    x: Tensor, y: Tensor, alpha: float, added: Tensor | None, beta: float, *, columns: bool, tile: Tile | None
) -> Tensor:
    batch, rows, width = x.shape
    edge, inner = (width, rows) if columns else (rows, width)
    out = torch.empty(batch, edge, edge, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, y = x.contiguous(), y.contiguous()
    tile = tile or pick_tile(PRODUCTS, x)
    bands = triton.cdiv(edge, tile.m)
    # bands 2p and 2p + 1 have p + 1 tiles each
    pairs = bands // 2
    tiles = pairs * (pairs + 1) + bands % 2 * (pairs + 1)
    left = [1, tile.k, tile.m] if columns else [1, tile.m, tile.k]
    right = [1, tile.k, tile.n] if columns else [1, tile.n, tile.k]
    total = batch * tiles
    programs = min(total, num_sms(x.device) * tile.persistent) if tile.persistent else total
    _symmetric_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, left), TensorDescriptor.from_tensor(y, right),
        out if added is None else added.contiguous(), out, total, alpha, beta,
        EDGE=edge, INNER=inner, TILES=tiles, COLUMNS=columns, ADDED=added is not None, BM=tile.m, BK=tile.k,
        FLATTEN=tile.persistent > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _write(
    out, added, values, matrix, row, column, beta, wanted, EDGE: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr
):
    """A square at (row, column), where it is wanted, and its mirror image, where it is below the diagonal."""
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BM)
    base = matrix.to(tl.int64) * (EDGE * EDGE)
    inside = (rows < EDGE)[:, None] & (columns < EDGE)[None, :] & wanted
    at = base + rows[:, None] * EDGE + columns[None, :]
    if ADDED:
        values += beta * tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    mirror = (columns < EDGE)[:, None] & (rows < EDGE)[None, :] & wanted & (column < row)
    tl.store(out + base + columns[:, None] * EDGE + rows[None, :], rounded.T, mask=mirror)


@triton.jit(do_not_specialize=["total"])
def _symmetric_kernel(
    x, y, added, out, total, alpha, beta,
    EDGE: tl.constexpr, INNER: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, ADDED: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """x, y: descriptors of [B, EDGE, INNER], or of [B, INNER, EDGE] with COLUMNS; added, out: [B, EDGE, EDGE]."""
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        matrix = index // TILES
        number = index % TILES
        # pair p of bands begins at tile p (p + 1); the root may be off by one
        pair = ((tl.sqrt(4.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        pair = tl.where((pair + 1) * (pair + 2) <= number, pair + 1, pair)
        pair = tl.where(pair * (pair + 1) > number, pair - 1, pair)
        left = number - pair * (pair + 1)
        second = (left > pair).to(tl.int32)
        row = (2 * pair + second) * BM
        column = (left - second * (pair + 1)) * (2 * BM)
        acc = tl.zeros((BM, 2 * BM), tl.float32)
        for k in range(0, INNER, BK):
            if COLUMNS:
                a = x.load([matrix, k, row]).reshape(BK, BM)
                b = y.load([matrix, k, column]).reshape(BK, 2 * BM)
                acc = dot(a.T, b, acc)
            else:
                a = x.load([matrix, row, k]).reshape(BM, BK)
                b = y.load([matrix, column, k]).reshape(2 * BM, BK)
                acc = dot(a, b.T, acc)
        one, two = (acc * alpha).reshape(BM, 2, BM).permute(0, 2, 1).split()
        _write(out, added, one, matrix, row, column, beta, column <= row, EDGE, ADDED, BM)
        _write(out, added, two, matrix, row, column + BM, beta, column + BM <= row, EDGE, ADDED, BM)
