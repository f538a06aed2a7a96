"""Kernels of the gradients of attention without a causal mask, see `triton_attention_kernels`.

Two passes make the scores anew: the queries' gradients step over the keys, then the keys' and values' gradients over
the queries. p = exp(scores - lse), ds = p * (dout @ v.T - delta), dq = ds @ k, dk = ds.T @ q, dv = p.T @ dout
(FlashAttention, arXiv:2205.14135).
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from train.ops.triton_attention_kernels import LOG2E, load, load_step, place, products, store, without_missing
from train.ops.triton_tiles import dot


@triton.jit
def _add_query_gradient(
    q, q_rest, dout, dout_rest, dq, dq_rest, lse2, delta, k, v, stride_k, stride_v, k_boxes, k_rest_boxes, v_boxes,
    v_rest_boxes, at, k_column, v_column, left, factor, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dq += ds @ k over N keys, of which `left` exist."""
    keys = load_step(k, stride_k, k_boxes, at, k_column, left, SIZE, 0, FIRST, N, EDGE)
    values = load_step(v, stride_v, v_boxes, at, v_column, left, SIZE, 0, FIRST, N, EDGE)
    keys_rest, values_rest = keys, values
    if REST > 0:
        keys_rest = load_step(k, stride_k, k_rest_boxes, at, k_column, left, SIZE, FIRST, REST, N, EDGE)
        values_rest = load_step(v, stride_v, v_rest_boxes, at, v_column, left, SIZE, FIRST, REST, N, EDGE)
    scores = products(q, q_rest, keys, keys_rest, M, N, REST)
    # exp2(0 - lse2) may be infinite, and times the zeros loaded for a key NaN
    scores = without_missing(scores, left, N, EDGE)
    dp = products(dout, dout_rest, values, values_rest, M, N, REST)
    ds = tl.exp2(scores * factor - lse2[:, None]) * (dp - delta[:, None])
    ds = ds.to(keys.dtype)
    dq = dot(ds, keys, dq)
    if REST > 0:
        dq_rest = dot(ds, keys_rest, dq_rest)
    return dq, dq_rest


