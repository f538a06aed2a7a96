"""AdamW in one kernel for parameters and averages in float32 or bfloat16: each is read and written once."""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_rounding import draw, round_up_or_down, whole_index

BLOCK = 1024
NO_KEY = (0, 0)


class Tensors(Protocol):
    """Flat, contiguous, of one length: see `train.optim.adamw.AdamWTensors`."""

    @property
    def parameter(self) -> Tensor: ...
    @property
    def gradient(self) -> Tensor: ...
    @property
    def exp_avg(self) -> Tensor: ...
    @property
    def exp_avg_sq(self) -> Tensor: ...


class Numbers(Protocol):
    """See `train.optim.adamw.AdamWNumbers`."""

    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def kept(self) -> float: ...
    @property
    def size(self) -> float: ...
    @property
    def root(self) -> float: ...


class Place(Protocol):
    """Of a part in the whole tensor: see `train.optim.rounding.Place`."""

    @property
    def base(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def stride(self) -> int: ...


class Key(Protocol):
    """See `train.optim.rounding.Draws`."""

    @property
    def words(self) -> tuple[int, int]: ...
    @property
    def place(self) -> Place: ...


def adamw(tensors: Tensors, numbers: Numbers, draws: tuple[Key, Key] | None) -> None:
    """In place, as `train.optim.adamw.adamw_update`."""
    size = tensors.parameter.numel()
    place = None if draws is None else draws[0].place
    where = (0, 1, 1) if place is None else (place.base, place.inner, place.stride)
    words = (*NO_KEY, *NO_KEY) if draws is None else (*draws[0].words, *draws[1].words)
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        tensors.parameter, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq, size,
        1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.eps, numbers.kept, numbers.size, numbers.root,
        *words, *where, RANDOM=draws is not None, DENSE=where[1] == where[2], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _store(to, at, value, bits, mask, RANDOM: tl.constexpr):
    if RANDOM and to.dtype.element_ty == tl.bfloat16:
        tl.store(to + at, round_up_or_down(value, bits), mask=mask)
    else:
        tl.store(to + at, value.to(to.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["first_0", "first_1", "second_0", "second_1", "base", "inner", "stride"],
)
def _adamw_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, size, taken1, beta2, taken2, eps, kept, lr, root,
    first_0, first_1, second_0, second_1, base, inner, stride,
    RANDOM: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """first: key of the parameter's (lower half) and the first average's bits (upper half); second: of the second
    average's."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(parameter + at, mask=mask, other=0.0).to(tl.float32)
    m += taken1 * (g - m)
    v = v * beta2 + taken2 * g * g
    p = p * kept - lr * m / (tl.sqrt(v) / root + eps)
    first = tl.zeros((BLOCK,), tl.uint32)
    second = tl.zeros((BLOCK,), tl.uint32)
    if RANDOM:
        index = whole_index(at, base, inner, stride, DENSE)
        first = draw(index, first_0, first_1)
        second = draw(index, second_0, second_1)
    _store(parameter, at, p, first, mask, RANDOM)
    _store(exp_avg, at, m, first >> 16, mask, RANDOM)
    _store(exp_avg_sq, at, v, second, mask, RANDOM)
