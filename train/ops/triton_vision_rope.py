"""Rotary embedding of the vision tower's queries and keys in one kernel, both ways; the backend `triton`.

A program takes a run of (token, head, pair), so that no lane is idle though a head of 72 has 36 pairs. The kernel of
the text model (`triton_rope`), which takes a token in padded heads and pairs, reached 78 % of the copy rate here; this
one 93 % (one H200, T = 32768, 16 heads of 72, bfloat16).

Shapes: T rows, H heads, D head size, R = D / 2 rotated pairs: element i of a head is turned with element i + R.
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

from train.ops.triton_rope import dense_heads

BLOCK = 1024


def vision_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(q, k) turned by the angles. q, k: [T, H, D], whose rows may lie apart, as in a view of a joint projection; cos,
    sin: float32 [T, D/2], without gradient. Computed in float32, rounded once."""
    if q.shape != k.shape or q.shape[2] != 2 * cos.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}: must be [T, H, D] twice, [T, D/2]"
        )
    return _VisionRope.apply(dense_heads(q), dense_heads(k), cos.contiguous(), sin.contiguous())


class _VisionRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_q: Tensor, dout_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_turn(dense_heads(dout_q), dense_heads(dout_k), cos, sin, -1.0), None, None


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """sign -1 turns back."""
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    tokens, heads, _ = q.shape
    pairs = tokens * heads * cos.shape[1]
    if pairs:
        _turn_kernel[(triton.cdiv(pairs, BLOCK),)](
            q, k, cos, sin, out_q, out_k, q.stride(0), k.stride(0), pairs, sign, HEADS=heads, R=cos.shape[1],
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out_q, out_k


# pairs are specialised on (a multiple of 16 or not): else masks break every load into single elements
@triton.jit
def _turn_kernel(
    q, k, cos, sin, out_q, out_k, stride_q, stride_k, pairs, sign, HEADS: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    head = pair // R
    lane = pair % R
    token = head // HEADS
    angle = token * R + lane
    # all heads of a token read its angles again, from the first cache
    c = tl.load(cos + angle, mask=mask, other=0.0, eviction_policy="evict_last")
    s = tl.load(sin + angle, mask=mask, other=0.0, eviction_policy="evict_last") * sign
    inner = head % HEADS * (2 * R) + lane
    at_q, at_k = q + token * stride_q + inner, k + token * stride_k + inner
    q_first = tl.load(at_q, mask=mask, other=0.0).to(tl.float32)
    q_second = tl.load(at_q + R, mask=mask, other=0.0).to(tl.float32)
    k_first = tl.load(at_k, mask=mask, other=0.0).to(tl.float32)
    k_second = tl.load(at_k + R, mask=mask, other=0.0).to(tl.float32)
    to = head * (2 * R) + lane
    kind = out_q.dtype.element_ty
    tl.store(out_q + to, (q_first * c - q_second * s).to(kind), mask=mask)
    tl.store(out_q + to + R, (q_second * c + q_first * s).to(kind), mask=mask)
    tl.store(out_k + to, (k_first * c - k_second * s).to(kind), mask=mask)
    tl.store(out_k + to + R, (k_second * c + k_first * s).to(kind), mask=mask)
