"""What Muon does element by element, in one kernel before the orthogonalisation, one at its begin and one after it.

One H200, a layer's 604 M elements in bfloat16: a step takes 2.4 ms more than its Newton-Schulz alone; the bytes of the
first and the last kernel take 2.0 ms at the copy rate. Before sizes were specialised on it was 4.9 ms. `torch.div` from
bfloat16 to float16 took 2.9 ms where `divide` moves what a copy does in 0.6."""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_adamw import Key
from train.ops.triton_rounding import draw, round_up_or_down, whole_index

# sizes are specialised on (a multiple of 16 or not): else masks break every load into single elements
BLOCK = 2048


def average(
    gradient: Tensor, buffer: Tensor, out: Tensor, momentum: float, nesterov: bool, draws: Key | None, start: int
) -> None:
    """buffer <- buffer + (1 - momentum) (gradient - buffer); out: the new average, or with nesterov gradient +
    momentum (average - gradient). Contiguous, of one size, of any floating dtypes. start: elements of the rank's part
    before these."""
    size = buffer.numel()
    _average_kernel[(triton.cdiv(size, BLOCK),)](
        gradient, buffer, out, size, momentum, *_random(draws, start), NESTEROV=nesterov, RANDOM=draws is not None,
        DENSE=_dense(draws), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def change(parameter: Tensor, direction: Tensor, kept: float, size: float, draws: Key | None, start: int) -> None:
    """parameter <- kept parameter - size direction."""
    count = parameter.numel()
    _change_kernel[(triton.cdiv(count, BLOCK),)](
        parameter, direction, count, kept, size, *_random(draws, start), RANDOM=draws is not None,
        DENSE=_dense(draws), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def divide(matrices: Tensor, norms: Tensor, out: Tensor) -> None:
    """out <- matrices / norms, of [B, M, K] by float32 [B, 1, 1]; contiguous, of any floating dtypes."""
    count, size = matrices.shape[0], matrices[:1].numel()
    if matrices.numel():
        _divide_kernel[(count, triton.cdiv(size, BLOCK))](matrices, norms, out, size, BLOCK=BLOCK, num_warps=8)


def _random(draws: Key | None, start: int) -> tuple[Any, ...]:
    """Key, start, base, inner, stride."""
    if draws is None:
        return 0, 0, 0, 0, 1, 1
    return (*draws.words, start, draws.place.base, draws.place.inner, draws.place.stride)


def _dense(draws: Key | None) -> bool:
    return draws is None or draws.place.inner == draws.place.stride


@triton.jit
def _store(
    to, at, value, mask, word_0, word_1, start, base, inner, stride, RANDOM: tl.constexpr, DENSE: tl.constexpr
):  # fmt: skip
    if RANDOM and to.dtype.element_ty == tl.bfloat16:
        bits = draw(whole_index(start + at, base, inner, stride, DENSE), word_0, word_1)
        tl.store(to + at, round_up_or_down(value, bits), mask=mask)
    else:
        tl.store(to + at, value.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["word_0", "word_1", "start", "base", "inner", "stride"])
def _average_kernel(
    gradient, buffer, out, size, momentum, word_0, word_1, start, base, inner, stride,
    NESTEROV: tl.constexpr, RANDOM: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(buffer + at, mask=mask, other=0.0).to(tl.float32)
    # as in triton_adamw: the compiler has no choice of what is one operation
    m = tl.fma(g - m, (1.0 - momentum) + tl.zeros_like(m), m)
    mixed = m
    if NESTEROV:
        mixed = tl.fma(m - g, momentum + tl.zeros_like(m), g)
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)
    _store(buffer, at, m, mask, word_0, word_1, start, base, inner, stride, RANDOM, DENSE)


@triton.jit(do_not_specialize=["word_0", "word_1", "start", "base", "inner", "stride"])
def _change_kernel(
    parameter, direction, count, kept, size, word_0, word_1, start, base, inner, stride,
    RANDOM: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    p = tl.load(parameter + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(direction + at, mask=mask, other=0.0).to(tl.float32)
    changed = tl.fma(p, kept + tl.zeros_like(p), -(size * d))
    _store(parameter, at, changed, mask, word_0, word_1, start, base, inner, stride, RANDOM, DENSE)


@triton.jit
def _divide_kernel(matrices, norms, out, size, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    values = tl.load(matrices + matrix * size + at, mask=mask, other=0.0).to(tl.float32)
    divided = values / tl.load(norms + matrix)
    tl.store(out + matrix * size + at, divided.to(out.dtype.element_ty), mask=mask)