@triton.jit
def query_gradient_kernel(
    q, k, v, out, dout, k_boxes, k_rest_boxes, v_boxes, v_rest_boxes, lse, stats, dq, tiles, factor, scale, total,
    stride_q, stride_k, stride_v, stride_dout, HEADS: tl.constexpr, SIZE: tl.constexpr, HEAD_Q: tl.constexpr,
    HEAD_K: tl.constexpr, HEAD_V: tl.constexpr, HEAD_DOUT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [T, H, D] of M queries. For the keys' gradients stats float32 [2, H, T]: their lse in base 2, and
    delta = sum(dout * out) over D."""
    head, at, start, length, rows = place(tiles, HEADS)
    q += at * stride_q + head * HEAD_Q
    k += head * HEAD_K
    v += head * HEAD_V
    out += at * (HEADS * SIZE) + head * SIZE
    dout += at * stride_dout + head * HEAD_DOUT
    queries = load(q, stride_q, rows, SIZE, 0, FIRST, M, True)
    douts = load(dout, stride_dout, rows, SIZE, 0, FIRST, M, True)
    outs = load(out, HEADS * SIZE, rows, SIZE, 0, FIRST, M, True)
    deltas = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
    queries_rest, douts_rest = queries, douts
    if REST > 0:
        queries_rest = load(q, stride_q, rows, SIZE, FIRST, REST, M, True)
        douts_rest = load(dout, stride_dout, rows, SIZE, FIRST, REST, M, True)
        outs = load(out, HEADS * SIZE, rows, SIZE, FIRST, REST, M, True)
        deltas += tl.sum(outs.to(tl.float32) * douts_rest.to(tl.float32), 1)
    row = tl.arange(0, M)
    there = head.to(tl.int64) * total + at + row
    lse2 = tl.load(lse + there, mask=row < rows, other=float("inf")) * LOG2E
    tl.store(stats + there, lse2, mask=row < rows)
    tl.store(stats + (HEADS + head).to(tl.int64) * total + at + row, deltas, mask=row < rows)
    acc = tl.zeros((M, FIRST), tl.float32)
    acc_rest = tl.zeros((M, REST if REST > 0 else 16), tl.float32)
    whole = length if END == 0 else length // N * N
    for key in tl.range(0, whole, N, num_stages=STAGES):
        acc, acc_rest = _add_query_gradient(
            queries, queries_rest, douts, douts_rest, acc, acc_rest, lse2, deltas, k, v, stride_k, stride_v, k_boxes,
            k_rest_boxes, v_boxes, v_rest_boxes, start + key, head * HEAD_K, head * HEAD_V, length - key, factor, SIZE,
            FIRST, REST, M, N, 2 if END == 0 else 0,
        )  # fmt: skip
    if END > 0:
        for key in tl.range(whole, length, END, num_stages=1):
            acc, acc_rest = _add_query_gradient(
                queries, queries_rest, douts, douts_rest, acc, acc_rest, lse2, deltas, k, v, stride_k, stride_v,
                k_boxes, k_rest_boxes, v_boxes, v_rest_boxes, start + key, head * HEAD_K, head * HEAD_V, length - key,
                factor, SIZE, FIRST, REST, M, END, 1,
            )  # fmt: skip
    dq += at * (HEADS * SIZE) + head * SIZE
    store(dq, HEADS * SIZE, rows, acc * scale, acc_rest * scale, SIZE, FIRST, REST, M)


@triton.jit
def _add_key_gradients(
    k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, q, dout, stats, stride_q, stride_dout, q_boxes, q_rest_boxes,
    dout_boxes, dout_rest_boxes, stats_boxes, lse_at, delta_at, at, q_column, dout_column, left, factor,
    SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dv += p.T @ dout, dk += ds.T @ q over N queries. Beyond the last one lse is infinite, so that p is 0."""
    queries = load_step(q, stride_q, q_boxes, at, q_column, left, SIZE, 0, FIRST, N, EDGE)
    douts = load_step(dout, stride_dout, dout_boxes, at, dout_column, left, SIZE, 0, FIRST, N, EDGE)
    queries_rest, douts_rest = queries, douts
    if REST > 0:
        queries_rest = load_step(q, stride_q, q_rest_boxes, at, q_column, left, SIZE, FIRST, REST, N, EDGE)
        douts_rest = load_step(dout, stride_dout, dout_rest_boxes, at, dout_column, left, SIZE, FIRST, REST, N, EDGE)
    row = tl.arange(0, N)
    if stats_boxes is None or EDGE == 1:
        lse2 = tl.load(stats + (lse_at + at) + row, mask=row < left, other=float("inf"))
        deltas = tl.load(stats + (delta_at + at) + row, mask=row < left, other=0.0)
    else:
        lse2 = stats_boxes.load([(lse_at + at).to(tl.int32)])
        deltas = stats_boxes.load([(delta_at + at).to(tl.int32)])
        if EDGE == 2:
            lse2 = tl.where(row < left, lse2, float("inf"))
    p = tl.exp2(products(k, k_rest, queries, queries_rest, M, N, REST) * factor - lse2[None, :])
    dp = products(v, v_rest, douts, douts_rest, M, N, REST)
    rounded = p.to(douts.dtype)
    dv = dot(rounded, douts, dv)
    if REST > 0:
        dv_rest = dot(rounded, douts_rest, dv_rest)
    ds = (p * (dp - deltas[None, :])).to(queries.dtype)
    dk = dot(ds, queries, dk)
    if REST > 0:
        dk_rest = dot(ds, queries_rest, dk_rest)
    return dk, dk_rest, dv, dv_rest


@triton.jit
def key_gradients_kernel(
    q, k, v, dout, q_boxes, q_rest_boxes, dout_boxes, dout_rest_boxes, stats, stats_boxes, dk, dv, tiles, factor, scale,
    total, stride_q, stride_k, stride_v, stride_dout, HEADS: tl.constexpr, SIZE: tl.constexpr, HEAD_Q: tl.constexpr,
    HEAD_K: tl.constexpr, HEAD_V: tl.constexpr, HEAD_DOUT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv [T, H, D] of M keys."""
    head, at, start, length, rows = place(tiles, HEADS)
    k += at * stride_k + head * HEAD_K
    v += at * stride_v + head * HEAD_V
    q += head * HEAD_Q
    dout += head * HEAD_DOUT
    lse_at = head.to(tl.int64) * total
    delta_at = (HEADS + head).to(tl.int64) * total
    keys = load(k, stride_k, rows, SIZE, 0, FIRST, M, True)
    values = load(v, stride_v, rows, SIZE, 0, FIRST, M, True)
    keys_rest, values_rest = keys, values
    if REST > 0:
        keys_rest = load(k, stride_k, rows, SIZE, FIRST, REST, M, True)
        values_rest = load(v, stride_v, rows, SIZE, FIRST, REST, M, True)
    acc_k = tl.zeros((M, FIRST), tl.float32)
    acc_v = tl.zeros((M, FIRST), tl.float32)
    acc_k_rest = tl.zeros((M, REST if REST > 0 else 16), tl.float32)
    acc_v_rest = tl.zeros((M, REST if REST > 0 else 16), tl.float32)
    whole = length if END == 0 else length // N * N
    for query in tl.range(0, whole, N, num_stages=STAGES):
        acc_k, acc_k_rest, acc_v, acc_v_rest = _add_key_gradients(
            keys, keys_rest, values, values_rest, acc_k, acc_k_rest, acc_v, acc_v_rest, q, dout, stats, stride_q,
            stride_dout, q_boxes, q_rest_boxes, dout_boxes, dout_rest_boxes, stats_boxes, lse_at, delta_at,
            start + query, head * HEAD_Q, head * HEAD_DOUT, length - query, factor, SIZE, FIRST, REST, M, N,
            2 if END == 0 else 0,
        )  # fmt: skip
    if END > 0:
        for query in tl.range(whole, length, END, num_stages=1):
            acc_k, acc_k_rest, acc_v, acc_v_rest = _add_key_gradients(
                keys, keys_rest, values, values_rest, acc_k, acc_k_rest, acc_v, acc_v_rest, q, dout, stats, stride_q,
                stride_dout, q_boxes, q_rest_boxes, dout_boxes, dout_rest_boxes, stats_boxes, lse_at, delta_at,
                start + query, head * HEAD_Q, head * HEAD_DOUT, length - query, factor, SIZE, FIRST, REST, M, END, 1,
            )  # fmt: skip
    to = at * (HEADS * SIZE) + head * SIZE
    store(dk + to, HEADS * SIZE, rows, acc_k * scale, acc_k_rest * scale, SIZE, FIRST, REST, M)
    store(dv + to, HEADS * SIZE, rows, acc_v, acc_v_rest, SIZE, FIRST, REST, M)
