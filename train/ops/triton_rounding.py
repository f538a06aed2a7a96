"""Stochastic rounding inside Triton kernels: the bits of `train.optim.rounding`, drawn where they are used."""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
MULTIPLIER_2 = tl.constexpr(0x846CA68B)
HIGH_WORD = tl.constexpr(0x9E3779B9)


@triton.jit
def _mix(x):
    """lowbias32 of uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full(x.shape, MULTIPLIER_1, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full(x.shape, MULTIPLIER_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def draw(index, word_0, word_1):
    """uint32 random bits of elements with these int64 indexes in their whole tensor; words: the key, int32."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    first = tl.full(low.shape, 0, tl.uint32) + word_0.to(tl.uint32, bitcast=True)
    second = tl.full(low.shape, 0, tl.uint32) + word_1.to(tl.uint32, bitcast=True)
    mixed = _mix(low ^ first)
    return _mix(mixed ^ (high * tl.full(low.shape, HIGH_WORD, tl.uint32)) ^ second)


@triton.jit
def whole_index(i, base, inner, stride, DENSE: tl.constexpr):
    """int64 index in the whole tensor of elements i, int64, of this rank's part; DENSE: it is one run of elements,
    which spares the division."""
    if DENSE:
        return base + i
    else:
        row = i // inner
        return base + row * stride + (i - row * inner)


@triton.jit
def round_up_or_down(value, bits):
    """bfloat16 of float32 values: the lower 16 of the bits are added below the place that is kept; NaN stays NaN."""
    raw = value.to(tl.uint32, bitcast=True)
    kept = (raw + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(value != value, value, kept.to(tl.float32, bitcast=True)).to(tl.bfloat16)
