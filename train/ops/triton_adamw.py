"""AdamW in one kernel for parameters and averages in float32 or bfloat16: each is read and written once. Small ones go
many at a time, by their addresses; bits are those of one at a time."""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.ops.triton_rounding import draw, round_up_or_down, whole_index

BLOCK = 1024
SMALL = 1 << 20  # elements of those that go many at a time
PROGRAMS = 64  # for each of them, at most
NO_KEY = (0, 0)
ALIGNMENT = 16  # bytes, and elements of the whole: what memory is read in
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    """Hashable: see `train.optim.adamw.AdamWNumbers`."""

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


Update = tuple[Tensors, Numbers, "tuple[Key, Key] | None"]


def adamw(tensors: Tensors, numbers: Numbers, draws: tuple[Key, Key] | None) -> None:
    """In place, as `train.optim.adamw.adamw_update`."""
    size = tensors.parameter.numel()
    words, where = _key(draws)
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        tensors.parameter, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq, size, *_of_step(numbers), *words,
        *where, RANDOM=draws is not None, DENSE=where[1] == where[2], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True)
class _Alike:
    """What is the same for all of a launch. aligned: addresses and sizes are multiples of `ALIGNMENT`."""

    numbers: Numbers
    dtypes: tuple[torch.dtype, ...]
    random: bool
    dense: bool
    aligned: bool

    def launch(self, lines: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """lines: of the kernel's table."""
        # pinned, so that the host goes on; torch gives the memory to nobody else before it is copied
        table = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda")
        programs = min(PROGRAMS, max(triton.cdiv(line[4], BLOCK) for line in lines))
        _adamw_many_kernel[(len(lines) * programs,)](
            table.to(device, non_blocking=True), programs, *_of_step(self.numbers),
            *(DTYPES[dtype] for dtype in self.dtypes), RANDOM=self.random, DENSE=self.dense, ALIGNED=self.aligned,
            COLUMNS=table.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def adamw_many(updates: Sequence[Update]) -> None:
    """Each as `adamw`, the small ones in a launch for all that are alike."""
    alike: dict[_Alike, list[tuple[int, ...]]] = {}
    for tensors, numbers, draws in updates:
        size = tensors.parameter.numel()
        if size > SMALL:
            adamw(tensors, numbers, draws)
        elif size:
            parts = (tensors.parameter, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq)
            words, where = _key(draws)
            addresses = [part.data_ptr() for part in parts]
            aligned = not (size % ALIGNMENT or any(address % ALIGNMENT for address in addresses))
            dtypes = tuple(part.dtype for part in parts)
            kind = _Alike(numbers, dtypes, draws is not None, where[1] == where[2], aligned)
            alike.setdefault(kind, []).append((*addresses, size, *words, *where))
    for kind, lines in alike.items():
        kind.launch(lines, updates[0][0].parameter.device)


def _of_step(numbers: Numbers) -> tuple[float, ...]:
    """As the kernels take them."""
    return (
        1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.eps, numbers.kept, numbers.size, 1 / numbers.root
    )  # fmt: skip


def _key(draws: tuple[Key, Key] | None) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """(words of both, base, inner and stride)."""
    if draws is None:
        return (*NO_KEY, *NO_KEY), (0, 1, 1)
    place = draws[0].place
    return (*draws[0].words, *draws[1].words), (place.base, place.inner, place.stride)


@triton.jit
def _store(to, at, value, bits, mask, RANDOM: tl.constexpr):
    if RANDOM and to.dtype.element_ty == tl.bfloat16:
        tl.store(to + at, round_up_or_down(value, bits), mask=mask)
    else:
        tl.store(to + at, value.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _update(
    at, parameter, gradient, exp_avg, exp_avg_sq, size, taken1, beta2, taken2, eps, kept, lr, over_root,
    first_0, first_1, second_0, second_1, base, inner, stride, RANDOM: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Of elements at these int64 places. first: key of the parameter's (lower half) and the first average's bits (upper
    half); second: of the second average's."""
    mask = at < size
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(parameter + at, mask=mask, other=0.0).to(tl.float32)
    # which sums and products are one operation is not left to the compiler: it decides otherwise in each kernel, and
    # parameters on several ranks, or in portions, would have other last bits
    m = tl.fma(g - m, taken1 + tl.zeros_like(m), m)
    v = tl.fma(taken2 * g, g, v * beta2)
    scale = tl.fma(tl.sqrt(v), over_root + tl.zeros_like(v), eps + tl.zeros_like(v))
    p = tl.fma(p, kept + tl.zeros_like(p), -(lr * m / scale))
    first = tl.zeros(at.shape, tl.uint32)
    second = tl.zeros(at.shape, tl.uint32)
    if RANDOM:
        index = whole_index(at, base, inner, stride, DENSE)
        first = draw(index, first_0, first_1)
        second = draw(index, second_0, second_1)
    _store(parameter, at, p, first, mask, RANDOM)
    _store(exp_avg, at, m, first >> 16, mask, RANDOM)
    _store(exp_avg_sq, at, v, second, mask, RANDOM)


@triton.jit(
    do_not_specialize=["first_0", "first_1", "second_0", "second_1", "base", "inner", "stride"],
)
def _adamw_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, size, taken1, beta2, taken2, eps, kept, lr, over_root,
    first_0, first_1, second_0, second_1, base, inner, stride,
    RANDOM: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update(
        at, parameter, gradient, exp_avg, exp_avg_sq, size, taken1, beta2, taken2, eps, kept, lr, over_root,
        first_0, first_1, second_0, second_1, base, inner, stride, RANDOM, DENSE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def _adamw_many_kernel(
    table, programs, taken1, beta2, taken2, eps, kept, lr, over_root, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr,
    EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, RANDOM: tl.constexpr, DENSE: tl.constexpr, ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table: int64 [tensors, COLUMNS]: four addresses, elements, words of both keys, base, inner, stride; so many
    programs for each tensor take one block after another."""
    line = table + (tl.program_id(0) // programs) * COLUMNS
    size = tl.load(line + 4)
    parameter = _tensor(line, PARAMETER, ALIGNED)
    gradient = _tensor(line + 1, GRADIENT, ALIGNED)
    exp_avg = _tensor(line + 2, EXP_AVG, ALIGNED)
    exp_avg_sq = _tensor(line + 3, EXP_AVG_SQ, ALIGNED)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    first_0 = tl.load(line + 5).to(tl.int32)
    first_1 = tl.load(line + 6).to(tl.int32)
    second_0 = tl.load(line + 7).to(tl.int32)
    second_1 = tl.load(line + 8).to(tl.int32)
    base = tl.load(line + 9)
    inner = tl.load(line + 10)
    stride = tl.load(line + 11)
    for block in tl.range(tl.program_id(0) % programs, tl.cdiv(size, BLOCK), programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _update(
            at, parameter, gradient, exp_avg, exp_avg_sq, size, taken1, beta2, taken2, eps, kept, lr, over_root,
            first_0, first_1, second_0, second_1, base, inner, stride, RANDOM, DENSE,
        )  # fmt: skip


@triton.jit
def _tensor(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that is stored there."""
    pointer = tl.load(place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
