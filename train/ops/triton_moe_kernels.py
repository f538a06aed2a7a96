"""Grouped matrix products of the experts, as Triton kernels. `triton_moe_gemm` launches them.

Rows are sorted by expert (`triton_moe_routing`), each expert's first row and padding aligned to ALIGN. Operands come
as tensor descriptors (TMA on Hopper), whose loads may run past an expert's last row: rows are independent in the row
kernels, so only stores are masked there, to the expert's rows and padding. Padding rows of what is stored are zeros,
since those of what is read are: so the weight gradients, which sum over rows, need no mask.

Shapes: M rows, H hidden size, I width of an expert, R LoRA rank.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from train.ops.triton_tiles import dot


@triton.jit
def _store_rows(to, values, row, limit, column, width, BM: tl.constexpr, BN: tl.constexpr):
    """values [BM, BN] to rows row.. < limit, columns column.. < width of [M, width]."""
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to + at, values.to(to.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=["first", "z_rows"])
def gate_up_kernel(
    x, gate_up, low, gate_b, up_b, z, h, slot_of_row, ends, tile_expert, tile_row, tile_count, first, z_rows,
    K_CHOICES: tl.constexpr, H: tl.constexpr, I: tl.constexpr, GATHER: tl.constexpr, RANK: tl.constexpr,
    SHARED: tl.constexpr, STORE_Z: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, ALIGN: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """z[row] = [gate | up] of x[token of row], h = silu(gate) * up.

    z: [z_rows, 2I], rows beyond are not stored. REST: rows before `first` are there already, and h is not asked for.
    x: [T, H] by pointer when GATHER, else rows [M, H] by descriptor; gate_up: descriptor of [2E, I, H], so that one
    load brings the gate's and the up projection's part of a tile and one product serves both. With RANK: low: rows
    [M, 2R], gate's first; gate_b, up_b: [E or 1, I, R].
    """
    n_blocks: tl.constexpr = (I + BN - 1) // BN
    total = tl.load(tile_count) * n_blocks
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        tile = index // n_blocks
        column = index % n_blocks * BN
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_row + tile)
        end = tl.load(ends + expert)
        limit = (end + ALIGN - 1) // ALIGN * ALIGN
        rows = row + tl.arange(0, BM)
        if GATHER:
            inside = (rows < end)[:, None]
            token = tl.load(slot_of_row + rows, mask=rows < end, other=0) // K_CHOICES
            lines = x + token.to(tl.int64)[:, None] * H + tl.arange(0, BK)[None, :]
        acc = tl.zeros((BM, 2 * BN), tl.float32)
        inner = H
        if REST:
            inner = tl.where(row + BM > first, H, 0)
        for k in range(0, inner, BK):
            if GATHER:
                if H % BK == 0:
                    a = tl.load(lines + k, mask=inside, other=0.0)
                else:
                    a = tl.load(lines + k, mask=inside & (k + tl.arange(0, BK) < H)[None, :], other=0.0)
            else:
                a = x.load([row, k])
            b = gate_up.load([expert * 2, column, k]).reshape(2 * BN, BK)
            acc = dot(a, b.T, acc)
        gate, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        if RANK > 0:
            factor = 0 if SHARED else expert
            lane = tl.arange(0, RANK)
            valid = (rows < end)[:, None]
            at = low + rows.to(tl.int64)[:, None] * (2 * RANK) + lane[None, :]
            place = (factor * I + column + tl.arange(0, BN)).to(tl.int64)[:, None] * RANK + lane[None, :]
            wide = (column + tl.arange(0, BN) < I)[:, None]
            gate = dot(tl.load(at, mask=valid, other=0.0), tl.load(gate_b + place, mask=wide, other=0.0).T, gate)
            up = dot(tl.load(at + RANK, mask=valid, other=0.0), tl.load(up_b + place, mask=wide, other=0.0).T, up)
        if STORE_Z:
            columns = column + tl.arange(0, BN)
            wanted = (rows >= first) & (rows < tl.minimum(limit, z_rows))
            mask = wanted[:, None] & (columns < I)[None, :]
            at = z + rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
            tl.store(at, gate.to(z.dtype.element_ty), mask=mask)
            tl.store(at + I, up.to(z.dtype.element_ty), mask=mask)
        if not REST:
            _store_rows(h, gate * tl.sigmoid(gate) * up, row, limit, column, I, BM, BN)


@triton.jit
def rows_kernel(
    a, b, low, low_b, c, ends, tile_expert, tile_row, tile_count,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, TRANSPOSED: tl.constexpr, SHARED: tl.constexpr,
    SHARED_LOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """c[row] = a[row] @ b[e] [K, N], or @ b[e].T of [N, K] when TRANSPOSED; with RANK + low[row] @ low_b[e], alike.

    a: descriptor of [M, K]; b: descriptor of [E, K, N] or [E, N, K], or of one entry for all when SHARED; c: [M, N];
    low: [M, RANK]; low_b: [E or 1, RANK, N] or [E or 1, N, RANK].
    """
    n_blocks: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(tile_count) * n_blocks
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        tile = index // n_blocks
        column = index % n_blocks * BN
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_row + tile)
        end = tl.load(ends + expert)
        limit = (end + ALIGN - 1) // ALIGN * ALIGN
        matrix = 0 if SHARED else expert
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            left = a.load([row, k])
            if TRANSPOSED:
                acc = dot(left, b.load([matrix, column, k]).reshape(BN, BK).T, acc)
            else:
                acc = dot(left, b.load([matrix, k, column]).reshape(BK, BN), acc)
        if RANK > 0:
            rows = row + tl.arange(0, BM)
            lane = tl.arange(0, RANK)
            columns = column + tl.arange(0, BN)
            base = low_b if SHARED_LOW else low_b + expert.to(tl.int64) * (N * RANK)
            left = tl.load(
                low + rows.to(tl.int64)[:, None] * RANK + lane[None, :], mask=(rows < end)[:, None], other=0.0
            )
            if TRANSPOSED:
                at = base + columns[:, None] * RANK + lane[None, :]
                acc = dot(left, tl.load(at, mask=(columns < N)[:, None], other=0.0).T, acc)
            else:
                at = base + lane[:, None] * N + columns[None, :]
                acc = dot(left, tl.load(at, mask=(columns < N)[None, :], other=0.0), acc)
        _store_rows(c, acc, row, limit, column, N, BM, BN)


@triton.jit
def _swiglu_backward(dh, z, scaled, weight, rows, limit, column, I: tl.constexpr, BN: tl.constexpr):
    """Overwrites z = [gate | up] with its gradient, stores weight * h; returns sum(dh * h) of each row.

    dh: [BM, BN], the gradient of h without the routing weight.
    """
    columns = column + tl.arange(0, BN)
    mask = (rows < limit)[:, None] & (columns < I)[None, :]
    at = z + rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    h = silu * up
    sums = tl.sum(dh * h, 1)
    dh *= weight[:, None]
    tl.store(at, (dh * up * (sigmoid + silu * (1.0 - sigmoid))).to(z.dtype.element_ty), mask=mask)
    tl.store(at + I, (dh * silu).to(z.dtype.element_ty), mask=mask)
    place = scaled + rows.to(tl.int64)[:, None] * I + columns[None, :]
    tl.store(place, (h * weight[:, None]).to(scaled.dtype.element_ty), mask=mask)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def down_backward_kernel(
    dy, down, low, down_a, z, scaled, weights, partial, slot_of_row, ends, tile_expert, tile_row, tile_count, num_rows,
    H: tl.constexpr, I: tl.constexpr, RANK: tl.constexpr, SHARED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, ALIGN: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Back through the down projection and SwiGLU, without storing the gradient between them.

    dy: descriptor of rows [M, H]; down: descriptor of [E, H, I]; z: [M, 2I] holds [gate | up] and takes their
    gradients; scaled: [M, I] takes weight * h; partial: float32 [blocks of I, M] takes each block's part of
    sum(dh * h), the gradient of the routing weight. low: rows [M, R] = dy @ down_b; down_a: [E or 1, R, I].
    """
    n_blocks: tl.constexpr = (I + BN - 1) // BN
    total = tl.load(tile_count) * n_blocks
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        tile = index // n_blocks
        block = index % n_blocks
        column = block * BN
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_row + tile)
        end = tl.load(ends + expert)
        limit = (end + ALIGN - 1) // ALIGN * ALIGN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            acc = dot(dy.load([row, k]), down.load([expert, k, column]).reshape(BK, BN), acc)
        rows = row + tl.arange(0, BM)
        if RANK > 0:
            columns = column + tl.arange(0, BN)
            lane = tl.arange(0, RANK)
            factor = 0 if SHARED else expert
            left = tl.load(
                low + rows.to(tl.int64)[:, None] * RANK + lane[None, :], mask=(rows < end)[:, None], other=0.0
            )
            at = down_a + (factor * RANK + lane)[:, None] * I + columns[None, :]
            acc = dot(left, tl.load(at, mask=(columns < I)[None, :], other=0.0), acc)
        slot = tl.load(slot_of_row + rows, mask=rows < end, other=0)
        weight = tl.load(weights + slot, mask=rows < end, other=0.0)
        # In quarters: the whole tile's gates, gradients and products at once do not fit the registers.
        quarter: tl.constexpr = BN // 4
        left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        one, two = left.reshape(BM, 2, quarter).permute(0, 2, 1).split()
        three, four = right.reshape(BM, 2, quarter).permute(0, 2, 1).split()
        sums = _swiglu_backward(one, z, scaled, weight, rows, limit, column, I, quarter)
        sums += _swiglu_backward(two, z, scaled, weight, rows, limit, column + quarter, I, quarter)
        sums += _swiglu_backward(three, z, scaled, weight, rows, limit, column + 2 * quarter, I, quarter)
        sums += _swiglu_backward(four, z, scaled, weight, rows, limit, column + 3 * quarter, I, quarter)
        tl.store(partial + block.to(tl.int64) * num_rows + rows, sums, mask=rows < end)


