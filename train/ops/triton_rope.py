"""Per-head RMSNorm of queries and keys and their rotary embedding in one kernel each way; the backend `triton`.

A program takes whole tokens, all heads of q and of k, so that the angles are read once. The backward pass normalises
again instead of keeping a second copy of q and k.

One H200, T = 32768, 32 + 4 heads of 128, bfloat16: forward 0.154 ms, 94 % of the copy rate, against 0.30 ms of the same
kernels one after another; forward and backward 0.44 ms, 83 %. With 8 warps the backward pass takes 20 % longer.

Shapes: T rows, Hq and Hkv heads, D head size, R rotated pairs (2R <= D; the rest of a head is only normalised).
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


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(q, k): each head divided by its rms and multiplied by the weight (left out where the weight is None), then
    turned by the angles. q: [T, Hq, D]; k: [T, Hkv, D]; weights: [D]; cos, sin: float32 [T, R], without gradient.
    Rows of q and k may lie apart, as in a view of a joint projection. Computed in float32, rounded once."""
    return _NormRope.apply(dense_heads(q), dense_heads(k), q_weight, k_weight, cos.contiguous(), sin.contiguous(), eps)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        if q.shape[0]:
            _forward_kernel[(q.shape[0],)](
                q, k, q_weight, k_weight, cos, sin, out_q, out_k, q.stride(0), k.stride(0), eps, **_shape(q, k, cos),
                Q_NORM=q_weight is not None, K_NORM=k_weight is not None, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        return out_q, out_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_q: Tensor, dout_k: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        tokens, _, dim = q.shape
        dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        programs = max(1, min(tokens, 8 * num_sms(q.device)))
        parts = torch.zeros(2, programs, dim, dtype=torch.float32, device=q.device)
        if tokens:
            _backward_kernel[(programs,)](
                q, k, q_weight, k_weight, cos, sin, dout_q.contiguous(), dout_k.contiguous(), dq, dk, parts[0],
                parts[1], tokens, q.stride(0), k.stride(0), ctx.eps, **_shape(q, k, cos),
                Q_NORM=q_weight is not None, K_NORM=k_weight is not None, num_warps=4,
            )  # fmt: skip
        sums = parts.sum(1)
        dweights = (None if w is None else part.to(w.dtype) for w, part in zip((q_weight, k_weight), sums, strict=True))
        return dq, dk, *dweights, None, None, None


@triton.jit
def _load_head_parts(
    x, COUNT: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr
):
    """(first [HEADS, BR], second [HEADS, BR], rest [HEADS, REST]) in float32 of a token's heads at x."""
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, BR)[None, :]
    at = x + head * D + lane
    mask = (head < COUNT) & (lane < R)
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + R, mask=mask, other=0.0).to(tl.float32)
    if 2 * R < D:
        tail = tl.arange(0, REST)[None, :]
        mask = (head < COUNT) & (tail < D - 2 * R)
        rest = tl.load(x + head * D + 2 * R + tail, mask=mask, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros((HEADS, REST), tl.float32)
    return first, second, rest


@triton.jit
def _store_head_parts(
    x, first, second, rest, COUNT: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, BR)[None, :]
    at = x + head * D + lane
    mask = (head < COUNT) & (lane < R)
    tl.store(at, first.to(x.dtype.element_ty), mask=mask)
    tl.store(at + R, second.to(x.dtype.element_ty), mask=mask)
    if 2 * R < D:
        tail = tl.arange(0, REST)[None, :]
        mask = (head < COUNT) & (tail < D - 2 * R)
        tl.store(x + head * D + 2 * R + tail, rest.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight_parts(weight, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr):
    lane = tl.arange(0, BR)
    tail = tl.arange(0, REST)
    first = tl.load(weight + lane, mask=lane < R, other=0.0).to(tl.float32)
    second = tl.load(weight + R + lane, mask=lane < R, other=0.0).to(tl.float32)
    rest = tl.load(weight + 2 * R + tail, mask=tail < D - 2 * R, other=0.0).to(tl.float32)
    return first[None, :], second[None, :], rest[None, :]


@triton.jit
def _forward_heads(
    first, second, rest, out, weight, cos, sin, eps, NORM: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    if NORM:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        w_first, w_second, w_rest = _load_weight_parts(weight, D, R, BR, REST)
        first, second, rest = first * scale * w_first, second * scale * w_second, rest * scale * w_rest
    turned, second = first * cos - second * sin, second * cos + first * sin
    _store_head_parts(out, turned, second, rest, COUNT, D, R, BR, REST, HEADS)


@triton.jit
def _backward_heads(
    first, second, rest, turned_first, turned_second, d_rest, dx, weight, cos, sin, eps, NORM: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Stores dx; returns this token's parts of the weight's gradient, not yet summed over the heads."""
    d_first = turned_first * cos + turned_second * sin
    d_second = turned_second * cos - turned_first * sin
    w_first, w_second, w_rest = d_first, d_second, d_rest
    if NORM:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        first, second, rest = first * scale, second * scale, rest * scale
        f_first, f_second, f_rest = _load_weight_parts(weight, D, R, BR, REST)
        w_first, w_second, w_rest = d_first * first, d_second * second, d_rest * rest
        mean = (tl.sum(w_first * f_first + w_second * f_second, 1) + tl.sum(w_rest * f_rest, 1))[:, None] / D
        d_first = scale * (d_first * f_first - first * mean)
        d_second = scale * (d_second * f_second - second * mean)
        d_rest = scale * (d_rest * f_rest - rest * mean)
    _store_head_parts(dx, d_first, d_second, d_rest, COUNT, D, R, BR, REST, HEADS)
    return w_first, w_second, w_rest


@triton.jit
def _forward_kernel(
    q, k, q_weight, k_weight, cos, sin, out_q, out_k, stride_q, stride_k, eps, Q_COUNT: tl.constexpr,
    K_COUNT: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, REST: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BR)
    c = tl.load(cos + token * R + lane, mask=lane < R, other=0.0)[None, :]
    s = tl.load(sin + token * R + lane, mask=lane < R, other=0.0)[None, :]
    # All loads before the first store: the compiler may not move a load over a store.
    q_first, q_second, q_rest = _load_head_parts(q + token * stride_q, Q_COUNT, D, R, BR, REST, Q_HEADS)
    k_first, k_second, k_rest = _load_head_parts(k + token * stride_k, K_COUNT, D, R, BR, REST, K_HEADS)
    at_q, at_k = out_q + token * (Q_COUNT * D), out_k + token * (K_COUNT * D)
    _forward_heads(q_first, q_second, q_rest, at_q, q_weight, c, s, eps, Q_NORM, Q_COUNT, Q_HEADS, D, R, BR, REST)
    _forward_heads(k_first, k_second, k_rest, at_k, k_weight, c, s, eps, K_NORM, K_COUNT, K_HEADS, D, R, BR, REST)


@triton.jit
def _store_sums(to, first, second, rest, D: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr):
    lane = tl.arange(0, BR)
    tail = tl.arange(0, REST)
    tl.store(to + lane, tl.sum(first, 0), mask=lane < R)
    tl.store(to + R + lane, tl.sum(second, 0), mask=lane < R)
    tl.store(to + 2 * R + tail, tl.sum(rest, 0), mask=tail < D - 2 * R)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    q, k, q_weight, k_weight, cos, sin, dout_q, dout_k, dq, dk, parts_q, parts_k, tokens, stride_q, stride_k, eps,
    Q_COUNT: tl.constexpr, K_COUNT: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, REST: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BR)
    q_first = tl.zeros((Q_HEADS, BR), tl.float32)
    q_second = tl.zeros((Q_HEADS, BR), tl.float32)
    q_rest = tl.zeros((Q_HEADS, REST), tl.float32)
    k_first = tl.zeros((K_HEADS, BR), tl.float32)
    k_second = tl.zeros((K_HEADS, BR), tl.float32)
    k_rest = tl.zeros((K_HEADS, REST), tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        c = tl.load(cos + token * R + lane, mask=lane < R, other=0.0)[None, :]
        s = tl.load(sin + token * R + lane, mask=lane < R, other=0.0)[None, :]
        at_q, at_k = token * (Q_COUNT * D), token * (K_COUNT * D)
        g_first, g_second, g_rest = _load_head_parts(dout_q + at_q, Q_COUNT, D, R, BR, REST, Q_HEADS)
        h_first, h_second, h_rest = _load_head_parts(dout_k + at_k, K_COUNT, D, R, BR, REST, K_HEADS)
        x_first, x_second, x_rest = g_first, g_second, g_rest
        if Q_NORM:
            x_first, x_second, x_rest = _load_head_parts(q + token * stride_q, Q_COUNT, D, R, BR, REST, Q_HEADS)
        y_first, y_second, y_rest = h_first, h_second, h_rest
        if K_NORM:
            y_first, y_second, y_rest = _load_head_parts(k + token * stride_k, K_COUNT, D, R, BR, REST, K_HEADS)
        first, second, rest = _backward_heads(
            x_first, x_second, x_rest, g_first, g_second, g_rest, dq + at_q, q_weight, c, s, eps, Q_NORM, Q_COUNT,
            Q_HEADS, D, R, BR, REST,
        )  # fmt: skip
        if Q_NORM:
            q_first += first
            q_second += second
            q_rest += rest
        first, second, rest = _backward_heads(
            y_first, y_second, y_rest, h_first, h_second, h_rest, dk + at_k, k_weight, c, s, eps, K_NORM, K_COUNT,
            K_HEADS, D, R, BR, REST,
        )  # fmt: skip
        if K_NORM:
            k_first += first
            k_second += second
            k_rest += rest
    if Q_NORM:
        _store_sums(parts_q + tl.program_id(0) * D, q_first, q_second, q_rest, D, R, BR, REST)
    if K_NORM:
        _store_sums(parts_k + tl.program_id(0) * D, k_first, k_second, k_rest, D, R, BR, REST)


def _shape(q: Tensor, k: Tensor, cos: Tensor) -> dict[str, int]:
    heads = {"Q_COUNT": q.shape[1], "K_COUNT": k.shape[1]}
    padded = {name.replace("COUNT", "HEADS"): triton.next_power_of_2(count) for name, count in heads.items()}
    dim, pairs = q.shape[2], cos.shape[1]
    rest = triton.next_power_of_2(max(1, dim - 2 * pairs))
    return {**heads, **padded, "D": dim, "R": pairs, "BR": triton.next_power_of_2(pairs), "REST": rest}


def dense_heads(x: Tensor) -> Tensor:
    """x [T, heads, D] whose heads lie side by side; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
