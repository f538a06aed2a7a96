"""Kernels of attention without a causal mask on packed documents: the results, and their gradients in two passes.

A program owns the rows of one tile of one document and head, and steps over the document's other rows: whole steps
without any mask first, then the ragged end in steps of its own, smaller size. Programs of all heads of a tile are
neighbours, so that they share the lines of the caches in which rows of neighbouring heads lie. Nothing is added up in
memory, so the same inputs give the same bits.

A head of 72 would take matrix products of 128. It is cut into a power of two and a padded rest (64 + 16) instead:
scores are the sum of two products, and results have two accumulators. REST 0: no rest.

Shapes: T rows, H heads, D = SIZE head size; tiles: int32 [n, 3]: first row of the document, its rows, first row of
the tile within it. lse, delta: float32 [H, T]. factor: what scores are multiplied by, times log2(e).
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from train.ops.triton_tiles import dot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load(base, stride, rows, SIZE: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
          RAGGED: tl.constexpr):  # fmt: skip
    """[N, WIDTH]: columns FROM .. FROM + WIDTH of N rows, zeros beyond SIZE and, where RAGGED, from row `rows` on."""
    row = tl.arange(0, N)[:, None]
    lane = FROM + tl.arange(0, WIDTH)[None, :]
    at = base + (row * stride + lane)
    if RAGGED and FROM + WIDTH > SIZE:
        found = tl.load(at, mask=(row < rows) & (lane < SIZE), other=0.0)
    elif RAGGED:
        found = tl.load(at, mask=row < rows, other=0.0)
    elif FROM + WIDTH > SIZE:
        found = tl.load(at, mask=lane < SIZE, other=0.0)
    else:
        found = tl.load(at)
    return found


@triton.jit
def load_step(base, stride, boxes, at, column, left, SIZE: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr,
              N: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """[N, WIDTH] of the rows from `at` on. EDGE: 0: all exist; 1: `left` of them, the others are zeros; 2: as 1, but
    where there are boxes, a descriptor of all rows and heads, columns beyond SIZE are the next head's and rows from
    `left` on the next document's."""
    if boxes is None or EDGE == 1:
        found = load(base + at * stride, stride, left, SIZE, FROM, WIDTH, N, EDGE > 0)
    else:
        found = boxes.load([at.to(tl.int32), column + FROM])
    return found


@triton.jit
def store(base, stride, rows, first, rest, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    row = tl.arange(0, N)[:, None]
    lane = tl.arange(0, FIRST)[None, :]
    kind = base.dtype.element_ty
    tl.store(base + (row * stride + lane), first.to(kind), mask=(row < rows) & (lane < SIZE))
    if REST > 0:
        lane = FIRST + tl.arange(0, REST)[None, :]
        tl.store(base + (row * stride + lane), rest.to(kind), mask=(row < rows) & (lane < SIZE))


@triton.jit
def products(a, a_rest, b, b_rest, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr):
    """float32 [M, N] = a @ b.T over both parts of a head."""
    sums = dot(a, tl.trans(b), tl.zeros((M, N), tl.float32))
    if REST > 0:
        sums = dot(a_rest, tl.trans(b_rest), sums)
    return sums


@triton.jit
def without_missing(scores, left, N: tl.constexpr, EDGE: tl.constexpr):
    """-inf for columns from `left` on."""
    if EDGE == 1:
        scores = tl.where(tl.arange(0, N)[None, :] < left, scores, float("-inf"))
    elif EDGE == 2:  # noqa: SIM102  # the compiler knows it, and not the next
        if left < N:
            scores = tl.where(tl.arange(0, N)[None, :] < left, scores, float("-inf"))
    return scores


@triton.jit
def place(tiles, HEADS: tl.constexpr):
    """(head, first row of the tile, first row of the document, rows of the document, and from the tile's first on)."""
    program = tl.program_id(0)
    entry = tiles + program // HEADS * 3
    start = tl.load(entry).to(tl.int64)
    length = tl.load(entry + 1)
    row = tl.load(entry + 2)
    return program % HEADS, start + row, start, length, length - row


@triton.jit
def _attend(
    q, q_rest, acc, acc_rest, top, sums, k, v, stride_k, stride_v, k_boxes, k_rest_boxes, v_boxes, v_rest_boxes, at,
    k_column, v_column, left, factor, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2, over N keys of which `left` exist."""
    keys = load_step(k, stride_k, k_boxes, at, k_column, left, SIZE, 0, FIRST, N, EDGE)
    values = load_step(v, stride_v, v_boxes, at, v_column, left, SIZE, 0, FIRST, N, EDGE)
    keys_rest, values_rest = keys, values
    if REST > 0:
        keys_rest = load_step(k, stride_k, k_rest_boxes, at, k_column, left, SIZE, FIRST, REST, N, EDGE)
        values_rest = load_step(v, stride_v, v_rest_boxes, at, v_column, left, SIZE, FIRST, REST, N, EDGE)
    scores = products(q, q_rest, keys, keys_rest, M, N, REST)
    scores = without_missing(scores, left, N, EDGE)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    sums = sums * shrink + tl.sum(p, 1)
    p = p.to(values.dtype)
    acc = dot(p, values, acc * shrink[:, None])
    if REST > 0:
        acc_rest = dot(p, values_rest, acc_rest * shrink[:, None])
    return acc, acc_rest, new_top, sums


@triton.jit
def forward_kernel(
    q, k, v, k_boxes, k_rest_boxes, v_boxes, v_rest_boxes, out, lse, tiles, factor, total, stride_q, stride_k,
    stride_v, HEADS: tl.constexpr, SIZE: tl.constexpr, HEAD_Q: tl.constexpr, HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] and lse of M queries."""
    head, at, start, length, rows = place(tiles, HEADS)
    q += at * stride_q + head * HEAD_Q
    k += head * HEAD_K
    v += head * HEAD_V
    queries = load(q, stride_q, rows, SIZE, 0, FIRST, M, True)
    queries_rest = queries
    if REST > 0:
        queries_rest = load(q, stride_q, rows, SIZE, FIRST, REST, M, True)
    acc = tl.zeros((M, FIRST), tl.float32)
    acc_rest = tl.zeros((M, REST if REST > 0 else 16), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    whole = length if END == 0 else length // N * N
    for key in tl.range(0, whole, N, num_stages=STAGES):
        acc, acc_rest, top, sums = _attend(
            queries, queries_rest, acc, acc_rest, top, sums, k, v, stride_k, stride_v, k_boxes, k_rest_boxes, v_boxes,
            v_rest_boxes, start + key, head * HEAD_K, head * HEAD_V, length - key, factor, SIZE, FIRST, REST, M, N,
            2 if END == 0 else 0,
        )  # fmt: skip
    if END > 0:
        for key in tl.range(whole, length, END, num_stages=1):
            acc, acc_rest, top, sums = _attend(
                queries, queries_rest, acc, acc_rest, top, sums, k, v, stride_k, stride_v, k_boxes, k_rest_boxes,
                v_boxes, v_rest_boxes, start + key, head * HEAD_K, head * HEAD_V, length - key, factor, SIZE, FIRST,
                REST, M, END, 1,
            )  # fmt: skip
    share = 1.0 / sums
    out += at * (HEADS * SIZE) + head * SIZE
    store(out, HEADS * SIZE, rows, acc * share[:, None], acc_rest * share[:, None], SIZE, FIRST, REST, M)
    row = tl.arange(0, M)
    tl.store(lse + head.to(tl.int64) * total + at + row, (top + tl.log2(sums)) * LN2, mask=row < rows)