@triton.jit
def weight_gradient_kernel(
    a, b, gradient, starts, ends, expert_order,
    P: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """gradient[e] [P, Q] = sum over the rows of e of a[row] [P] outer b[row] [Q]; when ADD, it is added to.

    a, b: descriptors with rows of M, padding rows zero; gradient: [E, P, Q], zeros for experts without rows. The
    busiest experts come first, so that none of them is alone at the end.
    """
    p_blocks: tl.constexpr = (P + BP - 1) // BP
    q_blocks: tl.constexpr = (Q + BQ - 1) // BQ
    pid = tl.program_id(0)
    expert = tl.load(expert_order + pid // (p_blocks * q_blocks))
    p = pid % (p_blocks * q_blocks) // q_blocks * BP
    q = pid % q_blocks * BQ
    acc = tl.zeros((BP, BQ), tl.float32)
    for row in range(tl.load(starts + expert), tl.load(ends + expert), BK):
        acc = dot(a.load([row, p]).T, b.load([row, q]), acc)
    ps = p + tl.arange(0, BP)
    qs = q + tl.arange(0, BQ)
    at = gradient + expert.to(tl.int64) * (P * Q) + ps[:, None] * Q + qs[None, :]
    mask = (ps < P)[:, None] & (qs < Q)[None, :]
    if ADD:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(gradient.dtype.element_ty), mask=mask)
