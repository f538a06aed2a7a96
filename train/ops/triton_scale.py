"""Tensors multiplied by a number that is on the device, such as the factor that clipping found.

torch multiplies a bfloat16 tensor by a float32 scalar tensor element by element, at a fifth of the copy rate, and so in
lists of tensors (`_foreach_mul_`), too. Nothing is read or written where the factor is 1.
"""

# kernels take pointers, which have no type here
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def scale(values: Tensor, factor: Tensor) -> None:
    """values <- values * factor, in float32, rounded once. values: contiguous, of any dtype; factor: float32 []."""
    count = values.numel()
    if count:
        _scale_kernel[(triton.cdiv(count, BLOCK),)](values, factor, count, BLOCK=BLOCK, num_warps=8)


# count is specialised on (a multiple of 16 or not): else masks break every load into single elements
@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        found = tl.load(values + at, mask=mask, other=0.0).to(tl.float32) * by
        tl.store(values + at, found.to(values.dtype.element_ty), mask=mask)
